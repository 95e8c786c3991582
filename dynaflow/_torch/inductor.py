"""Inductor: compiles one graph at a time."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from dynaflow._torch import nodes
from dynaflow._torch.nodes import view_base
from dynaflow._torch.symbols import Symbols
from dynaflow._torch.versions import TORCH, Boxed


def warm_compiler() -> None:
    """Starts Inductor's compile processes, if it uses any: they take seconds to start."""
    from torch._inductor import async_compile

    warm = getattr(async_compile, "maybe_warm_pool", None)
    if warm is not None and torch.cuda.is_available():
        warm()
        async_compile.AsyncCompile.use_process_pool()  # has them report when they are ready


def compile_lock() -> Any:
    """Dynamo's lock, held during each capture. Compiling takes it too: while Inductor traces a graph, it replaces
    `nn.Module.__call__` in all threads, and a capture would see that."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """In this context, and this thread, `function` is called in place of a function of torch's, its first argument.

    Other threads still call the original. One thread at a time replaces functions.
    """
    mine = threading.get_ident()
    with compile_lock():
        usual = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            return function(usual, *args, **kwargs) if threading.get_ident() == mine else usual(*args, **kwargs)

        setattr(owner, name, called)
        try:
            yield
        finally:
            setattr(owner, name, usual)


class Kernels:
    """Compiles the kernels of several graphs concurrently.

    Inductor waits for the kernels of a graph before it returns. Inside `later` that wait is deferred to `wait`, which
    must be called before any of the graphs runs.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], Callable[[Exception], Any]]] = []

    def later(self, failed: Callable[[Exception], Any]) -> contextlib.AbstractContextManager[None]:
        """Defers the wait for kernels requested in this context. `failed`: called in `wait` if one of them fails."""
        from torch._inductor.async_compile import AsyncCompile

        def defer(usual: Callable[..., None], *args: Any) -> None:
            self._waiting.append((lambda: usual(*args), failed))

        return replaced(AsyncCompile, "wait", defer)

    def wait(self) -> bool:
        """Waits for all kernels. Returns whether all were compiled."""
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
    """Why Inductor can't compile for the CPU; empty if it has a C++ compiler. Seen on 2.11 and 2.13."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as e:  # InvalidCxxCompiler, or an OSError if CXX can't be run
        return compiler_message(e)
    return ""


def is_compiler_error(error: BaseException) -> bool:
    """Whether an error of a call comes from the compiler and not from the compiled code: a kernel failed to compile
    during the call, or a guard in the generated code failed. Seen on 2.11 and 2.13."""
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


def compiler_message(error: BaseException) -> str:
    """A compiler's error message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join([*lines[:1], *[line for line in lines[1:] if "error:" in line][:1]])
    return f"{type(error).__name__}: {text}"[:300]


