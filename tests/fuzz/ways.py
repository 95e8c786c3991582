"""The ways to run a case, by name. Each takes a case's number and returns what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tests.fuzz import engine_way, train_way
from tests.fuzz.compare import Undefined
from tests.fuzz.dice import Dice
from tests.fuzz.door_way import DoorWay
from tests.fuzz.groups import SHARE, Group, Throws, dice_of, draw_group
from tests.fuzz.shrink import shrink
from tests.fuzz.tally import Tally
from tests.fuzz.train_way import NotTorchs
from tests.fuzz.verdicts import judged

Show = Callable[[str], None]


class Way(Protocol):
    def run(self, number: int, tally: Tally) -> str | None:
        """What is wrong with a case."""

    def run_with(self, dice: Throws, tally: Tally, group: int | None = None, show: Show | None = None) -> str | None:
        """With dice of one's own. `group`: a number, if the case is one of several with the same graph."""

    def close(self) -> None: ...


class InGroups:
    """Cases that share a graph: it is kept until a case of another group comes."""

    def __init__(self, name: str, draw: Callable[[Dice], Group], run: Callable[..., None]) -> None:
        self.name, self._draw, self._run = name, draw, run
        self._known: tuple[int | None, Group | Exception] | None = None

    def run(self, number: int, tally: Tally) -> str | None:
        return self.run_with(dice_of(self.name, number), tally, number // SHARE)

    def run_with(self, dice: Throws, tally: Tally, group: int | None = None, show: Show | None = None) -> str | None:
        try:
            self._run(self._group(dice, group), dice("case"), tally, show)
            return None
        except NotTorchs:
            tally.torchs += 1
            return None
        except Exception as e:
            if (problem := judged(e, tally)) is not None:
                self.close()  # who knows what it has left behind
            return problem
        finally:
            if group is None:
                self.close()

    def _group(self, dice: Throws, number: int | None) -> Group:
        if self._known is None or number is None or self._known[0] != number:
            self.close()
            try:
                self._known = (number, self._draw(dice("graph")))
            except (Undefined, NotTorchs) as e:
                self._known = (number, e)
        found = self._known[1]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        if self._known is not None and isinstance(self._known[1], Group):
            self._known[1].close()
        self._known = None


def _engine(group: Group, dice: Dice, tally: Tally, show: Show | None) -> None:
    case = engine_way.draw_case(group, dice)
    if show is not None:
        show(str(case))
    if engine_way.run_case(case, dice, tally):
        engine_way.judge_mutants(case, dice, tally)


def _train(group: Group, dice: Dice, tally: Tally, show: Show | None) -> None:
    case = train_way.draw_train_case(group, dice)
    if show is not None:
        show(str(case))
    train_way.run_train_case(case, dice, tally)


WAYS: dict[str, Callable[[], Any]] = {
    "engine": lambda: InGroups("engine", draw_group, _engine),
    "door": DoorWay,
    "train": lambda: InGroups("train", train_way.draw_training, _train),
}
"""By name, what makes one."""


def make_way(name: str) -> Way:
    made: Way = WAYS[name]()
    return made


def show(make: Callable[[str], Way], way: str, number: int, small: bool) -> int:
    """One case in full: by itself; and, if that shows nothing, after the others of its group."""
    dice = dice_of(way, number)
    problem = make(way).run_with(dice, Tally())
    if problem and small:
        dice = shrink(dice, lambda throws: make(way).run_with(throws, Tally()))
    problem = make(way).run_with(dice, Tally(), show=print)
    if not problem:
        first = number // SHARE * SHARE
        runner = make(way)
        for earlier in range(first, number + 1):
            problem = runner.run(earlier, Tally())
        problem = f"after cases {first} to {number - 1}, not by itself:\n{problem}" if problem else None
    print(problem or "no problem")
    return 1 if problem else 0
