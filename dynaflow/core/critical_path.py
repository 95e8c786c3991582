"""The longest chain of tasks that wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def longest_chains(seconds: Sequence[float], after: Sequence[Iterable[int]]) -> list[float]:
    """Returns for each task the length of the longest chain that starts with it; the largest is the critical path.

    `after`: the earlier tasks that each one waits for. Later ones among them are ignored.
    """
    chains = list(seconds)
    for i in reversed(range(len(chains))):  # all that wait for i come later: its chain is known
        for a in after[i]:
            if a < i:
                chains[a] = max(chains[a], seconds[a] + chains[i])
    return chains
