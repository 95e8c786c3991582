"""What a scheduler's decision depends on, as a text: equal texts, in any process, decide alike.

It covers the scheduler's classes and state, and the code that they reach: functions and classes through globals,
closures, defaults and class attributes, and the plain data that this code names. Installed libraries count by name
and version. Line numbers and comments do not count; a function's docstring does, as any constant.

Whatever can't be judged makes the whole unknown: tensors, files, locks, generators, objects of other classes than
schedulers, dataclasses, named tuples and enums; reads of the clock, the environment or the device; imports inside
functions. What is in doubt is unknown.

State counts as it is: a scheduler that changes between calls, be it by `self.calls += 1`, has a new identity each
time, so ask for it before `schedule` runs, and don't expect to find again what a counter keeps apart.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copyreg
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.metadata
import logging
import operator
import platform
import re
import sys
import types
import typing
from abc import ABC
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from dynaflow.core.plan import FORMAT
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.base import OpSchedulerBase


def identity(scheduler: OpSchedulerBase) -> str | None:
    """Changes whenever the scheduler's decision could; None when that can't be told."""
    return judged(scheduler)[0]


def graph_identity(graph: OpGraph) -> str:
    """Equal when a scheduler sees equal graphs. The fingerprint alone knows of no tags, sizes or types."""
    ops = [f"{sorted(op.tags)} {op.shared} {op.refusal} {op.functions}" for op in graph.ops]
    shapes = {shape: str(shape) for shape in {v.shape for v in graph.values}}  # few differ, and printing takes long
    values = [f"{v.name} {v.dims} {shapes[v.shape]}" for v in graph.values]
    return hashlib.sha256("\n".join([graph.fingerprint, *ops, *values]).encode()).hexdigest()


def plan_key(
    scheduler_identity: str,
    fingerprint: str,
    sizes: tuple[int, ...],
    batch_size: int,
    facts: Any,
    device: str,
    sms: int,
) -> str | None:
    """What a plan is kept under; None when the facts are no plain data."""
    situation, _ = judged((scheduler_identity, fingerprint, sizes, batch_size, facts, device, sms))
    versions = f"torch {torch.__version__} python {platform.python_version()} dynaflow {_version('dynaflow')}"
    return situation and f"plan {FORMAT} {versions} {situation}"


def judged(value: Any) -> tuple[str | None, list[FunctionType]]:
    """What tells it from others, and the functions that it reaches."""
    walk = _Walk()
    try:
        walk.visit(value)
    except Exception:  # looking into objects of any kind may fail in any way, the depth of recursion included
        return None, []
    return walk.digest(), walk.functions


class _Unknown(Exception):
    """The decision may depend on something that can't be written down."""


