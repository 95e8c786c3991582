"""Every private torch API that dynaflow uses, each behind one small function.

Seen to work on torch 2.11.0, 2.12.1 and 2.13.0 on CPU, and on 2.11.0+cu130 on CUDA, unless a line says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [  # for the rooms to take from here
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])

Boxed = Callable[[list[Any]], Any]
"""A function that gets its arguments in a list and empties it: nobody else holds them, so each goes after its last
use."""


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


def is_restart(error: Exception) -> bool:
    """Whether it tells Dynamo to trace again, and nobody else anything."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


def restart_capture() -> BaseException:
    """To be raised by a backend: Dynamo traces the frame again, e.g. after more dims were marked dynamic."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    return TensorifyScalarRestartAnalysis("dynaflow: the batch becomes dynamic", restart_reason="dynaflow: batch")


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
    """Of a placeholder that Dynamo made: its source as text, whether a module owns it, and the example."""
    if GIVEN in placeholder.meta:
        return placeholder.meta[GIVEN]
    arg = placeholder.meta.get("grapharg")
    if arg is None:  # one that somebody has added
        return placeholder.name, False, None
    name = arg.source.name
    owner = arg.source.guard_source
    owned = owner.is_unspecialized_nn_module() or owner.is_specialized_nn_module()
    return (name if isinstance(name, str) else name()), owned, arg.example


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
    """The symbolic expression behind an int or SymInt, with the symbols that Dynamo unified replaced."""
    if isinstance(size, torch.SymInt):
        node = size.node
        return node.shape_env.simplify(node.expr) if node.shape_env is not None else node.expr
    return sympy.Integer(size)


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


_replacing = threading.RLock()


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
        self._waiting: list[Callable[[], None]] = []

    def later(self) -> contextlib.AbstractContextManager[None]:
        from torch._inductor.async_compile import AsyncCompile

        return _replaced(AsyncCompile, "wait", lambda usual, *args: self._waiting.append(lambda: usual(*args)))

    def wait(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


def compile_operator(
    gm: fx.GraphModule, inputs: Sequence[Any], symbols: Symbols, *, still: frozenset[int], direct: bool
) -> Boxed:
    """Inductor over a graph; the callable takes the graph's inputs in a list, which it empties, and returns a list.

    `still`: inputs that stay where they are in memory, aligned as kernels like it: else each call looks at all.
    `direct`: all results are tensors; then the compiled code is called without AOTAutograd's wrapper around it wherever
    that has nothing to do, which takes half as long.
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
            made.append((compile_fx_inner(graph, given, **options), len(given)))
        return made[-1][0]

    # A hit in AOTAutograd's cache would hand out the wrapper alone. Inductor's own cache stays in use.
    cache = torch._functorch.config.enable_autograd_cache and not direct
    caching = torch._functorch.config.patch(enable_autograd_cache=cache)
    with tracing(context), caching, _hosts_alignment_is_nothing(inputs):
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


def compile_passes(
    gm: fx.GraphModule, inputs: Sequence[Any], make: Callable[[fx.GraphModule, bool], Boxed]
) -> Callable[..., Any]:
    """A graph that autograd can go back through: `make` gets the forward and the backward graph (True), as Inductor
    would get them, and returns what runs them. Seen to work on 2.11 and 2.13."""
    import torch._functorch.config
    from torch._inductor.compile_fx import compile_fx
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
        "backward_pass_autocast": "off",  # as where backward() is called
    }
    with torch._functorch.config.patch(options):
        made: Any = compile_fx(gm, list(inputs), inner_compile=inner)
    return cast("Callable[..., Any]", made)


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
    found: slice = _traced().tensors_saved_for_backwards_slice
    return found


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
    with mode:
        yield mode


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a (fake) tensor, for as long as the tensor lives."""
    return tensor.untyped_storage()._cdata


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

LINEAR = torch._C._nn.linear
"""What torch.nn.functional.linear is in a captured graph."""


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
    """Whether the tensors at `positions` are where `addresses` says."""
    return torch._C._tensors_data_ptrs_at_indices_equal(tensors, addresses, positions)  # type: ignore[arg-type]


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
