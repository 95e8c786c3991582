"""Random numbers that one pass draws from a seed and another pass draws again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from dynaflow._torch.inductor import compile_operator, compiler_message
from dynaflow._torch.nodes import boxed_forward
from dynaflow._torch.symbols import Symbols
from dynaflow._torch.versions import Boxed
from dynaflow.core.fx_graphs import copy_graph
from dynaflow.errors import DynaFlowError


def draw_from_seeds(gm: fx.GraphModule) -> None:
    """Makes a pass lowered for Inductor runnable uncompiled: torch's eager fallbacks for Inductor's random numbers
    ignore seeds, and the backward pass has to draw the same numbers as the forward pass. Seen on 2.11 and 2.13."""
    from torch._inductor import inductor_prims

    for node in gm.graph.find_nodes(op="call_function", target=inductor_prims.random):
        node.target, node.kwargs = torch.ops.dynaflow.random.default, {}
    for node in gm.graph.find_nodes(op="call_function", target=inductor_prims.randint):
        node.target = torch.ops.dynaflow.randint.default
    gm.recompile()


def with_compiled_draws(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, runnable uncompiled: its seeds draw the same numbers as those of another, compiled pass. Seen on 2.11
    and 2.13."""
    if not draws_from_seeds(gm):
        return gm
    from torch._inductor import inductor_prims

    graph = copy_graph(gm.graph)
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
    """A compiled graph of one draw; None stands for the seed."""
    from torch._inductor import inductor_prims

    graph, world = fx.Graph(), Symbols()
    seed = graph.placeholder("seed")
    given = tuple(seed if arg is None else list(arg) if isinstance(arg, tuple) else arg for arg in args)
    graph.output((graph.call_function(getattr(inductor_prims, name), given, dict(more)),))
    with world.mode:
        example = torch.empty((), dtype=dtype, device=device)
    try:
        return compile_operator(
            fx.GraphModule({}, graph), [example], world, static=frozenset(), direct=True,
            failed=lambda e, graph: boxed_forward(graph),
        )  # fmt: skip
    except Exception as e:
        raise DynaFlowError(
            f"random numbers that another pass draws again can't be compiled: {compiler_message(e)}",
            advice='use operators="eager", which compiles neither pass',
        ) from e


def draws_from_seeds(gm: fx.GraphModule) -> bool:
    """Whether the graph draws random numbers from seeds among its inputs, as Inductor does. Seen on 2.11 and 2.13."""
    from torch._inductor import inductor_prims

    prims = (inductor_prims.random, inductor_prims.randint)
    return any(gm.graph.find_nodes(op="call_function", target=prim) for prim in prims)
