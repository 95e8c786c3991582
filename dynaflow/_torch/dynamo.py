"""What Dynamo hands over, and what it can be asked for."""

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
    """Puts `annotation` into meta["custom"] of the nodes that Dynamo traces inside it."""
    from torch.fx.traceback import annotate

    return annotate(annotation)


def constant_in_trace(function: Callable[[], Any]) -> Callable[[], Any]:
    """Dynamo calls the function while it traces and takes the result as a constant.

    As torch.compiler.assume_constant_result, but without importing Dynamo at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_a_frame(function: F) -> F:
    """Dynamo traces the function where another one that it traces calls it, but does not compile it by itself."""
    NEVER_FRAMES.append(function.__code__)
    return function


NEVER_FRAMES: list[types.CodeType] = []


def hooks_of(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """The hooks on calls of these modules, and of all modules, by their numbers. Seen on 2.11 and 2.13."""
    everywhere = vars(torch.nn.modules.module)
    found = [everywhere[f"_global{kind}"] for kind in HOOKS]
    found += [getattr(module, kind) for module in modules for kind in HOOKS]
    return frozenset(number for hooks in found for number in hooks)


def unwrapped_backend(backend: Any) -> Any:
    while (inner := getattr(backend, "compiler_fn", None) or getattr(backend, "func", None)) is not None:
        backend = inner
    return backend


def is_ours(backend: Any) -> bool:
    """Whether Dynamo traces for a backend of ours, by whichever door."""
    return str(getattr(unwrapped_backend(backend), "__module__", "")).startswith("dynaflow.")


def break_where_cast(tensor: torch.Tensor) -> None:
    """Leaves a call to torch where autocast would change what it computes in: on a CPU."""
    if not tensor.is_cuda and torch.is_autocast_enabled(tensor.device.type):
        torch._dynamo.graph_break()


def breaks() -> Counter[str]:
    """Why Dynamo has broken graphs in this process, and how often. Seen on 2.13."""
    from torch._dynamo.utils import counters

    found: Counter[str] = Counter()
    for reason, times in counters["graph_break"].items():
        lines = [line.strip().removeprefix("Explanation: ") for line in reason.splitlines()[:2]]
        found["not captured: " + ": ".join(lines)] += times
    return found


def is_restart(error: Exception) -> bool:
    """Whether it tells Dynamo to trace again, and nobody else anything."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


def restart_capture() -> BaseException:
    """To be raised by a backend: Dynamo traces the frame again, e.g. after more dims were marked dynamic.

    A backend may only raise the first of the two classes (others Dynamo wraps); of the second it forgets where the
    graph broke. It must: with symbols in place of numbers the second trace need not come past the same places. It
    finds the breaks again by itself. Seen on 2.11 and 2.13.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    class Restart(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
        pass

    return Restart("dynaflow: the batch becomes dynamic", restart_reason="dynaflow: batch")


def traced_frame() -> Any:
    """What stands for the frame that Dynamo traces: the same when it traces it again. None outside. Seen on 2.11 and
    2.13."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def mark_dynamic(tensor: torch.Tensor, dims: Sequence[int]) -> Callable[[], None]:
    """Asks Dynamo to keep `dims` symbolic if the model allows it. Returns the function that takes the marks back."""
    before = dict(tensor.__dict__)
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))

    def undo() -> None:
        for name in set(tensor.__dict__) - set(before):
            delattr(tensor, name)
        tensor.__dict__.update(before)

    return undo


GRAPH_INPUT = "dynaflow_given"
"""Where the `meta` of a placeholder that Dynamo did not make says what graph_input would."""


def graph_input(placeholder: fx.Node) -> tuple[str, bool, Any]:
    """Of a placeholder that Dynamo made: its source as text, whether a module owns it, and the example, or None if that
    is gone: a backward pass may be compiled when it first runs."""
    if GRAPH_INPUT in placeholder.meta:
        return placeholder.meta[GRAPH_INPUT]
    arg = placeholder.meta.get("grapharg")
    if arg is None:  # one that somebody has added
        return placeholder.name, False, None
    name = arg.source.name
    owner = arg.source.guard_source
    owned = owner.is_unspecialized_nn_module() or owner.is_specialized_nn_module()
    try:
        example = arg.example
    except AssertionError:  # Dynamo holds it weakly
        example = None
    return (name if isinstance(name, str) else name()), owned, example


def is_marked_static(tensor: Any) -> bool:
    """By torch._dynamo.mark_static_address."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def is_part(gm: fx.GraphModule) -> bool:
    """Whether the graph ends at a graph break, or starts behind one."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return False
    return bool(reason.graph_break) or any("torch_dynamo_resume_in" in f.name for f in reason.user_stack)


def waits_for_a_trace(error: RuntimeError, given: Any) -> bool:
    """Whether a compiled function refused a call only since another thread traced something at the time. Then it waits
    until that is over. Seen on 2.11 and 2.13, where the mark of a trace is one for all threads."""
    if "FX to symbolically trace" not in str(error) or torch._C._len_torch_dispatch_stack():
        return False
    if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(given)):
        return False
    while fx._symbolic_trace.is_fx_symbolic_tracing():
        time.sleep(0.001)
    return True


def pickled(value: Any) -> bytes:
    """Operators, fake tensors and symbolic numbers as well; they come back in a symbolic world of their own."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler, Options

    class Pickler(GraphPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FakeTensorMode):
                return type(None), ()
            if hasattr(obj, "_torch_unpickler"):  # a sympy function's class, which torch makes when it needs it
                return obj._torch_unpickler, (obj._torch_handler_name,)
            return super().reducer_override(obj)

    return Pickler.dumps(value, Options(ops_filter=None))


def unpickled(data: bytes) -> Any:
    from torch.fx._graph_pickler import GraphPickler

    return GraphPickler.loads(data, Symbols().mode)


def each_source_once() -> None:
    """From now on, what Dynamo writes to disk has the source of each function that it traced, read once.

    It reads it for each call that it traced, of which a model of many layers has thousands: seconds.
    """
    from torch._dynamo.package import SourceInfo

    usual, known = SourceInfo.add_code, dict[int, tuple[Any, Any]]()
    if usual.__module__ == __name__:
        return

    def add_code(sources: Any, code: types.CodeType) -> None:
        if id(code) not in known:
            usual(found := SourceInfo(set()), code)
            known[id(code)] = (found, code)  # which must not go, or another would have its number
        sources.inlined_sources |= known[id(code)][0].inlined_sources

    SourceInfo.add_code = add_code  # type: ignore[assignment]


def serializable(owner: Any) -> None:
    """Tells torch that it can write objects of this class to disk, where they are what a backend returned."""
    from torch._dynamo.aot_compile import SerializableCallable

    SerializableCallable.register(owner)
