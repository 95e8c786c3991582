"""What a scheduler is, what it sees, and which plans are legal.

Main nouns: `OpSchedulerBase` (what users subclass), `ScheduleContext` (what a scheduler sees and calls),
`PlanRecorder` (records the tasks of a plan), `OpItem` (an operator for a micro-batch).

- What may a scheduler ask and decide? `context`. What is ready, and what may be executed? `plan_recorder`, `op_item`.
- What does a fused function take and return? `fusion`. Where is a batch cut, and a bad split refused? `split`.
- Why is a plan rejected? `check`. Do all ranks agree? `rank_consensus`.
- How is a plan reused by another process? `plan_store`.
"""
