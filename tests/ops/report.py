"""What became of the operators, in numbers and as a page of the docs."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.ops.cases import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


@dataclass(slots=True)
class Found:
    """What became of the cases of one operator."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By case."""
    trained: int = 0
    """Cases of which the gradients were compared."""
    uncallable: list[str] = field(default_factory=list)
    """Why eager refuses samples, if it does."""
    findings: list[str] = field(default_factory=list)
    """What is wrong, each with the command that shows it."""
    seconds: float = 0.0

    def written(self, name: str) -> str:
        """As a line of JSON."""
        return json.dumps({"operator": name, **asdict(self)})


def read(lines: Iterable[str]) -> dict[str, Found]:
    """What `Found.written` wrote, by operator."""
    found: dict[str, Found] = {}
    for line in lines:
        told = json.loads(line)
        name, verdicts = told.pop("operator"), told.pop("verdicts")
        found[name] = Found(verdicts={case: Verdict(**v) for case, v in verdicts.items()}, **told)
    return found


SPLIT = "split along every dim on which its rows are independent"
PARTLY = "split along some dims, and whole along others on which its rows are independent"
WHOLE = "run whole, though its rows are independent along some dim"
MIXING = "run whole: its rows depend on each other along every dim"
REFUSED = "refused: no graph that it is in can be split"
PLAIN = "left out of a schedule: its graph runs plainly, or no graph holds it"
NO_BATCH = "without a batch: no dim of its arguments can vary"
UNCALLABLE = "not run: eager refuses it on a CPU"
GROUPS = (SPLIT, PARTLY, WHOLE, MIXING, REFUSED, PLAIN, NO_BATCH, UNCALLABLE)


def group_of(found: Found) -> str:
    """Which of the groups an operator is in."""
    verdicts = found.verdicts.values()
    kinds = {v.kind for v in verdicts}
    missed = any(v.independent for v in verdicts)
    if "split" in kinds:
        return PARTLY if missed else SPLIT
    if "whole" in kinds:
        return WHOLE if missed else MIXING
    if "refused" in kinds:
        return REFUSED
    if kinds:
        return PLAIN
    return UNCALLABLE if found.uncallable else NO_BATCH


def reasons_of(found: Found) -> list[str]:
    """Why cases of an operator were not split, if they might have been; else why none was."""
    group, verdicts = group_of(found), list(found.verdicts.values())
    if group == UNCALLABLE:
        return sorted({_general(why) for why in found.uncallable})
    told = [v for v in verdicts if v.independent] if group in (PARTLY, WHOLE) else verdicts
    return sorted({_general(v.reason) for v in told if v.reason})


def _general(reason: str) -> str:
    """Without sizes, places and the operator's name, so that equal reasons are equal."""
    reason = re.sub(r"^no rule for .*", "no rule", reason.partition("\n")[0])
    reason = re.sub(r"^(aten|prims)\.\w+:? ?", "", reason)
    reason = re.sub(r"^\w+ (uses the size|changes a tensor's shape)", r"\1", reason)
    reason = re.sub(r"from \(.*\) to \(.*\) ", "", reason)
    reason = re.sub(r" of shape \([^)]*\)", "", reason)
    reason = re.sub(r" \((dim )?-?\d+\)|dim(ension)? -?\d+", lambda m: "a dim" if m[0][0] == "d" else "", reason)
    return reason.strip()


def summary(found: Mapping[str, Found]) -> str:
    """The counts, for a terminal."""
    cases = Counter(v.kind for f in found.values() for v in f.verdicts.values())
    trained, wrong = sum(f.trained for f in found.values()), sum(len(f.findings) for f in found.values())
    kinds = ", ".join(f"{n} {kind}" for kind, n in cases.most_common())
    seconds = sum(f.seconds for f in found.values())
    lines = [f"{len(found)} operators, {cases.total()} cases ({kinds}), {trained} with gradients, {seconds:.0f} CPU s"]
    groups = Counter(group_of(f) for f in found.values())
    for group in GROUPS:
        if groups[group]:
            lines.append(f"{groups[group]:>5} {group}")
            reasons = Counter(r for f in found.values() if group_of(f) == group for r in reasons_of(f))
            if group != SPLIT:
                lines += [f"{n:>12} {reason}" for reason, n in reasons.most_common()]
    lines.append(f"{wrong} findings" if wrong else "no mismatch")
    return "\n".join(lines)


_INTRO = """# Operators

<!-- Written by `make test-ops`. -->

Every operator of torch's own database (`torch.testing._internal.common_methods_invocations.op_db`, torch {torch}) in a
graph of its own and between others, under a two-way and an uneven split, along every dim that can be a batch: {cases}
cases, of which {split} were split. Results, arguments written in place or by `out=`, and the gradients of {trained}
cases were equal to eager's; or to torch.compile's, for the few gradients in which it differs from eager. A dim can be
a batch if the operator takes other sizes of it. Whether rows are independent was found by running parts of them.

An operator that runs whole is no obstacle: its neighbours are split, and their results joined before it. Where one
refuses, an error or `stats` tells the reason. How to read a reason, and what to do: [limits](limits.md#what-is-split).
"""


def page(found: Mapping[str, Found]) -> str:
    """The page of the docs."""
    cases = Counter(v.kind for f in found.values() for v in f.verdicts.values())
    version = torch.__version__.partition("+")[0]
    lines = [_INTRO.format(torch=version, cases=f"{cases.total():,}", split=f"{cases['split']:,}",
                           trained=f"{sum(f.trained for f in found.values()):,}")]  # fmt: skip
    by_group: dict[str, list[str]] = defaultdict(list)
    for name in found:
        by_group[group_of(found[name])].append(name)
    lines += ["| operators | are |", "|---|---|"]
    lines += [f"| {len(by_group[group])} | {group} |" for group in GROUPS if by_group[group]]
    lines.append(f"| {len(found)} | in all |")
    for group in GROUPS:
        names = sorted(by_group[group])
        if not names:
            continue
        lines += ["", f"## {group[0].upper()}{group[1:]}", ""]
        if group in (SPLIT, NO_BATCH):
            lines.append(_listed(names))
            continue
        why: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in names:
            why[tuple(reasons_of(found[name]))].append(name)
        lines += ["| operators | why not |", "|---|---|"]
        lines += [f"| {_listed(those)} | {_cell('; '.join(reasons))} |" for reasons, those in why.items()]
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def read_page(text: str) -> dict[str, str]:
    """The group of each operator on the page."""
    groups = {f"{group[0].upper()}{group[1:]}": group for group in GROUPS}
    found: dict[str, str] = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        for line in body.splitlines():
            names = line.split(" | ")[0] if line.startswith("|") else line
            found |= {name: groups[title] for name in re.findall(r"`([^`]+)`", names)}
    return found
