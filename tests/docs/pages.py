"""The pages of README and docs as data: their code blocks, and what is said before them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    kind: str
    """"python", or "" for what is typed into a shell or printed."""
    text: str
    line: int
    """Of the page, where its text begins."""
    section: str
    """The heading (of the second level) that it stands under."""
    not_run: str
    """The reason that stands before it; empty if it runs."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        headings = re.findall(r"^## (.+)$", text[: found.start()], re.MULTILINE)
        section = headings[-1] if headings else ""
        yield Block(kind=found["kind"], text=found["text"], line=line, section=section, not_run=found["why"] or "")


def commands(block: Block) -> Iterator[list[str]]:
    """What the block calls of ours: the words behind `dynaflow`."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if line.startswith("dynaflow ") else []
        if words:
            yield words[1:]
