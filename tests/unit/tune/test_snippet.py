from __future__ import annotations

from typing import Any

import torch

import dynaflow as df
from dynaflow.tune.snippet import code_snippet, make_call


def test_a_configuration_that_can_be_pasted() -> None:
    text = code_snippet(
        [
            ({"x": (8, 4), "y": (2,)}, "nanoflow(parts=2)"),
            ({"x": (8, 5), "y": (2,)}, "prefetch(comm_overlap(parts=3))"),
            ({"x": (1, 5), "y": (2,)}, "sequential"),
        ],
        "plan",
    )
    names: dict[str, Any] = {"df": df, "model": torch.nn.Identity()}
    exec(text, names)
    chosen = names["CHOSEN"]
    assert list(chosen) == [((8, 4),), ((8, 5),)]
    assert type(chosen[(8, 4),]).__name__ == "NanoFlow" and chosen[(8, 4),].parts == 2
    assert type(chosen[(8, 5),]).__name__ == "Prefetch"
    assert isinstance(names["fast"], df.CompiledModel)


def test_one_choice_for_all_situations_is_one_call() -> None:
    text = code_snippet([({"x": (8,)}, "nanoflow(parts=2)"), ({"x": (4,)}, "nanoflow(parts=2)")])
    names: dict[str, Any] = {"df": df, "model": torch.nn.Identity()}
    exec(text, names)
    assert "CHOSEN" not in text and "cudagraph" not in text
    assert isinstance(names["fast"], df.CompiledModel)


def test_names_as_calls() -> None:
    assert make_call("sequential") == "make('sequential')"
    assert make_call("nanoflow(parts=2)") == "make('nanoflow', parts=2)"
    assert make_call("prefetch(nanoflow(parts=2))") == "make('prefetch', inner=make('nanoflow', parts=2))"
