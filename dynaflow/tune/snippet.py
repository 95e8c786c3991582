"""The tuner's choices as code to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynaflow.tune.decision import SEQUENCE

Sizes = Mapping[str, tuple[int, ...]]


def code_snippet(chosen: Sequence[tuple[Sizes, str]], cudagraph: str | None = None) -> str:
    """Returns a call of `compile`; with a choice by the sizes of the inputs if situations differ."""
    graph = f", cudagraph={cudagraph!r}" if cudagraph else ""
    if len({name for _, name in chosen}) == 1:
        return f"from dynaflow.strategies import make\n\nfast = df.compile(model, {make_call(chosen[0][1])}{graph})"
    names = _distinguishing([sizes for sizes, _ in chosen])
    lines = ["from dynaflow.strategies import make", "", "CHOSEN = {"]
    for sizes, name in chosen:
        if name != SEQUENCE:
            lines.append(f"    {tuple(sizes[n] for n in names)}: {make_call(name)},")
    key = ", ".join(f"ctx.inputs[{n!r}]" for n in names)
    return "\n".join(
        [
            *lines,
            "}",
            f"scheduler = df.choose(lambda ctx: CHOSEN.get(({key},), {SEQUENCE!r}))",
            f"fast = df.compile(model, scheduler{graph})",
        ]
    )


def make_call(name: str) -> str:
    """Returns a candidate's name, nanoflow(parts=2) or prefetch(nanoflow(parts=2)), as a call of `make`."""
    kind, _, rest = name.partition("(")
    inner = rest.removesuffix(")")
    if not inner:
        return f"make({kind!r})"
    return f"make({kind!r}, inner={make_call(inner)})" if "(" in inner else f"make({kind!r}, {inner})"


def _distinguishing(situations: Sequence[Sizes]) -> list[str]:
    """Returns the first inputs whose sizes distinguish the situations."""
    shared = [n for n in situations[0] if all(n in s for s in situations)]
    for count in range(1, len(shared) + 1):
        if len({tuple(s[n] for n in shared[:count]) for s in situations}) == len(situations):
            return shared[:count]
    return shared
