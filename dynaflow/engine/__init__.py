"""From a call to an executable: capture, plan request, plan cache, run.

Main nouns: `Engine` (Dynamo's backend of one model), `GraphRunner` (a captured graph as Dynamo calls it),
`PlanRequest` (a graph, arguments, facts), `PlanCache` (what a scheduler has decided), `Planner` (finds or makes plans).

- What happens to a captured graph? `engine`. What happens in each call? `runner`; its fast path is `ReadyPlans`.
- What is in a plan's cache key? `plan_cache`, `plan_maker`.
- Which scheduler plans a call? `scheduler_chain`. What does it plan? `plan_maker`. Who lowers that? `planner`.
- What does `ctx.trials` do? `scheduler_trials`, `snapshot`. What does `verify=True` do? `verify`.
- Where are errors of the user's scheduler caught? `user_code`.
"""
