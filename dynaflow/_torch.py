"""Every private torch API that dynaflow uses, each behind one small function.

Seen to work on torch 2.11.0, 2.12.1 and 2.13.0 on CPU, and on 2.11.0+cu130 on CUDA, unless a line says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import sys
import threading
import time
import traceback
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import sympy
import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from dynaflow import forks
from dynaflow.errors import DynaFlowError, fall_back

__all__ = [  # for the rooms to take from here
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Hooks = RemovableHandle
"""`Hooks.next_id` grows with each hook that is registered anywhere. Seen on 2.11 and 2.13."""

Boxed = Callable[[list[Any]], Any]
"""A function that gets its arguments in a list and empties it: nobody else holds them, so each goes after its last
use."""

F = TypeVar("F", bound=Callable[..., Any])


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
    _NEVER_FRAMES.append(function.__code__)
    return function


_NEVER_FRAMES: list[types.CodeType] = []


def hooks_of(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """The hooks on calls of these modules, and of all modules, by their numbers. Seen on 2.11 and 2.13."""
    everywhere = vars(torch.nn.modules.module)
    found = [everywhere[f"_global{kind}"] for kind in HOOKS]
    found += [getattr(module, kind) for module in modules for kind in HOOKS]
    return frozenset(number for hooks in found for number in hooks)


def teach_dynamo(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """In models that are traced for dynaflow, and in no others, Dynamo traces recurrent modules, and these functions in
    place of torch's; and it breaks no graph at the masks of transformers. Seen on 2.13."""
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    if all(function in handlers for function in functions):
        return

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_ours(tx.output.compiler_fn):
                return None
            return VariableTracker.build(tx, function).call_function(tx, list(args), kwargs)

        return handle

    handlers.update({function: traced(instead) for function, instead in functions.items()})
    usual = builder.VariableBuilder.wrap_module

    def wrap_module(self: Any, value: torch.nn.Module) -> Any:
        ours = isinstance(value, torch.nn.RNNBase) and _is_ours(self.tx.output.compiler_fn)
        with torch._dynamo.config.patch(allow_rnn=True) if ours else contextlib.nullcontext():
            return usual(self, value)

    builder.VariableBuilder.wrap_module = wrap_module  # type: ignore[method-assign]
    for function, traced_instead in _MASKS.items():
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced_instead)
    _leave_some_functions_alone()
    _keep_lengths_of_deques()
    _break_where_traces_go_wrong()
    _run_what_dynamo_fails_on()
    if TORCH < (2, 13):  # since then it is known; before, AOTAutograd drops the errors of torch.linalg in training
        fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)
    for code in _NEVER_FRAMES:
        torch._dynamo.eval_frame.skip_code(code)


def _break_graph(tx: Any, why: str) -> None:
    from torch._dynamo.variables.base import VariableTracker

    said = {"msg": VariableTracker.build(tx, why)}
    VariableTracker.build(tx, torch._dynamo.graph_break).call_function(tx, [], said)


def _leave_some_functions_alone() -> None:
    """Breaks the graph where an autograd.Function is mapped over: Dynamo would forget its backward, or fail. And where
    one asks for None in place of gradients of zeros, which Dynamo forgets. Seen on 2.11 and 2.13."""
    from torch._C._functorch import TransformType
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    usual = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        mapped = any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
        if mapped and torch.is_grad_enabled() and _is_ours(tx.output.compiler_fn):
            _break_graph(tx, "an autograd.Function is mapped over")
        return usual(self, tx, args, kwargs)

    attribute = AutogradFunctionContextVariable.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name == "set_materialize_grads" and _is_ours(tx.output.compiler_fn):
            _break_graph(tx, "an autograd.Function calls set_materialize_grads")
        return attribute(self, tx, name)

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]
    AutogradFunctionContextVariable.var_getattr = var_getattr  # type: ignore[method-assign]


