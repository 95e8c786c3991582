"""The errors that users can get, one class for each kind of mistake.

Every message says what happened, on which operator, at which line of the user's code, and what to do.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings

import torch

_OTHERS = tuple(f"{os.path.dirname(os.path.abspath(file or ''))}{os.sep}"
                for file in (__file__, importlib.__file__, torch.__file__))  # fmt: skip
"""Folders of code that is not the user's."""


class DynaFlowError(Exception):
    """Base of all errors raised by dynaflow.

    `op` is the operator concerned, `line` the line of the user's code ("file.py:12"), `advice` what to do.
    """

    def __init__(self, what: str, *, op: str | None = None, line: str | None = None, advice: str = "") -> None:
        self.op, self.line, self.advice = op, line, advice
        text = what
        if op is not None and op not in what:
            text += f"\n  operator: {op}"
        if line and not line.startswith("<dynaflow"):  # generated code
            text += f"\n  at: {line}"
        if advice:
            text += f"\n  what to do: {advice}"
        super().__init__(text)


def model_is_gone() -> DynaFlowError:
    """Dynamo keeps the code of a model longer than the compiled model that it was made for."""
    return DynaFlowError(
        "a graph was called whose compiled model no longer exists",
        advice="keep a reference to what dynaflow.compile returned for as long as the model is called",
    )


class PartitionError(DynaFlowError):
    """The graph can't be cut by the rules: a rule matches nothing, or the rules are malformed."""


class SplitError(DynaFlowError):
    """The batch can't be split like this: an operator mixes its rows, or the sizes don't add up to it."""


class ScheduleError(DynaFlowError):
    """The scheduler made an impossible or incomplete schedule, or raised."""


class PlanError(DynaFlowError):
    """A plan is unsafe (race, cycle, missing work), malformed, or made for another graph."""


class VerifyError(DynaFlowError):
    """A plan computed other results than the plain model."""


class TimelineError(DynaFlowError):
    """A file, or a list of spans, is not a valid timeline."""


class RecordingError(DynaFlowError):
    """A recording inside of another one, or one that doesn't contain what is requested."""


class FallbackWarning(UserWarning):
    """A graph runs unscheduled because dynaflow or torch.compile's tracer failed on it.

    `warnings.simplefilter("error", dynaflow.FallbackWarning)` raises the original error instead.
    """


NOT_FAILURES = (DynaFlowError, MemoryError, torch.OutOfMemoryError)
"""Errors that are always raised, with no fallback: user mistakes, and running out of memory."""


def fall_back(error: Exception, what: str, failed: str = "dynaflow") -> str:
    """Warns that `what` runs unscheduled because `failed` could not handle it. Returns the reason."""
    why = f"{failed} failed on it: {shortened(f'{type(error).__name__}: {error}', 300)}"
    ours = "This is a bug in dynaflow: please report it. " if failed == "dynaflow" else ""
    try:
        warnings.warn(
            f"{what} runs unscheduled, as {why}. {ours}"
            'For the traceback: warnings.simplefilter("error", dynaflow.FallbackWarning)',
            FallbackWarning,
            stacklevel=2,
        )
    except FallbackWarning:
        raise error from None
    return why


def shown(value: object, most: int = 60) -> str:
    """The repr of a value for an error message, shortened; it may have any size, or not be printable."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__} that can't be printed"
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    """The text on one line of at most `most` characters."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """The text on one line: control characters and lone surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def user_line() -> str | None:
    """The innermost line of the current call stack that lies outside this package and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_OTHERS, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raised_at(error: BaseException) -> str | None:
    """The line of user code that raised `error`: the last frame outside of this package, torch and importlib."""
    line, tb = None, error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if not name.startswith((*_OTHERS, "<frozen", "<dynaflow")):
            line = f"{name}:{tb.tb_lineno}"
        tb = tb.tb_next
    return line


def nearest(wanted: str, names: list[str], count: int = 5) -> list[str]:
    """Returns the names closest to `wanted`, best first: same ending first, then similar spelling."""
    import difflib

    stem = wanted.replace("*", "").strip(".")
    by_end = [n for n in names if stem and stem.split(".")[-1] in n]
    close = difflib.get_close_matches(stem or wanted, names, n=count, cutoff=0.3)
    tails = {n.rsplit(".", 1)[-1]: n for n in names}
    close += [tails[t] for t in difflib.get_close_matches(stem.split(".")[-1], list(tails), n=count, cutoff=0.5)]
    return list(dict.fromkeys(by_end + close))[:count] or names[:count]
