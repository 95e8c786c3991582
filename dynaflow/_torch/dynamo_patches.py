"""Workarounds for Dynamo's errors, in models traced for dynaflow only: break the graph, or fix the trace."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

from dynaflow._torch.dynamo import INLINE_ONLY, constant_in_trace, is_dynaflow_backend, unwrapped_backend
from dynaflow._torch.fakes import silence_fake_errors
from dynaflow._torch.versions import TORCH
from dynaflow.errors import fall_back


def patch_dynamo(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Installs the workarounds, once. They act only on models traced for dynaflow, in which Dynamo also traces
    recurrent modules, `functions` in place of torch's, and the masks of nn.Transformer. Seen on 2.13."""
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    if all(function in handlers for function in functions):
        return

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_dynaflow_backend(tx.output.compiler_fn):
                return None
            return VariableTracker.build(tx, function).call_function(tx, list(args), kwargs)

        return handle

    handlers.update({function: traced(instead) for function, instead in functions.items()})
    usual = builder.VariableBuilder.wrap_module

    def wrap_module(self: Any, value: torch.nn.Module) -> Any:
        ours = isinstance(value, torch.nn.RNNBase) and is_dynaflow_backend(self.tx.output.compiler_fn)
        with torch._dynamo.config.patch(allow_rnn=True) if ours else contextlib.nullcontext():
            return usual(self, value)

    builder.VariableBuilder.wrap_module = wrap_module  # type: ignore[method-assign]
    for function, traced_instead in _MASKS.items():
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced_instead)
    _break_at_mapped_autograd_functions()
    _keep_lengths_of_deques()
    _break_where_traces_go_wrong()
    _run_what_dynamo_fails_on()
    if TORCH < (2, 13):  # AOTAutograd drops the errors of torch.linalg in training; fixed in 2.13
        fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)
    for code in INLINE_ONLY:
        torch._dynamo.eval_frame.skip_code(code)


def _break_graph(tx: Any, why: str) -> None:
    from torch._dynamo.variables.base import VariableTracker

    message = {"msg": VariableTracker.build(tx, why)}
    VariableTracker.build(tx, torch._dynamo.graph_break).call_function(tx, [], message)


def _break_at_mapped_autograd_functions() -> None:
    """Breaks the graph at an autograd.Function under vmap: Dynamo drops its backward, or fails. Also at
    set_materialize_grads, which Dynamo ignores. Seen on 2.11 and 2.13."""
    from torch._C._functorch import TransformType
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    usual = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        mapped = any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
        if mapped and torch.is_grad_enabled() and is_dynaflow_backend(tx.output.compiler_fn):
            _break_graph(tx, "an autograd.Function runs under vmap")
        return usual(self, tx, args, kwargs)

    attribute = AutogradFunctionContextVariable.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name == "set_materialize_grads" and is_dynaflow_backend(tx.output.compiler_fn):
            _break_graph(tx, "an autograd.Function calls set_materialize_grads")
        return attribute(self, tx, name)

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]
    AutogradFunctionContextVariable.var_getattr = var_getattr  # type: ignore[method-assign]