def _keep_lengths_of_deques() -> None:
    """Dynamo takes a deque that was made before for one without `maxlen`. It can't trace what changes one that has it:
    that breaks the graph. Seen on 2.11 and 2.13."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, builder
    from torch._dynamo.variables.lists import DequeVariable

    wrap, method = builder.VariableBuilder.wrap_listlike, DequeVariable.call_method

    def wrap_listlike(self: Any, value: Any) -> Any:
        made: Any = wrap(self, value)
        if isinstance(value, deque) and _is_ours(self.tx.output.compiler_fn):
            install_guard(AttrSource(self.get_source(), "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
            made.maxlen = ConstantVariable.create(value.maxlen)
        return made

    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        limited = self.source is not None and self.maxlen.as_python_constant() is not None
        if limited and name in _CHANGES_OF_DEQUES and _is_ours(tx.output.compiler_fn):
            _break_graph(tx, f"{name} changes a deque that has a maxlen")
        return method(self, tx, name, *args, **kwargs)

    builder.VariableBuilder.wrap_listlike = wrap_listlike  # type: ignore[method-assign]
    DequeVariable.call_method = call_method  # type: ignore[method-assign]


_CHANGES_OF_DEQUES = set(dir(deque)) - set(dir(tuple)) - {"copy", "maxlen"}


SHAPE_CHANGES = {"as_strided_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
"""Calls that change the shape of the tensor that they are given."""


def _break_where_traces_go_wrong() -> None:
    """Breaks the graph at such calls, and where `data` is set: Dynamo goes on with the shape that the tensor had, in
    Python code that looks at it. And at calls that fail on fake tensors: eager may well know what to do, as in a
    jvp of a slice, and if it does not, its error is the user's own. Seen on 2.11 and 2.13."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
    from torch._dynamo.variables import builder, builtin, tensor
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    method, function = TensorVariable.call_method, TorchInGraphFunctionVariable.call_function

    def check(tx: Any, name: str) -> None:
        if name in SHAPE_CHANGES and _is_ours(tx.output.compiler_fn):
            _break_graph(tx, f"{name} changes a tensor's shape in place")

    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        check(tx, name)
        return method(self, tx, name, *args, **kwargs)

    def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        check(tx, str(getattr(self.value, "_opname", None) or getattr(self.value, "__name__", "")))
        return function(self, tx, *args, **kwargs)

    fake_value = builder.get_fake_value

    def get_fake_value(node: fx.Node, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if tx.one_graph or tx.error_on_graph_break or not _is_ours(tx.output.compiler_fn):
            return fake_value(node, tx, *args, **kwargs)
        try:
            with _without_logs_of_fakes():
                return fake_value(node, tx, *args, **kwargs)
        except Exception as e:
            if isinstance(e, TorchDynamoException) and not isinstance(e, TorchRuntimeError):
                raise  # Dynamo's own affair
            return _break_graph(tx, f"{getattr(node.target, '__name__', node.target)} can't be traced")

    builder.get_fake_value = tensor.get_fake_value = get_fake_value
    kind: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # 2.13, and 2.11
    setter = "_call_setattr" if hasattr(kind, "_call_setattr") else "call_setattr"
    set_attribute = getattr(kind, setter)

    def call_setattr(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        if isinstance(obj, TensorVariable) and name.is_python_constant() and name.as_python_constant() == "data":
            check(tx, "set_")
        return set_attribute(self, tx, obj, name, value)

    setattr(kind, setter, call_setattr)
    TensorVariable.call_method = call_method  # type: ignore[method-assign]
    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def _run_what_dynamo_fails_on() -> None:
    """Where Dynamo itself fails on a frame, which has not run yet, that frame runs as Python does. What the model calls
    there may be captured still. Seen on 2.11 and 2.13."""
    from torch._dynamo.convert_frame import ConvertFrame
    from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
    from torch._dynamo.types import ConvertFrameReturn

    convert = ConvertFrame.__call__
    as_they_come = (AssertionError, IndexError, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode)
    failures = (InternalTorchDynamoError, TorchRuntimeError, *as_they_come)

    def call(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> Any:
        try:
            return convert(self, frame, cache_entry, hooks, frame_state, skip=skip + 1)
        except failures as e:
            if not _is_ours(self._torchdynamo_orig_backend):
                raise
            code = f"the code at {frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"
            why = fall_back(e, code, "torch.compile's tracer")
            getattr(_unwrapped(self._torchdynamo_orig_backend), "plain_reasons", []).append(f"{code}: {why}")
            return ConvertFrameReturn()

    ConvertFrame.__call__ = call  # type: ignore[method-assign]


def _same_again(function: Any) -> Callable[..., Any]:
    """A function that Dynamo does not take for the same."""
    copy = types.FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_detect_causal = _same_again(torch.nn.modules.transformer._detect_is_causal_mask)
_canonical_mask = _same_again(torch.nn.functional._canonical_mask)


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask is the causal one is read off its data, for a faster kernel: what it masks is the same."""
    if is_causal is None and mask is not None and not mask.requires_grad and _traces_for_us():
        return False
    return cast("bool", _detect_causal(mask, is_causal, size))


def _mask(*args: Any, check_other: bool = True, **kwargs: Any) -> Any:
    """The check is for a warning, which can't be traced."""
    return _canonical_mask(*args, check_other=check_other and not _traces_for_us(), **kwargs)


@constant_in_trace
def _traces_for_us() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return _is_ours(InstructionTranslator.current_tx().output.compiler_fn)


_MASKS: dict[Any, Callable[..., Any]] = {
    torch.nn.modules.transformer._detect_is_causal_mask: _is_causal,
    torch.nn.functional._canonical_mask: _mask,
}


def _unwrapped(backend: Any) -> Any:
    while (inner := getattr(backend, "compiler_fn", None) or getattr(backend, "func", None)) is not None:
        backend = inner
    return backend


def _is_ours(backend: Any) -> bool:
    """Whether Dynamo traces for a backend of ours, by whichever door."""
    return str(getattr(_unwrapped(backend), "__module__", "")).startswith("dynaflow.")


def break_where_cast(tensor: torch.Tensor) -> None:
    """Leaves a call to torch where autocast would change what it computes in: on a CPU."""
    if not tensor.is_cuda and torch.is_autocast_enabled(tensor.device.type):
        torch._dynamo.graph_break()


def overload_of(node: fx.Node) -> Any:
    """The overload that a call of an operator by its packet's name comes to."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
    try:
        name = torch._C._jit_resolve_packet(node.target._qualified_op_name, *args, **kwargs)  # type: ignore[union-attr]
    except RuntimeError:
        return None
    return getattr(node.target, name or "default")


def packet_of(target: Any) -> Any:
    """The operator that a call's target is an overload of; anything else as it is."""
    return target.overloadpacket if isinstance(target, OpOverload) else target


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


GIVEN = "dynaflow_given"
"""Where the `meta` of a placeholder that Dynamo did not make says what graph_input would."""


def graph_input(placeholder: fx.Node) -> tuple[str, bool, Any]:
    """Of a placeholder that Dynamo made: its source as text, whether a module owns it, and the example, or None if that
    is gone: a backward pass may be compiled when it first runs."""
    if GIVEN in placeholder.meta:
        return placeholder.meta[GIVEN]
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


def traced_input(placeholder: fx.Node) -> tuple[int, tuple[str, ...]] | None:
    """Of a placeholder that AOTAutograd made: the position of what it stands for among the inputs of the graph that was
    traced; and, if that is a tensor that wraps others, by which attributes of it. None if it stands for something else.
    Seen on 2.13."""
    found: Any = placeholder.meta.get("desc")
    attributes: list[str] = []
    while hasattr(found, "attr"):
        attributes.insert(0, found.attr)
        found = found.base
    index = getattr(found, "idx", None)
    return None if index is None or type(found).__name__ != "PlainAOTInput" else (index, tuple(attributes))


def wrapped_tensors(tensor: Any) -> int | None:
    """How many tensors a tensor is made of that AOTAutograd takes apart; None for any other."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return len(tensor.__tensor_flatten__()[0]) if is_traceable_wrapper_subclass(tensor) else None


def held_tensors(value: Any) -> list[torch.Tensor] | None:
    """The tensors that have the memory of a tensor that wraps others, as a DTensor does; None for anything else."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) or wrapped_tensors(value) is None:
        return None
    found: list[torch.Tensor] = []
    for name in value.__tensor_flatten__()[0]:
        inner = getattr(value, name)
        found.extend([inner] if (held := held_tensors(inner)) is None else held)
    return found


def is_marked_static(tensor: Any) -> bool:
    """By torch._dynamo.mark_static_address."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def is_part(gm: fx.GraphModule) -> bool:
    """Whether the graph ends at a graph break, or starts behind one."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return False
    return bool(reason.graph_break) or any("torch_dynamo_resume_in" in f.name for f in reason.user_stack)


def expression(size: Any) -> sympy.Expr:
    """The symbolic expression behind a number, with the symbols that Dynamo unified replaced."""
    symbolic = number(size)
    return sympy.Integer(size) if symbolic is None else symbolic


def number(value: Any) -> sympy.Basic | None:
    """The same of a symbolic number of any type; None for anything else."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    node = value.node
    return node.shape_env.simplify(node.expr) if node.shape_env is not None else node.expr


def hinted(value: Any) -> Any:
    """A symbolic number as the number it was at capture, if that is known; anything else as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.has_hint():
        return value.node.hint
    return value


class Symbols:
    """A fresh symbolic world (ShapeEnv and fake mode) in which one operator is compiled."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def new(self, name: str, value: int) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self.env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return self.env.create_symintnode(symbol, hint=value, source=source)  # type: ignore[return-value]

    def assumed(self, symbols: Sequence[sympy.Symbol]) -> Callable[..., bool]:
        """Whether what the compiler assumed about these symbols on the way holds, as a function of their values.

        sympy would take a tenth of a millisecond for each assumption, and there are hundreds in a model.
        """
        from torch.utils._sympy import functions

        guards = [guard.expr for guard in self.env.guards if guard.expr.free_symbols <= set(symbols)]
        if not guards:
            return lambda *values: True
        check = sympy.lambdify(symbols, guards, modules=[vars(functions), "math"])
        return lambda *values: all(check(*values))


def warm_compiler() -> None:
    """Starts the processes in which Inductor compiles kernels, if it will use any. They take seconds to come up."""
    from torch._inductor import async_compile

    warm = getattr(async_compile, "maybe_warm_pool", None)
    if warm is not None and torch.cuda.is_available():
        warm()
        async_compile.AsyncCompile.use_process_pool()  # asks them to tell when they are ready


_replacing = forks.rlock()


def _note_calls() -> None:
    """Before a fork: whether another thread is inside of a compiled function."""
    global _amid_calls
    _amid_calls = False
    mine = threading.get_ident()
    for thread, frame in sys._current_frames().items() if "torch._dynamo" in sys.modules else ():
        while frame is not None and thread != mine and not _amid_calls:
            _amid_calls = frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
            frame = frame.f_back  # type: ignore[assignment]


def _renew_compilers() -> None:
    """In a child: the threads in which Inductor compiles are the parent's. And if it was forked amid calls of other
    threads, these may have held locks of Dynamo's, which nobody will open: one for all captures, one in the guards of
    each graph. So the graphs are captured anew. Seen on 2.11 and 2.13."""
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        compiler.AsyncCompile.pool.cache_clear()
    if _amid_calls:
        torch._dynamo.convert_frame.compile_lock._at_fork_reinit()  # type: ignore[attr-defined]
        torch._dynamo.reset_code_caches()


_amid_calls = False
os.register_at_fork(before=_note_calls, after_in_child=_renew_compilers)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """For a while, `function` is called in place of a function of torch's, which it gets as its first argument.

    That function is the process's own: so one thread at a time replaces any, and the others go on calling it.
    """
    mine = threading.get_ident()
    with _replacing:
        usual = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            return function(usual, *args, **kwargs) if threading.get_ident() == mine else usual(*args, **kwargs)

        setattr(owner, name, called)
        try:
            yield
        finally:
            setattr(owner, name, usual)


class Kernels:
    """Kernels that Inductor's processes are still compiling, for several graphs at once.

    Inductor waits for the kernels of each graph before it returns. Those of the next graph could be on their way
    meanwhile: so inside `later` that wait is put off, until `wait`, which must come before any of the graphs is called.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], Callable[[Exception], Any]]] = []

    def later(self, failed: Callable[[Exception], Any]) -> contextlib.AbstractContextManager[None]:
        """`failed`: called in `wait`, if a kernel can't be compiled that is asked for in this context."""
        from torch._inductor.async_compile import AsyncCompile

        def put_off(usual: Callable[..., None], *args: Any) -> None:
            self._waiting.append((lambda: usual(*args), failed))

        return _replaced(AsyncCompile, "wait", put_off)

    def wait(self) -> bool:
        """Whether all of them were compiled."""
        good = True
        while self._waiting:
            wait, failed = self._waiting.pop(0)
            try:
                wait()
            except Exception as e:
                good = False
                failed(e)
        return good


