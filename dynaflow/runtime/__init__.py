"""What generated code runs on: lanes, memory and CUDA graphs. Knows neither plans of schedulers nor the IR.

Main nouns: `LanePool` and `ThreadRun` (lanes as CPU threads), `StreamPool` and `StreamRun` (lanes as CUDA streams),
`Partition` (SMs of a lane), `Arena` and `BlockPool` (memory), `GraphPool` and `GraphedFunction` (CUDA graphs).

- Where does a lane become a thread? `cpu_lanes`. A stream? `cuda_lanes`. A share of the SMs? `sm_partitions`.
- Where does the memory of buffers come from? `arena`. When is a CUDA graph captured again? `cuda_graphs`.
- How are micro-batches joined? `joins`.
"""
