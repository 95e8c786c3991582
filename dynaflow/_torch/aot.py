"""AOTAutograd: both passes of a graph, and what it knows of them while they are compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from dynaflow._torch.inductor import results_kept_apart
from dynaflow._torch.versions import Boxed


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
    settings |= results_kept_apart()
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
