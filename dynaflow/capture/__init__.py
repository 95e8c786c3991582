"""Reads and prepares the graphs that Dynamo and AOTAutograd capture.

The noun is `CapturedGraph` (`captured_graph`): one graph with the names, sizes and batch dims of its inputs. Around it:

- before the capture: `dynamic_dims` marks the batch dynamic, `annotations` is `mark`, `torch_modules` keeps LSTM and
  EmbeddingBag whole, `offload` moves parameters to the host.
- passes over a fresh graph: `higher_order` inlines subgraphs, `host_scalars` takes out arithmetic on numbers,
`dtensor_inputs` replaces DTensors by local shards, `collectives` recognizes collectives.
- training: `joint_graph` turns AOTAutograd's forward and backward graphs into captured graphs; `optimizer_ops` and
  `optimizer_steps` put an optimizer's steps into the backward graph.
- facts: `node_info` (names, modules and lines of nodes), `op_registry` (what users declare of custom operators),
  `serialize` (a graph as bytes), `batch_analysis/` (which values carry the batch, and which nodes may be split).
"""
