"""DTensor inputs replaced by their local shards.

*Contract.* Consumes a fresh graph. Each DTensor placeholder that is used only through `to_local()` becomes a plain
tensor, in place, so that no later pass handles DTensors. Returns the positions of these inputs, for which the runner
passes the local shards. Other DTensors stay.
"""

from __future__ import annotations

from torch import fx

from dynaflow import _torch


def use_local_shards(gm: fx.GraphModule) -> tuple[int, ...]:
    """Replaces these placeholders. Returns their positions."""
    positions = []
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        shard = _torch.shard_of(node.meta.get("example_value"))
        if shard is None or not all(_takes_shard(user) for user in node.users):
            continue
        for user in list(node.users):
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
        node.meta["example_value"] = shard
        positions.append(i)
    if positions:
        gm.recompile()
    return tuple(positions)


def _takes_shard(node: fx.Node) -> bool:
    return _torch.dtensor_method(node) == "to_local" and len(node.args) == 1 and not node.kwargs
