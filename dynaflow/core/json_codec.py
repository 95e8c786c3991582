"""Dataclasses as plain data for JSON, and back. Fields that have their default value are left out.

Reading checks all values by the dataclass's annotations and ignores unknown keys. The kinds that are known: str, int,
float, bool, dataclasses, `X | None`, Literal, tuple[X, ...], tuple[X, Y] and Mapping[str, X].
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from dynaflow.errors import shown

Reader = Callable[[Any], Any]
_NAMES = {str: "a string", int: "an integer", bool: "true or false"}


def encode(value: Any) -> Any:
    """Returns dicts, lists and plain values."""
    if is_dataclass(value):
        pairs = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: encode(v) for f, v in pairs if v != _default(f)}
    if isinstance(value, Mapping):
        return {name: encode(v) for name, v in value.items()}
    return [encode(v) for v in value] if isinstance(value, (tuple, list)) else value


def decode(kind: Any, data: Any) -> Any:
    """Returns the data as a `kind`. Raises ValueError, with the place in the data, if they are of another kind."""
    try:
        return _reader(kind)(data)
    except ValueError as e:  # its text starts with the place
        raise ValueError(str(e).removeprefix(".").removeprefix(": ")) from None


@functools.cache
def _reader(kind: Any) -> Reader:
    arguments, origin = get_args(kind), get_origin(kind)
    if NoneType in arguments:
        some = _reader(next(a for a in arguments if a is not NoneType))
        return lambda data: None if data is None else some(data)
    if is_dataclass(kind):
        return _of_object(kind, {f.name: _reader(get_type_hints(kind)[f.name]) for f in fields(kind)})
    if origin is Mapping:
        one = _reader(arguments[1])
        return lambda data: _of_object(dict, dict.fromkeys(_expect(dict, data, "an object"), one))(data)
    if origin is tuple:
        return _of_list([_reader(a) for a in arguments if a is not Ellipsis], Ellipsis in arguments)
    if origin is Literal:
        return lambda data: data if data in arguments else _wrong(f"one of {', '.join(arguments)}", data)
    if kind is float:
        whole = lambda data: type(data) is int and abs(data) < 1 << 1000  # noqa: E731
        return lambda data: float(data) if whole(data) else _expect(float, data, "a number")
    return lambda data: _expect(kind, data, _NAMES[kind])


def _of_object(kind: Any, readers: Mapping[str, Reader]) -> Reader:
    needed = {f.name for f in fields(kind) if _default(f) is MISSING} if is_dataclass(kind) else ()

    def read(data: Any) -> Any:
        found, name = {}, ""
        _expect(dict, data, "an object")
        try:
            for name, of in readers.items():
                if name in data:
                    found[name] = of(data[name])
                elif name in needed:
                    raise ValueError(": missing")
        except ValueError as e:
            raise ValueError(f".{name}{e}") from None
        return kind(**found)

    return read


def _of_list(readers: Sequence[Reader], many: bool) -> Reader:
    def read(data: Any) -> Any:
        if len(_expect(list, data, "a list")) != len(readers) and not many:
            _wrong(f"a list of {len(readers)}", data)
        found: list[Any] = []
        try:
            for of, value in zip(itertools.cycle(readers), data):
                found.append(of(value))
        except ValueError as e:
            raise ValueError(f"[{len(found)}]{e}") from None
        return tuple(found)

    return read


def _expect(kind: type, data: Any, name: str) -> Any:
    return data if type(data) is kind else _wrong(name, data)


def _wrong(name: str, data: Any) -> NoReturn:
    raise ValueError(f": expected {name}, found {shown(data)}")


def _default(f: Any) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default