def no_cpp_compiler() -> str:
    """Why Inductor can't compile for the host; empty if it has a C++ compiler. Seen on 2.11 and 2.13."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as e:  # InvalidCxxCompiler; or what the system says to a CXX that can't be run
        return reason(e)
    return ""


def is_compilers(error: BaseException) -> bool:
    """Whether a compiler is at fault, and not what was compiled: when it is asked for a kernel as late as in a call, or
    its code finds that it was made for something else. Seen on 2.11 and 2.13."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if isinstance(error, torch.OutOfMemoryError):
        return False
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo.exc", "triton")):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    if any(name.startswith(_COMPILING) for name in modules):
        return True
    return isinstance(error, AssertionError) and frames[-1].f_code.co_filename.startswith(cache_dir())


_COMPILING = ("triton.", "torch._inductor.async_compile", "torch._inductor.codecache", "torch._inductor.cpp_builder")


def reason(error: BaseException) -> str:
    """In a line, what compilers say in a hundred."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = " ".join([*lines[:1], *[line for line in lines[1:] if "error:" in line][:1]])
    return f"{type(error).__name__}: {told}"[:300]


def compile_operator(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Symbols,
    *,
    still: frozenset[int],
    direct: bool,
    failed: Callable[[Exception], None],
) -> Boxed:
    """Inductor over a graph; the callable takes the graph's inputs in a list, which it empties, and returns a list.

    `still`: inputs that stay where they are in memory, aligned as kernels like it: else each call looks at all.
    `direct`: all results are tensors; then the compiled code is called without AOTAutograd's wrapper around it wherever
    that has nothing to do, which takes half as long.
    `failed`: called if the backward pass of a graph with gradients can't be compiled, which shows late, and runs as it
    is then.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    _say_where_kernels_are_kept(inputs)
    context = TracingContext(symbols.mode)
    made = []

    def inner(graph: Any, given: Sequence[Any], **options: Any) -> Any:
        if len(given) == len(inputs):  # else some were left out, or put together
            options["static_input_idxs"] = sorted({*options.get("static_input_idxs", ()), *still})
        shaped = TORCH >= (2, 13) or keep_sums_in_shape(graph)
        with torch._inductor.config.patch({} if shaped else {"triton.mix_order_reduction": False}):
            try:
                made.append((compile_fx_inner(graph, given, **options), len(given)))
            except Exception as e:
                if not options.get("is_backward"):
                    raise
                failed(e)
                return _boxed(boxed_forward(with_own_draws(graph)))
        return made[-1][0]

    # A hit in AOTAutograd's cache would hand out the wrapper alone. Inductor's own cache stays in use.
    cache = torch._functorch.config.enable_autograd_cache and not direct
    caching = torch._functorch.config.patch(enable_autograd_cache=cache)
    apart = torch._inductor.config.patch(_results_kept_apart())
    with tracing(context), caching, apart, _hosts_alignment_is_nothing(inputs):
        wrapped: Any = compile_fx(gm, list(inputs), inner_compile=inner)
    found = made[0][0] if direct and len(made) == 1 and made[0][1] == len(inputs) else None
    call = getattr(found, "current_callable", None)
    if call is None or not _wrapper_is_idle(context.fw_metadata, len(inputs)):
        return _taking_a_list(wrapped, gm)
    written = [i for i, info in enumerate(context.fw_metadata.input_info) if info.mutates_data]  # type: ignore[union-attr]
    if not written:
        return cast("Boxed", call)

    def call_and_tell(args: list[Any]) -> Any:
        changed = [args[i] for i in written]
        results = call(args)
        for tensor in changed:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return results

    return call_and_tell


