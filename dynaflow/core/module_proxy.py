"""A proxy for a model: its attributes are the model's, and where the model is an nn.Module, so is the proxy.

A proxy has no state but its slots, whose names start with `_df_`. All other attributes are read, set and deleted on the
model: parameters exist once, `state_dict()` has the model's own keys, and each side sees what the other changes.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dynaflow.errors import DynaFlowError, user_line

REACH = 4
"""Depth of the search for modules in the objects that a function refers to."""


class Proxy:
    """A proxy for a callable."""

    __slots__ = ("__dict__", "__weakref__", "_df_model")

    def __init__(self, model: Any) -> None:
        self._df_model = model
        if not isinstance(self, nn.Module):
            known = {name: getattr(model, name) for name in ("__doc__", "__module__") if hasattr(model, name)}
            vars(self).update(known, __wrapped__=model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_df_"):
            raise AttributeError(name)  # not set yet
        model = self._df_model
        while isinstance(model, Proxy):
            model = model._df_model
        if name == "__signature__":
            return _signature(model)
        try:
            value = getattr(model, name)
        except AttributeError:
            if name.startswith("_") and not name.startswith("__"):  # the proxy has it, and the model not
                return object.__getattribute__(self, f"_df{name}")
            raise
        if torch.compiler.is_dynamo_compiling() or not isinstance(value, types.MethodType):
            return value
        return types.MethodType(_chained(value), self) if value.__self__ is model else value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._df_has(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._df_model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._df_has(name):
            object.__delattr__(self, name)
        else:
            delattr(self._df_model, name)

    def _df_has(self, name: str) -> bool:
        """Whether an attribute that is to be changed is the proxy's own, and not the model's."""
        owner = next((kind for kind in type(self).__mro__ if name in vars(kind)), object)
        own = vars(owner).get(name)
        if name.startswith("_df_") or (isinstance(own, property) and own.fset is not None):
            return True
        if name.startswith("_") or not issubclass(owner, Proxy) or issubclass(owner, nn.Module):
            return False
        raise DynaFlowError(
            f"{name!r} belongs to the compiled model and can't be changed",
            line=user_line(),
            advice=f"to change the model's own {name!r}, change it on the model itself",
        )

    def __dir__(self) -> list[str]:
        own = (name for kind in type(self).__mro__ if issubclass(kind, Proxy) for name in vars(kind))
        return sorted({*dir(self._df_model), *(name for name in own if not name.startswith("_"))})


class ModuleProxy(Proxy, nn.Module):
    """A proxy for an nn.Module, with all its methods. Methods that return the model return the proxy instead."""

    __slots__ = ()

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return vars(self._df_model)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For isinstance(). Code that replaces a module's class (fully_shard, parametrizations) replaces the
        model's."""
        return self._df_model.__class__


def _chained(method: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """A proxy's method that calls the model's. `name`: look the method up at each call."""

    @functools.wraps(getattr(method, "__func__", method))
    def call(proxy: Proxy, *args: Any, **kwargs: Any) -> Any:
        model = proxy._df_model
        result = getattr(model, name)(*args, **kwargs) if name else method(*args, **kwargs)
        return proxy if result is model else result

    return call


for _name, _own in vars(nn.Module).items():
    if not _name.startswith("__"):
        _there = property(lambda proxy, name=_name: getattr(proxy._df_model, name))  # type: ignore[misc]
        setattr(ModuleProxy, _name, _chained(_own, _name) if isinstance(_own, types.FunctionType) else _there)


def special_methods(model: nn.Module) -> tuple[str, ...]:
    """The dunder methods that the model's class adds to nn.Module. Python looks them up on the class only."""
    own = type(model)
    names = [name for name in dir(own) if name.startswith("__") and not hasattr(ModuleProxy, name)]
    return tuple(name for name in names if isinstance(getattr(own, name), types.FunctionType))


@functools.cache
def with_methods(kind: Any, names: tuple[str, ...]) -> Any:
    """The proxy class for a model with these dunder methods: `fast[0]`, `len(fast)`."""
    methods = {name: _special(name) for name in names}
    return type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **methods}) if names else kind


def _special(name: str) -> Callable[..., Any]:
    def call(proxy: Proxy, *args: Any, **kwargs: Any) -> Any:
        model = proxy._df_model
        result = getattr(type(model), name)(model, *args, **kwargs)
        return proxy if result is model else result

    call.__name__ = name
    return call


def function_of(model: Any) -> Callable[..., Any]:
    """The function whose signature has the model's parameters."""
    return model.forward if isinstance(model, nn.Module) else model


def is_async(model: Any) -> bool:
    """Whether a call returns an awaitable, which torch.compile would take for the result."""
    calls = (function_of(model), inspect.getattr_static(type(model), "__call__", None))
    return any(inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call) for call in calls)


def _signature(model: Any) -> inspect.Signature:
    try:
        return inspect.signature(function_of(model))
    except (TypeError, ValueError) as e:  # builtins have none
        raise AttributeError("__signature__") from e


def modules_of(model: Any) -> Iterator[nn.Module]:
    """The modules of a model; for a function, the modules that it refers to."""
    seen: set[int] = set()
    layer = [model]
    for _ in range(REACH):
        layer = [value for value in layer if id(value) not in seen]
        seen.update(map(id, layer))
        for value in layer:
            if isinstance(value, nn.Module):
                yield from value.modules()
        layer = [inner for value in layer for inner in _referred(value)]


def _referred(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())  # an empty one
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, Proxy) and not isinstance(value, nn.Module):
        yield value._df_model
    elif not isinstance(value, (type, types.ModuleType, nn.Module)):
        yield from getattr(value, "__dict__", {}).values()
