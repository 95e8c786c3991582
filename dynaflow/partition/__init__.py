"""Cuts a captured graph into operators: the rules, the matching of nodes, the cut, and its result.

`rules` are the user's `SplitModule` and `SplitFunc`. `claims` decides which nodes a rule or a mark wants, as one
operator. `partition` orders the nodes and groups them. `grouped_graph` answers questions about nodes and groups,
`subgraph` makes the fx graph of one operator, `split_refusals` says why an operator can't be split along the batch, and
`build` puts all of it together. The result is an `OpGraph` of `Op`s and `Value`s (`op_graph`): data that schedulers,
checks and lowering read.
"""
