"""Every block of Python in README and docs runs, page by page; every command is one that there is."""

from __future__ import annotations

import functools
import linecache
import sys
import types
from pathlib import Path

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import dynaflow as df
import dynaflow.cli
from dynaflow.capture import op_registry
from dynaflow.integrations import transformers
from tests.docs import preludes
from tests.docs.pages import PAGES, Block, blocks, commands, name_of

NOT_RUN = {
    "docs/strategies.md": ["needs a GPU"],
    "docs/systems/vllm.md": ["needs vLLM", "needs vLLM"],
}
"""By page, the reasons for which blocks are not run. A block more or less has to be said here, too."""

WITH_PYTHON = [page for page in PAGES if any(b.kind == "python" and not b.not_run for b in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in their order, in one namespace, with what the page takes for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("compile", "TrainStep"):  # compiled operators are tested elsewhere, and take longer
        monkeypatch.setattr(df, name, functools.partial(getattr(df, name), operators="eager"))
    accelerate = functools.partial(transformers.accelerate, operators="eager")
    monkeypatch.setattr(transformers, "accelerate", accelerate)
    monkeypatch.setenv("DYNAFLOW_OPERATORS", "eager")
    module = types.ModuleType("page_" + "".join(c if c.isalnum() else "_" for c in name_of(page)))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks a function's globals up by its module
    section = None
    # What a page declares, or turns off, is for itself alone.
    with op_registry.declarations_restored(), torch.enable_grad():
        for block in blocks(page):
            if block.kind == "python" and not block.not_run:
                if block.section != section:
                    vars(module).update(preludes.of(name_of(page), section := block.section))
                _run(block, page, module)
            for words in commands(block):
                if words[0] == "view" and all(Path(word).exists() for word in words[1:]):  # the page has made them
                    found = CliRunner().invoke(dynaflow.cli.app, [*words, "--no-open"])
                    assert found.exit_code == 0 and list(Path().glob("*.html")), found.output


def _run(block: Block, page: Path, module: types.ModuleType) -> None:
    name = f"{page}:{block.line}"
    text = "\n" * (block.line - 1) + block.text  # so that a traceback has the page's lines
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(module))


def test_blocks_that_are_not_run_are_known() -> None:
    found = {name_of(page): [b.not_run for b in blocks(page) if b.not_run] for page in PAGES}
    assert {page: reasons for page, reasons in found.items() if reasons} == NOT_RUN


def test_every_block_is_seen() -> None:
    """None is indented, or opened in another way, so that it would be passed over."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```") == 2 * len(list(blocks(page))), name_of(page)
        assert text.count("<!-- not run:") == sum(1 for b in blocks(page) if b.not_run), name_of(page)
        assert {b.kind for b in blocks(page)} <= {"", "python"}, name_of(page)


COMMANDS = [
    pytest.param(words, id=f"{name_of(page)}:{block.line} {' '.join(words)}")
    for page in PAGES
    for block in blocks(page)
    for words in commands(block)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_command_is_understood(words: list[str]) -> None:
    command = typer.main.get_command(dynaflow.cli.app).commands[words[0]]
    command.make_context(words[0], words[1:])  # raises for what it does not take


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10
