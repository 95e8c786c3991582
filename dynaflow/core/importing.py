"""What users name by where it is."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from operator import attrgetter
from types import ModuleType
from typing import Any

from dynaflow.errors import DynaFlowError, nearest, raised_at


def imported(path: str, what: str, error: type[DynaFlowError] = DynaFlowError) -> Any:
    """What stands at module:name, as in an import, or at folder/file.py:name. `what` it is to be, and the `error` to
    raise if it is not there."""
    where, _, name = path.rpartition(":")
    try:
        module = _of_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as e:  # a user's file may do anything
        if not where or (isinstance(e, ModuleNotFoundError) and f"{where}.".startswith(f"{e.name}.")):
            advice = f"say package.module:name, as in an import, or folder/file.py:name; this folder is {os.getcwd()}"
            raise error(f"no {what} at {path!r}: {e}", advice=advice) from e
        told = f"no {what} at {path!r}: importing {where} failed: {type(e).__name__}: {e}"
        raise error(told, line=raised_at(e), advice="mend it, until it can be imported") from e
    try:
        return attrgetter(name)(module)
    except AttributeError:
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        close = ", ".join(nearest(name, own)) or "nothing"
        advice = f"what {where} has by the nearest names: {close}"
        raise error(f"no {what} at {path!r}: {where} has no {name!r}", advice=advice) from None


def _of_file(path: str) -> ModuleType:
    file = os.path.abspath(path)
    if not os.path.isfile(file):
        raise ModuleNotFoundError(f"there is no file {path}", name=path)
    name = os.path.basename(file).removesuffix(".py")
    with searched(os.path.dirname(file)):
        module = importlib.import_module(name)
    there = getattr(module, "__file__", None)
    if there is None or not os.path.samefile(there, file):
        raise ImportError(f"another module has that name already ({there}): rename the file")
    return module


@contextlib.contextmanager
def searched(folder: str) -> Iterator[None]:
    """Imports look there first."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