def _keep_lengths_of_deques() -> None:
    """Restores `maxlen` of a deque that existed before the trace, which Dynamo drops, and breaks the graph at changes
    of such a deque, which Dynamo traces wrongly. Seen on 2.11 and 2.13."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, builder
    from torch._dynamo.variables.lists import DequeVariable

    wrap, method = builder.VariableBuilder.wrap_listlike, DequeVariable.call_method

    def wrap_listlike(self: Any, value: Any) -> Any:
        made: Any = wrap(self, value)
        if isinstance(value, deque) and is_dynaflow_backend(self.tx.output.compiler_fn):
            install_guard(AttrSource(self.get_source(), "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
            made.maxlen = ConstantVariable.create(value.maxlen)
        return made

    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        limited = self.source is not None and self.maxlen.as_python_constant() is not None
        if limited and name in _CHANGES_OF_DEQUES and is_dynaflow_backend(tx.output.compiler_fn):
            _break_graph(tx, f"{name} changes a deque that has a maxlen")
        return method(self, tx, name, *args, **kwargs)

    builder.VariableBuilder.wrap_listlike = wrap_listlike  # type: ignore[method-assign]
    DequeVariable.call_method = call_method  # type: ignore[method-assign]


_CHANGES_OF_DEQUES = set(dir(deque)) - set(dir(tuple)) - {"copy", "maxlen"}


SHAPE_CHANGES = {"as_strided_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
"""Calls that change the shape of their argument in place."""


def _break_where_traces_go_wrong() -> None:
    """Breaks the graph at in-place shape changes and assignments to `data`: Python code that Dynamo traces later would
    see the old shape. Also at calls that fail on fake tensors: they may work in eager mode, as a jvp of a slice does,
    and if not, the user sees the eager error. Seen on 2.11 and 2.13."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
    from torch._dynamo.variables import builder, builtin, tensor
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    method, function = TensorVariable.call_method, TorchInGraphFunctionVariable.call_function

    def check(tx: Any, name: str) -> None:
        if name in SHAPE_CHANGES and is_dynaflow_backend(tx.output.compiler_fn):
            _break_graph(tx, f"{name} changes a tensor's shape in place")

    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        check(tx, name)
        return method(self, tx, name, *args, **kwargs)

    def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        check(tx, str(getattr(self.value, "_opname", None) or getattr(self.value, "__name__", "")))
        return function(self, tx, *args, **kwargs)

    fake_value = builder.get_fake_value

    def get_fake_value(node: fx.Node, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if tx.one_graph or tx.error_on_graph_break or not is_dynaflow_backend(tx.output.compiler_fn):
            return fake_value(node, tx, *args, **kwargs)
        try:
            with silence_fake_errors():
                return fake_value(node, tx, *args, **kwargs)
        except Exception as e:
            if isinstance(e, TorchDynamoException) and not isinstance(e, TorchRuntimeError):
                raise  # a signal between parts of Dynamo
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
    """Runs a frame in eager mode if Dynamo fails on it. Functions that the frame calls may still be captured. Seen on
    2.11 and 2.13."""
    from torch._dynamo.convert_frame import ConvertFrame
    from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
    from torch._dynamo.types import ConvertFrameReturn

    convert = ConvertFrame.__call__
    unwrapped = (AssertionError, IndexError, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode)
    failures = (InternalTorchDynamoError, TorchRuntimeError, *unwrapped)

    def call(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> Any:
        try:
            return convert(self, frame, cache_entry, hooks, frame_state, skip=skip + 1)
        except failures as e:
            if not is_dynaflow_backend(self._torchdynamo_orig_backend):
                raise
            code = f"the code at {frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"
            why = fall_back(e, code, "torch.compile's tracer")
            getattr(unwrapped_backend(self._torchdynamo_orig_backend), "plain_reasons", []).append(f"{code}: {why}")
            return ConvertFrameReturn()

    ConvertFrame.__call__ = call  # type: ignore[method-assign]


def _copy_of(function: Any) -> Callable[..., Any]:
    """An equal function that Dynamo does not recognize."""
    copy = types.FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_detect_causal = _copy_of(torch.nn.modules.transformer._detect_is_causal_mask)
_canonical_mask = _copy_of(torch.nn.functional._canonical_mask)


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """torch compares the mask's data with the causal mask to choose a faster kernel. Skipping that changes no
    result."""
    if is_causal is None and mask is not None and not mask.requires_grad and _traces_for_us():
        return False
    return cast("bool", _detect_causal(mask, is_causal, size))


def _mask(*args: Any, check_other: bool = True, **kwargs: Any) -> Any:
    """The check is for a warning only, and can't be traced."""
    return _canonical_mask(*args, check_other=check_other and not _traces_for_us(), **kwargs)


@constant_in_trace
def _traces_for_us() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return is_dynaflow_backend(InstructionTranslator.current_tx().output.compiler_fn)


_MASKS: dict[Any, Callable[..., Any]] = {
    torch.nn.modules.transformer._detect_is_causal_mask: _is_causal,
    torch.nn.functional._canonical_mask: _mask,
}