def compile_operator(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Symbols,
    *,
    static: frozenset[int],
    direct: bool,
    failed: Callable[[Exception, fx.GraphModule], Boxed],
) -> Boxed:
    """Compiles a graph. The result takes the graph's inputs in a list, which it empties, and returns a list.

    `static`: inputs whose address never changes and is aligned: kernels skip the alignment check of those.
    `direct`: all results are tensors, so the compiled code can be called without AOTAutograd's wrapper where that is a
    no-op. This halves the overhead.
    `failed`: returns a replacement for a backward pass that fails to compile, which happens late. Seen on 2.11 and
    2.13.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    set_triton_cache_dir(inputs)
    context = TracingContext(symbols.mode)
    made = []

    def inner(graph: Any, given: Sequence[Any], **options: Any) -> Any:
        if len(given) == len(inputs):  # else some were dropped, or merged
            options["static_input_idxs"] = sorted({*options.get("static_input_idxs", ()), *static})
        shaped = TORCH >= (2, 13) or fix_reduced_shapes(graph)
        with torch._inductor.config.patch({} if shaped else {"triton.mix_order_reduction": False}):
            try:
                made.append((compile_fx_inner(graph, given, **options), len(given)))
            except Exception as e:
                if not options.get("is_backward"):
                    raise
                return _boxed(failed(e, graph))
        return made[-1][0]

    # A hit in AOTAutograd's cache returns the wrapper only. Inductor's own cache stays on.
    cache = torch._functorch.config.enable_autograd_cache and not direct
    caching = torch._functorch.config.patch(enable_autograd_cache=cache)
    apart = torch._inductor.config.patch(preserve_aliasing())
    with compile_lock(), tracing(context), caching, apart, assume_host_inputs_aligned(inputs):
        wrapped: Any = compile_fx(gm, list(inputs), inner_compile=inner)
    found = made[0][0] if direct and len(made) == 1 and made[0][1] == len(inputs) else None
    call = getattr(found, "current_callable", None)
    if call is None or not _wrapper_is_noop(context.fw_metadata, len(inputs)):
        return _taking_a_list(wrapped, gm)
    written = [i for i, info in enumerate(context.fw_metadata.input_info) if info.mutates_data]  # type: ignore[union-attr]
    if not written:
        return cast("Boxed", call)

    def call_and_bump_versions(args: list[Any]) -> Any:
        changed = [args[i] for i in written]
        results = call(args)
        for tensor in changed:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return results

    return call_and_bump_versions


def preserve_aliasing() -> dict[str, Any]:
    """Settings that preserve the aliasing of a graph's results as traced: Inductor returns `x` for `x * torch.ones(4)`,
    and lets `as_strided` view an input in place of a copy of it. Two passes, before and after Inductor's rewrites,
    insert the missing copies. Seen on 2.11 and 2.13."""
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
            """Part of the key of torch's caches: entries of other versions of this file don't match."""
            own = get_hash_for_files((__file__, nodes.__file__))
            if self._users is None:
                return own
            users = self._users.uuid() if isinstance(self._users, CustomGraphPass) else None
            return (own, users) if users is not None else None

    def note(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        if isinstance(output.args[0], fx.Node):  # a subgraph
            return
        output.meta[key] = [view_base(node) for node in output.args[0]]
        for node in graph.find_nodes(op="call_function", target=write):
            node.meta[key] = view_base(node.args[1])
        for node in graph.find_nodes(op="call_function", target=stride):
            node.meta[key] = view_base(node.args[0])

    def copy(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        if key not in output.meta:
            return
        before, known, results = output.meta.pop(key), dict[fx.Node, fx.Node](), list(output.args[0])
        copies: dict[fx.Node, fx.Node] = {}
        """Original base -> copy of the base that replaced it. All views of the original share one copy."""

        def copy_of(own: fx.Node, base: fx.Node) -> fx.Node:
            if own not in copies:
                first = next(node for node in graph.nodes if node.op != "placeholder")
                place = graph.inserting_before(first) if base.op == "placeholder" else graph.inserting_after(base)
                with place:
                    copies[own] = copied(graph, base, torch.ops.aten.clone.default)
            return copies[own]

        for node in graph.find_nodes(op="call_function", target=stride):
            base = view_base(node.args[0])
            own = node.meta.pop(key, base)
            if own is not base and base.op == "placeholder":  # whose storage offset is unknown
                node.args = (copy_of(own, base), *node.args[1:])
        given = [node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder")]
        gradients = given.count(False) if any(given) else 0  # one per input; they may share memory
        for i, node in enumerate(results[: len(before) - gradients]):
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            base = view_base(node)
            own = base if base.op == "placeholder" else known.setdefault(base, before[i])
            if own is not before[i]:
                with graph.inserting_before(output):
                    results[i] = _same_view(graph, node, base, copy_of(before[i], base))
        output.args = (type(output.args[0])(results),)
        for node in graph.find_nodes(op="call_function", target=write):
            base = view_base(node.args[1])
            if node.meta.pop(key, base) is not base and base.op == "placeholder":  # the base may be written before
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
    """Applies the views from `base` to `node` to another tensor of the same sizes and strides."""
    if node is base:
        return instead
    if node.target is operator.getitem:  # one of several views
        views = cast("fx.Node", node.args[0])
        of = _same_view(graph, cast("fx.Node", views.args[0]), base, instead)
        made = graph.node_copy(views, lambda n: of if n is views.args[0] else n)
        return graph.node_copy(node, lambda n: made if n is views else n)
    of = _same_view(graph, cast("fx.Node", node.args[0]), base, instead)
    return graph.node_copy(node, lambda n: of if n is node.args[0] else n)


def set_triton_cache_dir(inputs: Sequence[Any]) -> None:
    """Sets Triton's cache folder, which all kernels of the process share, as Inductor does.

    Inductor (2.11, 2.13) sets it with its first kernel, but not if it finds all kernels in its own cache. Then other
    Triton kernels would be looked up in the default folder, and compiled again.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    devices = [i.device for i in inputs if isinstance(i, torch.Tensor) and i.device.type == "cuda"]
    if devices:
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(devices[0].index or 0))


