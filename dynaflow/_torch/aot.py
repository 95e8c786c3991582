"""AOTAutograd: compiles both passes of a graph, and answers questions about them during that compilation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from dynaflow._torch.inductor import preserve_aliasing
from dynaflow._torch.versions import Boxed


def traced_input(placeholder: fx.Node) -> tuple[int, tuple[str, ...]] | None:
    """The input of the traced graph that a placeholder of AOTAutograd stands for: its position and, for a tensor inside
    a wrapper subclass, the path of attributes to it. None for any other placeholder. Seen on 2.13."""
    found: Any = placeholder.meta.get("desc")
    attributes: list[str] = []
    while hasattr(found, "attr"):
        attributes.insert(0, found.attr)
        found = found.base
    index = getattr(found, "idx", None)
    return None if index is None or type(found).__name__ != "PlainAOTInput" else (index, tuple(attributes))


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
    """Compiles a graph for autograd. `make` gets the forward graph, and the backward graph (with True), as Inductor
    would, and returns a callable that runs it. Without gradients there is one graph.

    `native`: torch's own kernels run the graphs. `native_random`: torch's generator draws random numbers, not
    Inductor's seeds. `rewrite`: Inductor may fold constants, and drop casts that round. `merge_calls`: equal calls
    become one (CSE). Seen on 2.11 and 2.13.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch.utils._python_dispatch import _disable_current_modes

    def inner(graph: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        _disable_donated_buffers()
        with _disable_current_modes():  # leave fake mode: `make` handles real tensors too
            run = make(graph, bool(options.get("is_backward")))

        def boxed(args: list[Any]) -> Any:
            if not torch._C._len_torch_dispatch_stack():
                return run(args)
            with _disable_current_modes():  # AOTAutograd's modes see the first call, in which plans are compiled
                return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    options = {
        "enable_autograd_cache": False,  # it caches Inductor's output only
        "cse": merge_calls,
        "backward_pass_autocast": "off",  # autocast as at the call of backward()
    }
    settings: dict[str, Any] = {"fallback_random": native_random or torch._inductor.config.fallback_random}
    if not rewrite:
        settings |= {"pattern_matcher": False, "joint_graph_constant_folding": False}
    # Folded constants may precede the sizes they depend on. Inductor sorts the graph if custom passes exist.
    settings |= preserve_aliasing()
    with (
        torch._functorch.config.patch(options),
        torch._inductor.config.patch(settings),
        _dual_levels_left(),
        _scalars_stay_inputs(gm),
    ):
        # Inductor adds complex tensors through a real view, which torch's kernels don't support in all layouts.
        sums = [getattr(torch.ops.aten.add, name) for name in torch.ops.aten.add.overloads()]
        table = {op: decompose for op, decompose in select_decomp_table().items() if op not in sums}
        made: Any = compile_fx(gm, list(inputs), inner_compile=inner, decompositions=table if native else None)
    return cast("Callable[..., Any]", made)


@contextlib.contextmanager
def _scalars_stay_inputs(gm: fx.GraphModule) -> Iterator[None]:
    """Stops AOTAutograd from restarting Dynamo with float64 scalars as constants: Dynamo would drop every call that
    writes such an input. Scalars on which the graph calls item() are excepted: they are Python floats. Seen on 2.11 and
    2.13."""
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


def keep_alive(value: Any, results: Sequence[Any]) -> None:
    """Keeps a value alive as long as the results' autograd graph. Seen on 2.13."""
    for result in results:
        node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
        if node is not None:
            node.metadata["dynaflow"] = value


class _Backward(threading.local):
    """State of the thread's current backward pass."""

    unused: frozenset[int] = frozenset()
    """Positions of results that the loss does not depend on."""


_backward = _Backward()
_NOTED = "dynaflow notes unused results"


def note_unused(results: Sequence[Any]) -> None:
    """Records, for `unused_results` in the backward pass, which of these results of `compile_passes` were not used:
    autograd passes zeros as their gradients. Seen on 2.11 and 2.13."""
    node: Any
    for node in dict.fromkeys(result.grad_fn for result in results if isinstance(result, torch.Tensor)):
        for _ in range(8):  # through views of results
            if node is None or type(node).__name__ == "CompiledFunctionBackward":
                break
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        if node is not None and type(node).__name__ == "CompiledFunctionBackward" and _NOTED not in node.metadata:
            node.metadata[_NOTED] = True
            node.register_prehook(_note)


def _note(gradients: Sequence[torch.Tensor | None]) -> None:
    _backward.unused = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)


def unused_results() -> frozenset[int]:
    """Positions of forward results that the loss does not depend on, in the current backward pass."""
    unused, _backward.unused = _backward.unused, frozenset()
    return unused


def results_of_gradients() -> list[int]:
    """For each gradient that the backward graph takes, the position of its result in the forward graph. Seen on 2.11
    and 2.13."""
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


@contextlib.contextmanager
def _dual_levels_left() -> Iterator[None]:
    """Leaves the level of forward-mode AD after a failure; there can be only one. Dynamo leaves the other levels of
    torch.func. Seen on 2.13."""
    try:
        torch._C._exit_dual_level(torch._C._enter_dual_level())
    except RuntimeError:  # the caller has entered one
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            torch._C._exit_dual_level(0)
        raise


def _disable_donated_buffers() -> None:
    """Disables donated buffers: Inductor would overwrite tensors saved for backward, so AOTAutograd rejects a second
    backward pass with `retain_graph`. Our graphs overwrite none."""
    if donated := _traced().bw_donated_idxs:
        donated.clear()  # in place: AOTAutograd holds several references


def saved_results() -> slice:
    """Range of the forward graph's results that are tensors saved for backward."""
    meta = _traced()
    if meta.num_symints_saved_for_bw is None:  # no input needs a gradient: there is no backward graph
        return slice(0, 0)
    found: slice = meta.tensors_saved_for_backwards_slice
    return found


def returned_results() -> int:
    """Number of the forward graph's leading results that are not saved for backward."""
    found: int = _traced().num_forward_returns
    return found


def first_result() -> int:
    """Position of the traced graph's first result among the forward graph's."""
    found: int = _traced().num_mutated_inp_runtime_indices
    return found


def fresh_results() -> list[int]:
    """Positions of the forward graph's results that AOTAutograd traced as no view of an input or of another result.
    Seen on 2.11 and 2.13."""
    meta = _traced()
    infos = enumerate(meta.output_info, first_result())
    return [i for i, info in infos if info.output_type.name == "non_alias"]


def bases_of_results() -> dict[int, int]:
    """Positions of the forward graph's results that are bases of another result, a view, with its position. Seen on
    2.11 and 2.13."""
    infos = list(enumerate(_traced().output_info, first_result()))
    kinds = ("alias_of_intermediate", "alias_of_intermediate_save_as_output")
    views = [(i, info.base_idx) for i, info in infos if info.output_type.name in kinds]
    return {first_result() + len(infos) + base: i for i, base in views}


def written_inputs() -> frozenset[int]:
    """Positions of the inputs that the graph mutates. Seen on 2.13."""
    return frozenset(n for n, info in enumerate(_traced().input_info) if info.mutates_data)


def _traced() -> Any:
    """AOTAutograd's metadata for the graph that is being compiled."""
    from torch._guards import TracingContext

    meta = TracingContext.get().fw_metadata
    assert meta is not None
    return meta
