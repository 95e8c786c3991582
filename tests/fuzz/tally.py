"""What became of many cases: sums, which can be added up over processes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    cases: int = 0
    """Compared with eager, or refused."""
    wanted: int = 0
    """Of those, cases whose scheduler wanted to split."""
    split: int = 0
    """Of those, cases in which some operator ran in parts."""
    whole: int = 0
    """Of those, cases in which nothing could be split."""
    refused: Counter[str] = field(default_factory=Counter)
    """Cases that ended in an error of ours that says why, by what it says."""
    plain: int = 0
    """Cases with a graph that ran plainly."""
    undefined: int = 0
    """Programs that eager itself refuses; no cases."""
    torchs: int = 0
    """What torch.compile itself can't do, or does wrongly, without us; no cases."""
    sequential: int = 0
    arenas: int = 0
    fusions: int = 0
    elastic: int = 0
    bucketed: int = 0
    mutants: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    redundant: Counter[str] = field(default_factory=Counter)
    mutants_run: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """What else happened, by name."""

    def add(self, other: Tally) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def refuse(self, error: Exception) -> None:
        first = re.sub(r"bucket.*see", "bucket(): sees", str(error).splitlines()[0])
        reason = re.sub(r"[_.0-9]+", "*", first)[:90]
        self.refused[f"{type(error).__name__}: {reason}"] += 1

    def __str__(self) -> str:
        refused = self.refused.total()
        lines = [
            f"{self.cases} cases: {self.split} of {self.wanted} that wanted to split did "
            f"({100 * self.split / max(self.wanted, 1):.0f}%), {self.whole} could not, {refused} were refused; "
            f"{self.sequential} sequential, {self.plain} plain, {self.arenas} with an arena, {self.elastic} elastic, "
            f"{self.bucketed} padded, {self.fusions} fusions; left out: {self.undefined} that eager refuses, "
            f"{self.torchs} that torch.compile can't do"
        ]
        lines += [f"  {count:>7} refused: {reason}" for reason, count in self.refused.most_common(8)]
        lines += [f"  {count:>7} {name}" for name, count in sorted(self.events.items())]
        if total := self.mutants.total():
            killed, legal = self.killed.total(), self.redundant.total()
            rate = 100 * killed / (total - legal) if total > legal else 100.0
            lines.append(
                f"{total} mutants: {killed} killed, {legal} redundant (legal by the oracle; {self.mutants_run} of them "
                f"run); kill rate {rate:.2f}% of {total - legal} illegal ones"
            )
        for kind, count in sorted(self.mutants.items()):
            killed, legal = self.killed[kind], self.redundant[kind]
            lines.append(f"  {kind:<32} {count:>7} made {killed:>7} killed {legal:>7} redundant")
        return "\n".join(lines)