def assume_host_inputs_aligned(inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Has Inductor take tensors on the host for aligned.

    Inductor (2.11, 2.13) takes them, and all that is computed from them, for unaligned, so that kernels on the device
    would load the results element by element.
    """
    from torch._inductor import graph

    if all(i.device.type == "cpu" for i in inputs if isinstance(i, torch.Tensor)):
        return contextlib.nullcontext()
    aligned = lambda usual, example: example.device.type == "cpu" or usual(example)  # noqa: E731
    return replaced(graph, "should_assume_input_aligned", aligned)


def inductor_settings(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context with these settings of Inductor."""
    import torch._inductor.config

    return torch._inductor.config.patch(dict(settings))


def fix_reduced_shapes(gm: fx.GraphModule) -> bool:
    """Works around a bug before 2.13: with mix_order_reduction Inductor returns sums of several dims as
    one-dimensional. Views of sums are right, so `keepdim` becomes an unsqueeze after the sum. Returns False if that
    does not cover all sums."""
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
            last, users = node, tuple(node.users)
            for d in dims:
                with gm.graph.inserting_after(last):
                    inner, last = last, gm.graph.call_function(aten.unsqueeze.default, (last, d))
                last.meta = {**node.meta, "val": inner.meta["val"].unsqueeze(d)}
            for user in users:
                user.replace_input_with(node, last)
    if results:
        gm.recompile()
    ends = [node.args[0] if node.target is aten.expand.default else node for node in output.all_input_nodes]
    return not any(node.target in sums and node.meta["val"].dim() > 1 for node in ends)


def _taking_a_list(wrapped: Any, gm: fx.GraphModule) -> Boxed:
    """AOTAutograd's callable without its outer function, which would keep all arguments alive until the end.

    The outer function is named `forward`, and adds the graph's own tensors to the arguments, if it has any.
    """
    call = wrapped
    while getattr(call, "__name__", "") == "forward":
        call = getattr(call, "__wrapped__", None)
    own = [*gm.parameters(), *gm.buffers()]
    if call not in (wrapped, None) and not own and not torch.is_grad_enabled():  # else autograd keeps them alive anyway
        return cast("Boxed", call)

    def spread(args: list[Any]) -> Any:
        given = tuple(args)
        args.clear()
        return wrapped(*given)

    return spread


def _boxed(call: Boxed) -> Boxed:
    """Marks a callable as one that takes a list, for AOTAutograd."""

    def boxed(args: list[Any]) -> Any:
        return call(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _wrapper_is_noop(meta: Any, inputs: int) -> bool:
    """Whether AOTAutograd's wrapper does nothing for a graph: no views to regenerate, no mutations to apply."""
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