_PURE = {
    "_abc", "_bisect", "_collections", "_collections_abc", "_functools", "_heapq", "_operator", "_statistics", "abc",
    "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "copyreg", "dataclasses", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "logging", "math", "numbers", "operator", "re", "statistics", "string",
    "textwrap", "types", "typing", "warnings",
}  # fmt: skip
"""Modules of the standard library that ask nothing of the world outside."""
_IMPURE = {
    "__import__", "breakpoint", "compile", "eval", "exec", "globals", "hash", "id", "input", "locals", "open", "vars",
}  # fmt: skip
"""Builtins that do, or that reach what can't be followed from here."""
_STATE = re.compile(
    r"(^|\.)(cuda|xpu|mps|accelerator|distributed|backends|random|bernoulli|multinomial|normal|poisson"
    r"|_?(rand|seed|initial_|is_|get_|has_|current_)\w*)(\.|$)"
)
"""Names in other libraries behind which lie devices, modes or chance."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_BY_NAME = (
    torch.dtype, torch.layout, torch.memory_format, torch.device,
    type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor),
)  # fmt: skip
_BY_PARTS = (
    range, slice, re.Pattern, functools.partial, operator.attrgetter, operator.itemgetter, operator.methodcaller,
    collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque, torch.Size,
)  # fmt: skip
"""Told by what pickle would keep of them."""
_STATELESS = (object, ABC, typing.Generic, typing.Protocol)
_NO_MATTER = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__slots__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip


class _Walk:
    """Writes down what it visits. Each object with an identity of its own is written once, and numbered."""

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []
        self._hash = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # holds the objects, so that no id is used again

    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, *parts: str | int | bytes) -> None:
        self._hash.update(repr(parts).encode("utf-8", "surrogatepass"))

    def visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            return self.write(kind.__name__, repr(value))
        if kind in _BY_NAME:
            return self.write(kind.__name__, str(value))
        if kind is tuple:  # tuples and code may be shared or not as the interpreter likes: never numbered
            return self._all("tuple", value)
        if kind is CodeType:
            raise _Unknown("code without its globals")
        if (known := self._seen.get(id(value))) is not None:
            return self.write("again", known[0])
        if kind is not frozenset:
            self._seen[id(value)] = (len(self._seen), value)
        if kind in (set, frozenset):
            self.write(kind.__name__, *sorted(_told(v) for v in value))
        elif kind is list:
            self._all("list", value)
        elif kind in (dict, types.MappingProxyType):
            self._all("dict", value.items())  # in their order, which the scheduler can see
        elif kind in _BY_PARTS:
            self._reduced(value)
        elif isinstance(value, type):
            self._class(value)
        elif kind is FunctionType:
            self.functions.append(value)
            self._function(value)
        else:
            self._object(kind, value)

    def _all(self, what: str, values: Any) -> None:
        values = list(values)
        self.write(what, len(values))
        for v in values:
            self.visit(v)

    def _reduced(self, value: Any) -> None:
        reduce = copyreg.dispatch_table.get(type(value))
        parts = reduce(value) if reduce else value.__reduce_ex__(2)
        self._all("parts", [p if i < 3 or p is None else list(p) for i, p in enumerate(parts)])

    def _object(self, kind: type, value: Any) -> None:
        match value:
            case enum.Enum():
                self._all("enum", (kind, value._name_, value._value_))
            case tuple() if hasattr(kind, "_fields") and kind.__bases__ == (tuple,):
                self._all("namedtuple", (kind, *value))
            case OpSchedulerBase() if _open(kind):
                self._instance(kind, value)
            case _ if dataclasses.is_dataclass(kind) and _open(kind):
                self._instance(kind, value)
            case _ if not _is_library(kind.__module__):
                raise _Unknown(kind)
            case types.MethodType():
                self._all("method", (value.__func__, value.__self__))
            case types.BuiltinFunctionType():  # math.sqrt, dict.fromkeys, [].append
                owner = value.__self__
                if isinstance(owner, ModuleType) or owner is None:
                    self._library(value.__module__, value.__qualname__)
                else:
                    self.visit(owner)
                    self._library((owner if isinstance(owner, type) else type(owner)).__module__, value.__name__)
            case types.MethodDescriptorType() | types.WrapperDescriptorType() | types.ClassMethodDescriptorType():
                self.visit(value.__objclass__)
                self.write("method", value.__name__)
            case classmethod() | staticmethod():
                self._all(kind.__name__, (value.__func__,))
            case property():
                self._all("property", (value.fget, value.fset, value.fdel))
            case functools.cached_property():
                self._all("cached_property", (value.func,))
            case functools._lru_cache_wrapper():
                self._all("lru_cache", (value.__wrapped__, value.cache_parameters()))
            case types.MemberDescriptorType() | collections._tuplegetter():  # type: ignore[attr-defined]
                self.write("slot")
            case logging.Logger():  # decides nothing
                self.write("logger", value.name)
            case _:
                raise _Unknown(kind)

    def _instance(self, kind: type, value: Any) -> None:
        state = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            for name, slot in vars(base).items():
                if isinstance(slot, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # not set
                        state[f"{base.__qualname__}.{name}"] = slot.__get__(value)
        self._all("instance", (kind, *sorted(state.items(), key=operator.itemgetter(0))))

    def _class(self, cls: type) -> None:
        if _is_library(cls.__module__):
            return self._library(cls.__module__, cls.__qualname__)
        self.write("class", cls.__module__, cls.__qualname__)
        self._all("bases", (type(cls), *cls.__bases__))
        members = getattr(cls, "__members__", {}) if isinstance(cls, enum.EnumMeta) else {}
        self._all("members", [(name, member._value_) for name, member in members.items()])
        for name, value in sorted(vars(cls).items()):
            if name in _NO_MATTER or name in members or name.startswith("__annot"):
                continue
            if name == "__dataclass_fields__":
                value = [_field(f) for f in value.values()]
            elif name == "__dataclass_params__":
                value = repr(value)
            elif isinstance(value, FunctionType) and value.__code__.co_qualname.startswith("__create_fn__."):
                continue  # made by dataclass, out of the fields
            elif isinstance(cls, enum.EnumMeta) and name[0] == name[-1] == "_" and not _is_code(value):
                continue  # the members once more
            self.write("attribute", name)
            self.visit(value)

    def _function(self, f: FunctionType) -> None:
        module = f.__globals__.get("__name__", "")
        if _is_library(module):
            self._library(module, f.__code__.co_qualname)
            if "<locals>" in f.__code__.co_qualname:  # a decorator's wrapper: what it wraps is in its closure
                self._around(f)
            return
        self.write("function", module, f.__qualname__)
        self._around(f)
        self._code(f.__code__, f.__globals__)

    def _around(self, f: FunctionType) -> None:
        cells = [_content(c) for c in f.__closure__ or ()]
        self._all("around", (f.__defaults__, f.__kwdefaults__, cells, sorted(vars(f).items())))

    def _code(self, code: CodeType, scope: dict[str, Any]) -> None:
        self.write(
            code.co_name, code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount,
            code.co_posonlyargcount, code.co_kwonlyargcount, repr(code.co_names), repr(code.co_varnames),
            repr(code.co_freevars), repr(code.co_cellvars), len(code.co_consts),
        )  # fmt: skip
        for const in code.co_consts:
            if isinstance(const, CodeType):
                self._code(const, scope)
            else:
                self.visit(const)
        for path, value in _reached(code, scope).items():
            self.write("global", path)
            if value is not dataclasses.MISSING:  # else a NameError, if it comes to that
                self.visit(value)

    def _library(self, module: str | None, name: str) -> None:
        module = module or "builtins"
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names:
            good = root in _PURE and not (root == "builtins" and name in _IMPURE)
        else:
            good = root == "dynaflow" or (_is_library(module) and not _STATE.search(f"{module}.{name}"))
        if not good:
            raise _Unknown(f"{module}.{name}")
        self.write("library", module, name, _version(root))


def _told(value: Any) -> str:
    """By itself, so that members of a set can be put in an order."""
    walk = _Walk()
    walk.visit(value)
    return walk.digest()


def _reached(code: CodeType, scope: dict[str, Any]) -> dict[str, Any]:
    """The globals that the code names; of modules, the attributes that it takes from them."""
    found: dict[str, Any] = {}
    path, value = "", None
    for step in dis.get_instructions(code):
        name = step.argval
        if isinstance(value, ModuleType):
            if step.opname == "EXTENDED_ARG":
                continue
            if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                raise _Unknown(f"the module {path} as a value")
            path, value = f"{path}.{name}", getattr(value, name, dataclasses.MISSING)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            path, value = name, scope.get(name, getattr(builtins, name, dataclasses.MISSING))
        elif step.opname.startswith("IMPORT_"):
            raise _Unknown(f"imports {name}")
        else:
            continue
        if not isinstance(value, ModuleType):
            found[path] = value
        elif _is_library(value.__name__) and _STATE.search(value.__name__):
            raise _Unknown(value.__name__)
    return found


def _open(kind: type) -> bool:
    """Is the state of its instances all in __dict__ and slots? Not if something written in C is among its bases."""
    return all(
        base in _STATELESS or issubclass(base, OpSchedulerBase) or dataclasses.is_dataclass(base)
        or not _is_library(base.__module__)
        for base in kind.__mro__
    )  # fmt: skip


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, classmethod, staticmethod, property))


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return ()


def _field(f: dataclasses.Field[Any]) -> tuple[Any, ...]:
    given = [() if v is dataclasses.MISSING else (v,) for v in (f.default, f.default_factory)]
    return (f.name, *given, f.init, f.compare, f.kw_only is True)


def _is_library(module: str) -> bool:
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(root), "__file__", None)
    if root == "dynaflow" or file is None:
        return root == "dynaflow" or root in sys.stdlib_module_names
    where = Path(file)
    installed = {"site-packages", "dist-packages"} & {*where.parts}
    return bool(installed) or where.is_relative_to(Path(dis.__file__).parent)


@functools.cache
def _version(root: str) -> str:
    if root in sys.stdlib_module_names:
        return platform.python_version()
    version = str(getattr(sys.modules.get(root), "__version__", ""))
    if root == "dynaflow":  # the version stays while dynaflow is worked on
        with contextlib.suppress(OSError):
            sources = sorted(Path(__file__).parents[1].rglob("*.py"))
            version += " " + hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()
        return version
    try:
        return version or importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        return platform.python_version()
