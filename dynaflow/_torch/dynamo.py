"""Dynamo: what it captures, and how to control it."""

from __future__ import annotations

import contextlib
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from dynaflow._torch.symbols import Symbols
from dynaflow._torch.versions import HOOKS, F


def annotate(annotation: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context in which Dynamo adds `annotation` to meta["custom"] of the nodes that it traces."""
    from torch.fx.traceback import annotate

    return annotate(annotation)


def constant_in_trace(function: Callable[[], Any]) -> Callable[[], Any]:
    """torch.compiler.assume_constant_result, without importing Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inline_only(function: F) -> F:
    """Dynamo inlines the function into frames that it traces, but never compiles it as a frame."""
    INLINE_ONLY.append(function.__code__)
    return function


INLINE_ONLY: list[types.CodeType] = []


def hooks_of(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """The ids of the hooks on these modules, and of global module hooks. Seen on 2.11 and 2.13."""
    everywhere = vars(torch.nn.modules.module)
    found = [everywhere[f"_global{kind}"] for kind in HOOKS]
    found += [getattr(module, kind) for module in modules for kind in HOOKS]
    return frozenset(number for hooks in found for number in hooks)


def unwrapped_backend(backend: Any) -> Any:
    while (inner := getattr(backend, "compiler_fn", None) or getattr(backend, "func", None)) is not None:
        backend = inner
    return backend


def is_dynaflow_backend(backend: Any) -> bool:
    """Whether the backend is dynaflow's, wrapped or not."""
    return str(getattr(unwrapped_backend(backend), "__module__", "")).startswith("dynaflow.")


def break_if_autocast(tensor: torch.Tensor) -> None:
    """Breaks the graph at a call whose dtype autocast would change: on a CPU."""
    if not tensor.is_cuda and torch.is_autocast_enabled(tensor.device.type):
        torch._dynamo.graph_break()


def graph_break_reasons() -> Counter[str]:
    """Reasons of the graph breaks in this process, with their counts. Seen on 2.13."""
    from torch._dynamo.utils import counters

    found: Counter[str] = Counter()
    for reason, times in counters["graph_break"].items():
        lines = [line.strip().removeprefix("Explanation: ") for line in reason.splitlines()[:2]]
        found["not captured: " + ": ".join(lines)] += times
    return found


def is_restart(error: Exception) -> bool:
    """Whether the error is Dynamo's own signal to trace again."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


def restart_capture() -> BaseException:
    """An exception for a backend to raise: Dynamo traces the frame again, e.g. after more dims were marked dynamic.

    Dynamo lets a backend raise the first of the two classes only. For the second it forgets the graph breaks, which it
    must: with symbolic sizes the next trace may break elsewhere. Seen on 2.11 and 2.13.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    class Restart(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
        pass

    return Restart("dynaflow: the batch becomes dynamic", restart_reason="dynaflow: batch")


def traced_frame() -> Any:
    """Identifies the frame that Dynamo traces, also when it traces it again. None outside of a trace. Seen on 2.11 and
    2.13."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def mark_dynamic(tensor: torch.Tensor, dims: Sequence[int]) -> Callable[[], None]:
    """Asks Dynamo to keep `dims` symbolic if the model allows it. Returns a function that removes the marks."""
    before = dict(tensor.__dict__)
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))

    def undo() -> None:
        for name in set(tensor.__dict__) - set(before):
            delattr(tensor, name)
        tensor.__dict__.update(before)

    return undo


GRAPH_INPUT = "dynaflow_given"
"""Key in a placeholder's `meta` for the result of graph_input, where Dynamo did not make the placeholder."""


def graph_input(placeholder: fx.Node) -> tuple[str, bool, Any]:
    """A placeholder's source as text, whether a module owns it, and the example argument, or None if that is freed: a
    backward pass may be compiled as late as its first run."""
    if GRAPH_INPUT in placeholder.meta:
        return placeholder.meta[GRAPH_INPUT]
    arg = placeholder.meta.get("grapharg")
    if arg is None:  # added after the capture
        return placeholder.name, False, None
    name = arg.source.name
    owner = arg.source.guard_source
    owned = owner.is_unspecialized_nn_module() or owner.is_specialized_nn_module()
    try:
        example = arg.example
    except AssertionError:  # Dynamo holds a weak reference
        example = None
    return (name if isinstance(name, str) else name()), owned, example


def is_marked_static(tensor: Any) -> bool:
    """Whether torch._dynamo.mark_static_address was called on the tensor."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def is_partial_graph(gm: fx.GraphModule) -> bool:
    """Whether the graph ends at a graph break, or starts after one."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return False
    return bool(reason.graph_break) or any("torch_dynamo_resume_in" in f.name for f in reason.user_stack)


def wait_for_other_trace(error: RuntimeError, given: Any) -> bool:
    """Whether a compiled function rejected a call only because another thread was tracing. If so, waits until that
    trace ends. Seen on 2.11 and 2.13, where the flag of a trace is global to all threads."""
    if "FX to symbolically trace" not in str(error) or torch._C._len_torch_dispatch_stack():
        return False
    if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(given)):
        return False
    while fx._symbolic_trace.is_fx_symbolic_tracing():
        time.sleep(0.001)
    return True


def pickled(value: Any) -> bytes:
    """Pickles values with operators, fake tensors and symbolic numbers. They are unpickled into a new ShapeEnv."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler, Options

    class Pickler(GraphPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FakeTensorMode):
                return type(None), ()
            if hasattr(obj, "_torch_unpickler"):  # the class of a sympy function, which torch creates on demand
                return obj._torch_unpickler, (obj._torch_handler_name,)
            return super().reducer_override(obj)

    return Pickler.dumps(value, Options(ops_filter=None))


def unpickled(data: bytes) -> Any:
    from torch.fx._graph_pickler import GraphPickler

    return GraphPickler.loads(data, Symbols().mode)


def cache_traced_sources() -> None:
    """Patches Dynamo to read the source of each traced function once when it serializes.

    It reads the source for each traced call, of which a model of many layers has thousands: this takes seconds.
    """
    from torch._dynamo.package import SourceInfo

    usual, known = SourceInfo.add_code, dict[int, tuple[Any, Any]]()
    if usual.__module__ == __name__:
        return

    def add_code(sources: Any, code: types.CodeType) -> None:
        if id(code) not in known:
            usual(found := SourceInfo(set()), code)
            known[id(code)] = (found, code)  # keeps the code alive, so that its id is not reused
        sources.inlined_sources |= known[id(code)][0].inlined_sources

    SourceInfo.add_code = add_code  # type: ignore[assignment]


def register_serializable(owner: Any) -> None:
    """Registers a class of backend results that torch can serialize."""
    from torch._dynamo.aot_compile import SerializableCallable

    SerializableCallable.register(owner)
