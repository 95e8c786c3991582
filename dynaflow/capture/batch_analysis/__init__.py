"""Which values of a graph carry the batch, on which dim, and which nodes may be split along it.

`probe` runs a captured graph once on fake tensors, with batch sizes that occur nowhere else, and returns a `Probe`: the
`NodeFacts` of each node (`node_facts`). `fake_run` is that run, `observer` records its aten calls, `probe_memo` replays
identical calls, and `batch_sizes` follows numbers that depend on the batch size.

`row_rules` decides on one operator call: where are the rows of its results, or why can't it be split? It dispatches to
`view_rules` (operators that move elements), `compute_rules`, `module_rules` (our recurrent and embedding operators),
`custom_op_rules` (declared operators and collectives), `higher_order_rules` (flex_attention), and `dtensor_rules`
(DTensor's sharding rules, for all other operators). Rules return a `Signature` (`signatures`). `aten_calls` has helpers
for labels.

`input_aliasing` looks at the memory of a call's arguments, which the probe can't see.
"""
