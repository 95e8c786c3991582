"""For the reference: options that a docstring lists as `name: what it says`, line by line, become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (?=\S)", re.MULTILINE)


class OptionLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    """Paragraphs of which every line starts an option, or goes on with one."""
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if not all(OPTION.match(line) or line.startswith("    ") for line in lines) or not OPTION.match(lines[0]):
        return text
    return OPTION.sub(r"- `\1`: ", text)
