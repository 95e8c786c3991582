"""Which plan is fastest here: measurements, and the search on top of them.

- `tuner.Tuner`: plans all candidates, simulates them, measures the best few beside the sequence, and decides.
- `decision`: what it decided and why; stored on disk. `explain`: the same together with the plan, for users.
- `measure`: plans timed in turns. `profile`: operators timed one by one, stored on disk. `clock`: device time alone.
- `solver`: an order by CP-SAT, for the strategy of that name.
- `snippet`: a decision as code to paste. `progress`: the bar.

What operators cost by a model, and the simulator, are in `dynaflow.cost`.
"""
