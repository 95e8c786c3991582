"""From a checked plan to an Executable, by passes over a small IR.

Main nouns: `Lowerer` (lowers the plans of one model), `Program` (the IR: instructions on variables, in steps on lanes),
`Operators` (compiled operators, shared by plans), `Executable` (a plan's function).

- Which passes are there, in which order? `passes`: `bind`, `liveness`, `memory`; then `emit` generates the code.
- What does the IR look like? `ir`. Which tasks become one call? `fuse_tasks`.
- How is an operator compiled, and what if that fails? `compile_ops`, `opaque_ops`, `first_call`.
- Where are results written? `out_variants`, `layouts`. How do CUDA graphs come in? `whole_graph`, `segments`.
- How does one function serve all batch sizes? `shape_polymorphic`; several, by `padding`.
- Where does a recording take its times? `timing`.
"""