def _results_kept_apart() -> dict[str, Any]:
    """Settings by which results of a graph share no memory with an input, or with one another, that they don't share it
    with as traced: Inductor returns `x` for `x * torch.ones(4)`. Nor does `as_strided` look at an input in the place of
    what it looked at. Seen on 2.11 and 2.13."""
    import torch._inductor.config as config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    key, write, stride = "dynaflow: results", torch.ops.aten.copy_.default, torch.ops.aten.as_strided.default

    class Pass(CustomGraphPass):
        def __init__(self, users: Any, own: Callable[[fx.Graph], None]) -> None:
            self._users, self._own = users, own

        def __call__(self, graph: fx.Graph) -> None:
            if self._users is not None:
                self._users(graph)
            self._own(graph)

        def uuid(self) -> Any:
            """Of what torch's caches keep: not what another version of this file has made."""
            own = get_hash_for_files((__file__,))
            if self._users is None:
                return own
            users = self._users.uuid() if isinstance(self._users, CustomGraphPass) else None
            return (own, users) if users is not None else None

    def note(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        if isinstance(output.args[0], fx.Node):  # a graph within another
            return
        output.meta[key] = [_looked_at(node) for node in output.args[0]]
        for node in graph.find_nodes(op="call_function", target=write):
            node.meta[key] = _looked_at(node.args[1])
        for node in graph.find_nodes(op="call_function", target=stride):
            node.meta[key] = _looked_at(node.args[0])

    def copy(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        if key not in output.meta:
            return
        before, known, results = output.meta.pop(key), dict[fx.Node, fx.Node](), list(output.args[0])
        copies: dict[fx.Node, fx.Node] = {}
        """By what was looked at before: a copy of what took its place. All that looked at it share one, as AOTAutograd
        has results that share memory start where they start in it."""

        def copy_of(own: fx.Node, base: fx.Node) -> fx.Node:
            if own not in copies:
                first = next(node for node in graph.nodes if node.op != "placeholder")
                place = graph.inserting_before(first) if base.op == "placeholder" else graph.inserting_after(base)
                with place:
                    copies[own] = copied(graph, base, torch.ops.aten.clone.default)
            return copies[own]

        for node in graph.find_nodes(op="call_function", target=stride):
            base = _looked_at(node.args[0])
            own = node.meta.pop(key, base)
            if own is not base and base.op == "placeholder":  # which may start anywhere in memory
                node.args = (copy_of(own, base), *node.args[1:])
        given = [node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder")]
        gradients = given.count(False) if any(given) else 0  # which may share memory: there is one for each input
        for i, node in enumerate(results[: len(before) - gradients]):
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            base = _looked_at(node)
            own = base if base.op == "placeholder" else known.setdefault(base, before[i])
            if own is not before[i]:
                with graph.inserting_before(output):
                    results[i] = _same_view(graph, node, base, copy_of(before[i], base))
        output.args = (type(output.args[0])(results),)
        for node in graph.find_nodes(op="call_function", target=write):
            base = _looked_at(node.args[1])
            if node.meta.pop(key, base) is not base and base.op == "placeholder":  # it may be written first
                with graph.inserting_after(node.args[1]):
                    made = copied(graph, node.args[1], torch.ops.dynaflow.copy.default)
                node.args = (node.args[0], made, *node.args[2:])

    def copied(graph: fx.Graph, node: fx.Node, function: OpOverload) -> fx.Node:
        made = graph.call_function(function, (node,))
        with node.meta["val"].fake_mode:
            made.meta = {**node.meta, "val": node.meta["val"].clone()}
        return made

    passes = {"joint_custom_pre_pass": note, "joint_custom_post_pass": copy}
    theirs = {name: getattr(config, name) for name in passes}
    return {name: Pass(theirs[name], own) for name, own in passes.items() if not isinstance(theirs[name], list)}


def _same_view(graph: fx.Graph, node: fx.Node, base: fx.Node, instead: fx.Node) -> fx.Node:
    """What a view of `base` is of another tensor, of the same sizes and strides."""
    if node is base:
        return instead
    if node.target is operator.getitem:  # one of several views
        views = cast("fx.Node", node.args[0])
        of = _same_view(graph, cast("fx.Node", views.args[0]), base, instead)
        made = graph.node_copy(views, lambda n: of if n is views.args[0] else n)
        return graph.node_copy(node, lambda n: made if n is views else n)
    of = _same_view(graph, cast("fx.Node", node.args[0]), base, instead)
    return graph.node_copy(node, lambda n: of if n is node.args[0] else n)


def is_view(schema: Any) -> bool:
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def looked_through(node: fx.Node) -> Iterator[fx.Node]:
    """A node of a traced graph, and what it is a view of, to the end."""
    while True:
        yield node
        called: Any = node.args[0] if node.target is operator.getitem else node  # one of several views
        if not (isinstance(called.target, OpOverload) and is_view(called.target._schema)):
            return
        node = called.args[0]


def _looked_at(node: Any) -> Any:
    """What it is a view of in the end; itself, if it is none."""
    return [*looked_through(node)][-1] if isinstance(node, fx.Node) else node


def _say_where_kernels_are_kept(inputs: Sequence[Any]) -> None:
    """Triton keeps the kernels of a process in one folder, others' than Inductor's too, and finds them there again.

    Inductor (2.11, 2.13) names it when it makes its first kernel, but not when it has found all in its own cache: then
    the others would be looked for in Triton's usual folder, and compiled anew.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    devices = [i.device for i in inputs if isinstance(i, torch.Tensor) and i.device.type == "cuda"]
    if devices:
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(devices[0].index or 0))


def _hosts_alignment_is_nothing(inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """An operator that is given a tensor on the host does not make what is behind it slower.

    Inductor (2.11, 2.13) takes no tensor on the host for aligned, nor what an operator makes of one that is not: so
    kernels would read its results on the device element by element.
    """
    from torch._inductor import graph

    if all(i.device.type == "cpu" for i in inputs if isinstance(i, torch.Tensor)):
        return contextlib.nullcontext()
    aligned = lambda usual, example: example.device.type == "cpu" or usual(example)  # noqa: E731
    return _replaced(graph, "should_assume_input_aligned", aligned)


def inductor_settings(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """In this context, Inductor is configured so."""
    import torch._inductor.config

    return torch._inductor.config.patch(dict(settings))


def keep_sums_in_shape(gm: fx.GraphModule) -> bool:
    """Before 2.13, where Inductor reads a tensor once for its sums over rows and over columns (mix_order_reduction), it
    returns sums in one dimension that have more. Views of them come out right, so dimensions that a sum keeps are added
    behind it, in the graph. False if that does not help them all."""
    aten = torch.ops.aten
    sums = (aten.sum.dim_IntList, aten.prod.dim_int, aten.amax.default, aten.amin.default)
    (output,) = gm.graph.find_nodes(op="output")
    results = [node for node in output.all_input_nodes if node.target in sums and node.meta["val"].dim() > 1]
    for node in results:
        if node.args[2:3] == (True,):
            value = node.meta["val"]
            summed = [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
            dims = sorted(d % value.dim() for d in summed or range(value.dim()))
            node.args, node.meta["val"] = (*node.args[:2], False, *node.args[3:]), value.squeeze(dims)
            kept, users = node, tuple(node.users)
            for d in dims:
                with gm.graph.inserting_after(kept):
                    inner, kept = kept, gm.graph.call_function(aten.unsqueeze.default, (kept, d))
                kept.meta = {**node.meta, "val": inner.meta["val"].unsqueeze(d)}
            for user in users:
                user.replace_input_with(node, kept)
    if results:
        gm.recompile()
    ends = [node.args[0] if node.target is aten.expand.default else node for node in output.all_input_nodes]
    return not any(node.target in sums and node.meta["val"].dim() > 1 for node in ends)


def _taking_a_list(wrapped: Any, gm: fx.GraphModule) -> Boxed:
    """What AOTAutograd made, less the function around it, which would hold all arguments until the end.

    That one is named `forward`, and adds the graph's own tensors to the arguments, if there are any.
    """
    call = wrapped
    while getattr(call, "__name__", "") == "forward":
        call = getattr(call, "__wrapped__", None)
    own = [*gm.parameters(), *gm.buffers()]
    if call not in (wrapped, None) and not own and not torch.is_grad_enabled():  # else autograd holds them in any case
        return cast("Boxed", call)

    def spread(args: list[Any]) -> Any:
        given = tuple(args)
        args.clear()
        return wrapped(*given)

    return spread


def boxed_forward(gm: fx.GraphModule) -> Boxed:
    """The graph's own function, uncompiled. Seen on 2.11 and 2.13."""
    from torch.fx.graph import CodeGen

    class FromAList(CodeGen):
        def gen_fn_def(self, free_vars: list[str], *_: Any, **__: Any) -> str:
            names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
            taken = f"    {', '.join(names)}, = box\n    box.clear()" if names else ""
            return f"def forward(self, box):\n{taken}"

    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(FromAList())
    return cast("Boxed", fx.GraphModule(gm, graph).forward)


def _boxed(call: Boxed) -> Boxed:
    """As AOTAutograd knows those that take a list."""

    def boxed(args: list[Any]) -> Any:
        return call(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def compile_passes(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    make: Callable[[fx.GraphModule, bool], Boxed],
    *,
    native: bool,
    native_random: bool,
    rewrite: bool,
    merge_calls: bool,
) -> Callable[..., Any]:
    """A graph that autograd can go back through: `make` gets the forward and the backward graph (True), as Inductor
    would get them, and returns what runs them. Where nothing wants a gradient there is one graph.

    `native`: torch's own kernels run them. `native_random`: random numbers are drawn as torch draws them, not from
    Inductor's seeds. `rewrite`: Inductor may fold constants, and drop casts that round. `merge_calls`: equal calls
    become one. Seen to work on 2.11 and 2.13.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch.utils._python_dispatch import _disable_current_modes

    def inner(graph: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        _keep_what_is_saved()
        with _disable_current_modes():  # tensors are fake in here, and what we look at is not
            run = make(graph, bool(options.get("is_backward")))

        def boxed(args: list[Any]) -> Any:
            if not torch._C._len_torch_dispatch_stack():
                return run(args)
            with _disable_current_modes():  # at the first call AOTAutograd watches, and plans are compiled then
                return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    options = {
        "enable_autograd_cache": False,  # it keeps what Inductor makes, and nothing else
        "cse": merge_calls,
        "backward_pass_autocast": "off",  # as where backward() is called
    }
    settings: dict[str, Any] = {"fallback_random": native_random or torch._inductor.config.fallback_random}
    if not rewrite:
        settings |= {"pattern_matcher": False, "joint_graph_constant_folding": False}
    # Constants that Inductor folds may come before the sizes they are made of: where others have passes it sorts them.
    settings |= _results_kept_apart()
    with (
        torch._functorch.config.patch(options),
        torch._inductor.config.patch(settings),
        _dual_levels_left(),
        _scalars_stay_inputs(gm),
    ):
        # Inductor's sum of complex numbers looks at them as real ones, which kernels of torch's can't in all layouts.
        sums = [getattr(torch.ops.aten.add, name) for name in torch.ops.aten.add.overloads()]
        table = {op: decompose for op, decompose in select_decomp_table().items() if op not in sums}
        made: Any = compile_fx(gm, list(inputs), inner_compile=inner, decompositions=table if native else None)
    return cast("Callable[..., Any]", made)


@contextlib.contextmanager
def _scalars_stay_inputs(gm: fx.GraphModule) -> Iterator[None]:
    """Keeps AOTAutograd from asking Dynamo to trace again with the values of float64 scalars as constants: Dynamo then
    drops every call that writes to such an input along with it. Scalars of which the graph takes the item are left to
    them: those are Python floats. Seen on 2.11 and 2.13."""
    from torch._dynamo.symbolic_convert import TensorifyState

    names = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        item = getattr(node.meta.get("example_value"), "item_memo", None)
        name = getattr(getattr(getattr(item, "node", None), "_expr", None), "name", None)
        if name is not None and not any(user.target == "item" for user in node.users):
            names.add(name)
    names -= TensorifyState.force_specializations
    TensorifyState.force_specializations |= names
    try:
        yield
    finally:
        TensorifyState.force_specializations -= names


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


def hold(value: Any, results: Sequence[Any]) -> None:
    """Keeps a value for as long as autograd may go back through results. Seen on 2.13."""
    for result in results:
        node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
        if node is not None:
            node.metadata["dynaflow"] = value


class _Backward(threading.local):
    """Of the backward pass that a thread is making."""

    unused: frozenset[int] = frozenset()
    """Places of results that the loss does not depend on."""


_backward = _Backward()
_NOTED = "dynaflow notes unused results"


def note_unused(results: Sequence[Any]) -> None:
    """Has `unused_results` know, in the backward pass, which of these results of `compile_passes` nothing was made of:
    autograd hands over zeros as their gradients. Seen on 2.11 and 2.13."""
    node: Any
    for node in dict.fromkeys(result.grad_fn for result in results if isinstance(result, torch.Tensor)):
        for _ in range(8):  # views of results, at the most of one another
            if node is None or type(node).__name__ == "CompiledFunctionBackward":
                break
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        if node is not None and type(node).__name__ == "CompiledFunctionBackward" and _NOTED not in node.metadata:
            node.metadata[_NOTED] = True
            node.register_prehook(_note)


def _note(gradients: Sequence[torch.Tensor | None]) -> None:
    _backward.unused = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)


def unused_results() -> frozenset[int]:
    """Which results of the forward graph nothing was made of, in the backward pass that is under way."""
    unused, _backward.unused = _backward.unused, frozenset()
    return unused


def results_of_gradients() -> list[int]:
    """For each gradient that the backward graph gets: the place of its result among those of the forward graph that is
    being compiled. Seen on 2.11 and 2.13."""
    meta = _traced()
    kinds = ("non_alias", "unsafe_view_alias", "custom_function_view")
    written = [meta.input_info[i] for i in meta.mutated_inp_runtime_indices]
    places = [i for i, info in enumerate(written) if info.mutates_data and info.requires_grad]
    places += [
        i
        for i, info in enumerate(meta.output_info, len(written))
        if info.output_type.name in kinds and issubclass(info.raw_type, torch.Tensor)
        if getattr(info, "requires_grad_for_backward", info.requires_grad)  # 2.13, and 2.11
    ]
    first = len(written) + len(meta.output_info)
    return [*places, *range(first, first + meta.num_intermediate_bases)]


def in_forward_mode() -> bool:
    """Whether tensors may have tangents, of forward-mode AD. Seen on 2.11 and 2.13."""
    return torch.autograd.forward_ad._current_level >= 0


def has_transforms(gm: fx.GraphModule) -> bool:
    """Whether the graph enters and leaves levels of torch.func, whose tensors wrap others: no node
    of it can be looked at by itself. Seen on 2.11 and 2.13."""
    modules = ("torch._functorch.", "torch._C._functorch", "torch.autograd.forward_ad")
    called = (getattr(n.target, "__module__", "") for n in gm.graph.nodes if n.op == "call_function")
    return any(str(module).startswith(modules) for module in called)


@contextlib.contextmanager
def _dual_levels_left() -> Iterator[None]:
    """A failure inside leaves no level of forward-mode AD behind, of which there can be one: Dynamo sees to
    the others of torch.func. Seen on 2.13."""
    try:
        torch._C._exit_dual_level(torch._C._enter_dual_level())
    except RuntimeError:  # the caller is in one
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            torch._C._exit_dual_level(0)
        raise


def _keep_what_is_saved() -> None:
    """Inductor would write over tensors that were saved for the backward graph that is being compiled; so AOTAutograd
    refuses a second backward pass with `retain_graph`. What is made here writes over none."""
    if donated := _traced().bw_donated_idxs:
        donated.clear()  # in place: AOTAutograd has the list more than once


def draw_by_seed(gm: fx.GraphModule) -> None:
    """Makes a pass drawn up for Inductor fit to run as it is: torch's own stand-ins for Inductor's random numbers know
    nothing of seeds, and what the backward pass draws again has to be what the forward pass drew."""
    from torch._inductor import inductor_prims

    for node in gm.graph.find_nodes(op="call_function", target=inductor_prims.random):
        node.target, node.kwargs = torch.ops.dynaflow.random.default, {}
    for node in gm.graph.find_nodes(op="call_function", target=inductor_prims.randint):
        node.target = torch.ops.dynaflow.randint.default
    gm.recompile()


def with_own_draws(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, fit to run as it is: what it draws by seeds is what compiled code draws by them, in another pass."""
    if not draws_again(gm):
        return gm
    from torch._inductor import inductor_prims

    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for prim, drawn in ((inductor_prims.random, _drawn_random), (inductor_prims.randint, _drawn_randint)):
        for node in graph.find_nodes(op="call_function", target=prim):
            node.target = drawn
    return fx.GraphModule(gm, graph)


def _drawn_random(size: Sequence[int], seed: torch.Tensor, mode: str, **more: Any) -> torch.Tensor:
    call = _draw("random", (tuple(size), None, mode), tuple(more.items()), seed.device, seed.dtype)
    return cast("torch.Tensor", call([seed])[0])


def _drawn_randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    call = _draw("randint", (low, high, tuple(size), None), (), seed.device, seed.dtype)
    return cast("torch.Tensor", call([seed])[0])


@functools.lru_cache(1024)
def _draw(
    name: str, args: tuple[Any, ...], more: tuple[tuple[str, Any], ...], device: torch.device, dtype: torch.dtype
) -> Boxed:
    """A draw compiled by itself; None stands for the seed."""
    from torch._inductor import inductor_prims

    graph, world = fx.Graph(), Symbols()
    seed = graph.placeholder("seed")
    given = tuple(seed if arg is None else list(arg) if isinstance(arg, tuple) else arg for arg in args)
    graph.output((graph.call_function(getattr(inductor_prims, name), given, dict(more)),))
    with world.mode:
        example = torch.empty((), dtype=dtype, device=device)
    try:
        return compile_operator(
            fx.GraphModule({}, graph), [example], world, still=frozenset(), direct=True, failed=lambda e: None
        )
    except Exception as e:
        raise DynaFlowError(
            f"random numbers that another pass draws again can't be compiled: {reason(e)}",
            advice='say operators="eager", under which no pass is compiled',
        ) from e


def draws_again(gm: fx.GraphModule) -> bool:
    """Whether it makes random numbers of a seed that it is given, as Inductor does."""
    from torch._inductor import inductor_prims

    prims = (inductor_prims.random, inductor_prims.randint)
    return any(gm.graph.find_nodes(op="call_function", target=prim) for prim in prims)


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


def _random(size: Sequence[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    draw = getattr(torch, mode)
    return cast("torch.Tensor", draw(size, generator=_generator(seed), device=seed.device, dtype=torch.float))


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


_library = torch.library.Library("dynaflow", "FRAGMENT")
_library.define("random(SymInt[] size, Tensor seed, str mode) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.impl("random", _random, "CompositeExplicitAutograd")
_library.define(
    "randint(SymInt low, SymInt high, SymInt[] size, Tensor seed) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
_library.impl("randint", _randint, "CompositeExplicitAutograd")


def _fake_random(size: Sequence[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.float)


def _fake_randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.int64)


_library.define("copy(Tensor x) -> Tensor")  # which no compiler takes for nothing
_library.impl("copy", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::copy", torch.clone, lib=_library)
torch.library.register_fake("dynaflow::random", _fake_random, lib=_library)
torch.library.register_fake("dynaflow::randint", _fake_randint, lib=_library)


def after_backward(function: Callable[[], None]) -> None:
    """Calls it at the end of the backward pass that is under way. What it raises, backward() raises. Seen on 2.11 and
    2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to be called with its gradient. Seen on 2.11 and 2.13."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def gets_gradient(parameter: torch.Tensor) -> bool:
    """Whether the backward pass that is under way will leave a gradient at it. Seen on 2.11 and 2.13."""
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)


def have_scalers_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """GradScaler.step comes to the optimizer's own step, and its hooks, even if there are no gradients: else it fails
    without a word of why. Returns the function that takes that back. Seen on 2.11 and 2.13."""
    had = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return lambda: setattr(optimizer, "_step_supports_amp_scaling", had)


def saved_results() -> slice:
    """Which results of the forward graph that is being compiled are tensors that the backward graph gets."""
    meta = _traced()
    if meta.num_symints_saved_for_bw is None:  # no gradient is wanted after all: there is no backward graph
        return slice(0, 0)
    found: slice = meta.tensors_saved_for_backwards_slice
    return found


def returned_results() -> int:
    """How many results of the forward graph that is being compiled, the first ones, are not for its backward graph."""
    found: int = _traced().num_forward_returns
    return found


def first_result() -> int:
    """At which of its own results the forward graph that is being compiled has those of the traced graph."""
    found: int = _traced().num_mutated_inp_runtime_indices
    return found


def fresh_results() -> list[int]:
    """Which results of the forward graph that is being compiled were, as AOTAutograd traced them, no views of inputs or
    of one another. Seen on 2.11 and 2.13."""
    meta = _traced()
    infos = enumerate(meta.output_info, first_result())
    return [i for i, info in infos if info.output_type.name == "non_alias"]


def bases_of_results() -> dict[int, int]:
    """Which results of the forward graph that is being compiled are there for another one to be made of, as its view;
    and for which. Seen on 2.11 and 2.13."""
    infos = list(enumerate(_traced().output_info, first_result()))
    kinds = ("alias_of_intermediate", "alias_of_intermediate_save_as_output")
    views = [(i, info.base_idx) for i, info in infos if info.output_type.name in kinds]
    return {first_result() + len(infos) + base: i for i, base in views}


def written_inputs() -> frozenset[int]:
    """Which inputs of the graph whose passes are being compiled it writes. Seen on 2.13."""
    return frozenset(n for n, info in enumerate(_traced().input_info) if info.mutates_data)


def _traced() -> Any:
    """What AOTAutograd knows of the passes that are being compiled."""
    from torch._guards import TracingContext

    meta = TracingContext.get().fw_metadata
    assert meta is not None
    return meta


def _wrapper_is_idle(meta: Any, inputs: int) -> bool:
    """Whether a compiled graph needs nothing done around it: no view to make again, no write to finish."""
    return (
        meta is not None
        and len(meta.input_info) == inputs
        and not torch.is_grad_enabled()
        and not any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        and not any(info.mutates_metadata or info.mutates_storage_metadata for info in meta.input_info)
        and not meta.mutated_inp_runtime_indices
        and all(info.output_type.name == "non_alias" for info in meta.output_info)
        and not (meta.num_intermediate_bases or meta.tokens or meta.num_graphsafe_rng_states)
        and all(type(m).__name__ == "PlainTensorMeta" for m in (meta.subclass_inp_meta or ()))
    )


@contextlib.contextmanager
def concrete_fake_mode() -> Iterator[Any]:
    """Fake tensors with concrete sizes: shapes, strides and aliasing of a run, without the run."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with _without_logs_of_fakes(), mode:  # the sizes are not the user's
        yield mode


@contextlib.contextmanager
def _without_logs_of_fakes() -> Iterator[None]:
    """Silences the errors that torch logs when a call fails on fake tensors, in this thread only."""
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()
    quiet = lambda record: record.thread != thread  # noqa: E731
    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a (fake) tensor, for as long as the tensor lives."""
    return tensor.untyped_storage()._cdata


def view_at(like: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """A tensor that is to a storage what `like` is to its own, `offset` elements from its start."""
    made = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.size(), like.stride())
    made = made.conj() if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made


def opaque_type_name(kind: type) -> str:
    """How schemas call a class of objects that graphs carry along unseen; they print all of them as PyObject."""
    from torch._library.opaque_object import get_opaque_type_name

    return get_opaque_type_name(kind)


def timing_event() -> Any:
    """An event without the Python that torch.cuda.Event puts around each method. Seen on 2.11."""
    return torch._C._CudaEventBase(enable_timing=True)


def set_stream(stream: Any) -> None:
    """Makes `stream` current: what torch.cuda.set_stream does, less its checks."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


REGIONS: dict[Any, Any] = {
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}
"""Region marks that Dynamo leaves in a graph: the function that opens a region, and the one that ends it."""

SET_GRAD = torch._C._set_grad_enabled

SUBGRAPHS: dict[Any, int] = {torch.ops.higher_order.invoke_subgraph: 2}
CHECKPOINTS: dict[Any, int] = {torch.ops.higher_order.tag_activation_checkpoint: 1}
"""Calls of a graph that do nothing else where no gradients are wanted, and where its arguments start among theirs."""

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
FLEX_ATTENTION_BACKWARD = torch.ops.higher_order.flex_attention_backward

LINEAR = torch._C._nn.linear
"""What torch.nn.functional.linear is in a captured graph."""


_STRATEGIES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
_MOST_PLACEMENTS = 300


def propagate_sharding(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dim_of: Callable[[torch.Tensor], int | None],
) -> SimpleNamespace:
    """DTensor's answer: `shards`, the dimension on which each output is sharded (None: it is not, or not
    only), and `changes`, pairs of an argument we gave and another that DTensor would run the call with."""
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema
    from torch.utils._python_dispatch import _disable_current_modes

    def spec(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dim = dim_of(value)
            meta = TensorMeta(value.shape, value.stride(), value.dtype)
            return DTensorSpec(mesh, (Replicate() if dim is None else Shard(dim),), tensor_meta=meta)
        if isinstance(value, list | tuple):
            return type(value)(spec(member) for member in value)
        return value

    def changes(before: Any, after: Any) -> list[tuple[Any, Any]]:
        if isinstance(before, DTensorSpec) and isinstance(after, DTensorSpec):
            return [] if before.placements == after.placements else [(before, after)]
        nested = isinstance(before, list | tuple) and isinstance(after, list | tuple)
        nested = nested and len(before) == len(after)
        if nested and any(isinstance(member, DTensorSpec) for member in before):
            return [pair for b, a in zip(before, after, strict=True) for pair in changes(b, a)]
        same = (list(before) == list(after)) if nested else (before is after or before == after)
        return [] if same else [(before, after)]

    def placements(schema: Any) -> list[tuple[Any, ...]]:
        """As they are given, and all replicated."""
        given = tree_leaves([*schema.args_schema, *schema.kwargs_schema.values()])
        specs = [leaf if isinstance(leaf, DTensorSpec) else None for leaf in given]
        return [
            tuple(s and s.placements[0] for s in specs),
            tuple(s and Replicate() for s in specs),
        ]

    def shard(output: Any) -> int | None:
        (placement,) = output.placements
        return placement.dim if type(placement) is Shard else None

    # The call is run on fake tensors inside: neither our caller's modes nor their fake mode may see that.
    with _disable_current_modes():
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
        tables = DTensor._op_dispatcher.sharding_propagator
        propagator = type(tables)()
        for name, table in vars(tables).items():
            if isinstance(table, dict):
                setattr(propagator, name, dict(table))
        info = propagator.op_to_schema_info.get(func)
        if info is None:
            info = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(func)
        schema = OpSchema(func, spec(tuple(args)), {k: spec(v) for k, v in kwargs.items()}, schema_info=info)
        # DTensor follows every combination of placements through an operator's decomposition, which takes hours for a
        # list of tensors. We only ask about the given ones.
        decomposed: Any = getattr(propagator, "decomp_strategy", None)
        if decomposed is not None:
            decomposed._get_candidate_placements = placements
        elif not any(func in table for name, table in vars(propagator).items() if name in _STRATEGIES):  # torch 2.11
            count = prod(value.dim() + 1 for value in tree_leaves([*args, *kwargs.values()])
                         if isinstance(value, torch.Tensor))  # fmt: skip
            if count > _MOST_PLACEMENTS:
                raise NotImplementedError(f"there are {count} ways to shard its arguments")
        found = propagator.propagate_op_sharding_non_cached(schema)
    wanted = found.redistribute_schema
    pairs: list[tuple[Any, Any]] = []
    if wanted is not None:
        pairs = changes(schema.args_schema, wanted.args_schema) + changes(schema.op, wanted.op)
    elif found.needs_redistribute:
        pairs = [(schema, None)]
    outputs: Any = found.output_spec
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    return SimpleNamespace(shards=[shard(output) for output in outputs if output is not None], changes=pairs)


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many hold the storage: tensors, views of them, and Python objects."""
    return torch._C._storage_Use_Count(storage._cdata)


def same_addresses(tensors: Sequence[Any], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at `positions` are where `addresses`, a list for all tensors, says."""
    equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only where torch is built for CUDA
    if equal is None:
        return all([tensors[i].data_ptr() == addresses[i] for i in positions])
    return equal(tensors, addresses, positions)


def leave_pool(device: torch.device, pool: Any) -> None:
    """After a capture that failed: CUDAGraph.capture_end raises before it lets go of the memory pool."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)


def rank() -> int:
    return torch.distributed.get_rank()


def ranks_of(groups: Sequence[str]) -> tuple[int, ...]:
    """The ranks, in the whole world, of process groups given by name ("*": all); none where there is no world.

    Seen on 2.11 and 2.13.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    if not (dist.is_available() and dist.is_initialized()):
        return ()
    found: set[int] = set()
    for name in groups:
        if name == "*":
            return tuple(range(dist.get_world_size()))
        found.update(dist.get_process_group_ranks(_resolve_process_group(name)))  # type: ignore[arg-type]
    return tuple(sorted(found))


def exchange(prefix: str, mine: int, ranks: Sequence[int], said: str, patience: timedelta) -> dict[int, str]:
    """Leaves a text in the store of the process's default group, and returns what the ranks left there in time.

    Seen on 2.11 and 2.13.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"{prefix}/{mine}", said)
    heard: dict[int, str] = {}
    for rank in ranks:
        with contextlib.suppress(torch.distributed.DistStoreError):  # it timed out
            store.wait([f"{prefix}/{rank}"], patience)
            heard[rank] = store.get(f"{prefix}/{rank}").decode()
    return heard


def shard_of(tensor: Any) -> torch.Tensor | None:
    """What a DTensor holds on this rank; None for anything else. Seen on 2.11 and 2.13."""
    if type(tensor).__name__ not in ("DTensor", "Parameter") or not torch.distributed.is_available():
        return None
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, torch.Tensor) else None


def symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that other ranks may be shown. Read in 2.13's source; not seen to work, for want of several GPUs."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(nbytes, dtype=torch.uint8, device=device)


def meet_in(buffer: torch.Tensor | None, group: str) -> torch.Tensor:
    """Shows the group's ranks each other's memory. Read in 2.13's source; not seen to work."""
    import torch.distributed._symmetric_memory as symmetric

    assert buffer is not None
    symmetric.rendezvous(buffer, group)  # type: ignore[arg-type]
    return buffer


def dtensor_method(node: fx.Node) -> str | None:
    """The method of a DTensor that a node may call. A method call on 2.13; on 2.11 a function named prim_to_local."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.removeprefix("prim_") if name.startswith("prim_") else None


def is_fake(value: Any) -> bool:
    """A tensor that has nothing but a shape."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor


def is_plain_fake(value: Any) -> bool:
    """A fake tensor of which shape, type and device are all there is: no symbols, no known content, no bits set."""
    return (
        is_fake(value)
        and value.constant is None
        and value.layout is torch.strided
        and not (value._has_symbolic_sizes_strides or value.requires_grad or value.is_conj() or value.is_neg())
    )


def fake_again(
    mode: Any,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    over: torch.Tensor | None,
) -> torch.Tensor:
    """A fake tensor that looks so, in the memory of another or in its own: without asking an operator, a tenth of the
    time. Seen on 2.11 and 2.13."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch():
        if over is None:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta").set_(over.untyped_storage(), offset, size, stride)
        return cast("torch.Tensor", FakeTensor(mode, meta, device))


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
