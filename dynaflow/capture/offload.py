"""Parameters that live in host memory and are fetched where they are used.

`offload` gives the modules that own them a class in which the parameter's name is a property: it calls
`torch.ops.dynaflow.fetch`, which copies to the device on the current stream. So a captured graph has one `fetch` for
each use, in the path of the module that uses it, and a scheduler (strategies/prefetch.py) decides when it runs. The
parameter object stays, with other storage: state_dict, named_parameters, load_state_dict, optimizers and tied weights
work as before.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dynaflow import _torch
from dynaflow.core import validate
from dynaflow.errors import DynaFlowError, nearest, shortened, shown, user_line

Model = TypeVar("Model", bound=nn.Module)

_ORIGINS = "_dynaflow_origins"
"""Attribute of an offloaded model: the original device of each tensor, by name."""
_FETCHED = "_dynaflow_fetched"
"""Attribute of an offloaded module's class: the names of the parameters that it fetches."""


def offload(model: Model, device: torch.device | str, match: str | Sequence[str] = "*", *, at_least: int = 0) -> Model:
    """Moves the parameters whose path matches to host memory (pinned, for CUDA), and all other tensors to `device`.

    `match`: a glob, or several. `at_least`: parameters of fewer bytes stay on the device, as norms and biases are not
    worth a copy. Buffers stay there too, since models write to them. All modules that share a parameter fetch it if one
    of its paths matches.

    `layer.weight` is then a copy: writes to it are lost. Write to the parameters of `named_parameters` instead.
    Gradients arrive at these, on the host. What autograd saves for the backward pass stays on the device until then.
    """
    _check_module("offload", model)
    place = _place(device)
    advice = 'pass a glob on the paths of parameters, or several: ["*.mlp.*"]'
    globs = [match] if isinstance(match, str) else validate.names(match, "offload(match)", advice)
    at_least = validate.integer(at_least, "offload(at_least)", "pass a number of bytes", least=0)
    owners = _owners(model)
    names = [name for held in owners.values() for name, _, _ in held]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            close = ", ".join(nearest(glob, names)) or "none: the model has no parameters"
            raise DynaFlowError(
                f"offload: no parameter fits {shown(glob)}", line=user_line(), advice=f"the nearest names are {close}"
            )
    moved = {
        tensor: held
        for tensor, held in owners.items()
        if tensor.nbytes >= at_least and any(fnmatchcase(name, glob) for name, _, _ in held for glob in globs)
    }
    _check(moved)
    origins = model.__dict__.setdefault(_ORIGINS, {})
    for name, tensor in _tensors(model):
        origins.setdefault(name, tensor.device)
    fetched: dict[nn.Module, set[str]] = {}
    for tensor, held in moved.items():
        _put(tensor, _on_host(tensor.data, pinned=place.type == "cuda"))
        for _, module, name in held:
            fetched.setdefault(module, set()).add(name)
    away = {id(tensor) for tensor in _fetched_already(model)} | {id(tensor) for tensor in moved}
    for _, tensor in _tensors(model):
        if id(tensor) not in away:
            _put(tensor, tensor.data.to(place))
    kinds: dict[Any, type[nn.Module]] = {}  # modules of one class still share a class
    for module, more in fetched.items():
        key = (_plain(module), frozenset(more | getattr(type(module), _FETCHED, frozenset())))
        if key not in kinds:
            kinds[key] = _fetching(*key, place)
        module.__class__ = kinds[key]
    return model


def restore(model: Model) -> Model:
    """Undoes `offload`: moves parameters and buffers back to their original devices, and uses them directly again."""
    _check_module("restore", model)
    origins = model.__dict__.pop(_ORIGINS, None)
    if origins is None:
        raise DynaFlowError(
            f"restore: {type(model).__name__} was not offloaded",
            line=user_line(),
            advice="pass the model that was given to offload(), once",
        )
    for module in model.modules():
        if _FETCHED in vars(type(module)):
            module.__class__ = _plain(module)
    seen: set[int] = set()
    for name, tensor in _tensors(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            _put(tensor, tensor.data.to(origins.get(name, tensor.device), copy=tensor.is_pinned()))
    return model


# Inside


def _check_module(who: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise DynaFlowError(f"{who}: {shown(model)} is not a module", line=user_line(), advice="pass a torch.nn.Module")


def _place(device: Any) -> torch.device:
    try:
        found = _with_index(torch.device(device))
        if found.type == "meta":
            raise ValueError("it holds no data")
        torch.empty(0, device=found)
        return found
    except Exception as e:  # no such device, or torch is built without it
        reason = shortened(str(e).splitlines()[0].split(". ")[0], 300)
        why = f"offload: no device {shown(device)}: {reason}"
        raise DynaFlowError(why, line=user_line(), advice='name one that torch has: "cuda", "cpu"') from None


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module, str]]]:
    """For each parameter: its paths, each with the owning module and its attribute name there."""
    found: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in _torch.own_parameters(module).items():
            if parameter is not None:
                found.setdefault(parameter, []).append((f"{path}.{name}".lstrip("."), module, name))
    return found


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _check(moved: dict[nn.Parameter, list[tuple[str, nn.Module, str]]]) -> None:
    for tensor, ((path, module, _), *_) in moved.items():
        if tensor.is_meta:
            raise DynaFlowError(
                f"offload: {path} has no values yet", line=user_line(), advice="load the model's weights first"
            )
        if isinstance(module, nn.RNNBase):
            raise DynaFlowError(
                f"offload: {path} belongs to a {type(module).__name__}, which keeps its weights in one block",
                line=user_line(),
                advice="name the parameters of the other modules in match=",
            )


def _on_host(data: Tensor, pinned: bool) -> Tensor:
    if data.is_cpu and data.is_pinned() == pinned:
        return data
    return torch.empty_like(data, device="cpu", pin_memory=pinned).copy_(data)


def _put(tensor: Tensor, data: Tensor) -> None:
    """Replaces the tensor's data. The object stays the same, so all that share it see the change."""
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(data.device)
    tensor.data = data


def _fetched_already(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        for name in getattr(type(module), _FETCHED, ()):
            yield _torch.own_parameters(module)[name]  # type: ignore[misc]


def _plain(module: nn.Module) -> type[nn.Module]:
    """The module's original class."""
    kind = type(module)
    return kind.__mro__[1] if _FETCHED in vars(kind) else kind


def _fetching(kind: type[nn.Module], names: frozenset[str], device: torch.device) -> type[nn.Module]:
    """A subclass, of the same name, with properties that fetch the parameters `names`."""
    space: dict[str, Any] = {name: _fetched(name, device) for name in names}
    space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(space, **{_FETCHED: names}))


def _fetched(name: str, device: torch.device) -> property:
    def get(module: nn.Module) -> Tensor | None:
        host = _torch.own_parameters(module)[name]
        return None if host is None else torch.ops.dynaflow.fetch.default(host, device)

    return property(get)
