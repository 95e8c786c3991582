"""What counts as a finding: anything but a result like eager's, or an error of ours that the program has earned."""

from __future__ import annotations

import traceback

from dynaflow.errors import DynaFlowError, PlanError, ScheduleError, VerifyError
from tests.fuzz.compare import Undefined
from tests.fuzz.tally import Tally

OURS = (PlanError, ScheduleError, VerifyError)
"""Schedulers of the generator make legal calls alone: what they make is legal, too."""

EAGER = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, ArithmeticError)
"""What eager may raise where a program means nothing. (A DynaFlowError is none of them.)"""


def judged(error: Exception, tally: Tally) -> str | None:
    """What is wrong, if anything is."""
    if isinstance(error, Undefined):
        tally.undefined += 1
        return None
    if isinstance(error, DynaFlowError) and not isinstance(error, OURS):
        tally.cases += 1
        tally.refuse(error)
        return None
    return "".join(traceback.format_exception(error, chain=False))
