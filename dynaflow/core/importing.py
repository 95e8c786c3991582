"""Objects that users name by path: `module:name` or `folder/file.py:name`."""

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


def import_object(path: str, what: str, error: type[DynaFlowError] = DynaFlowError) -> Any:
    """Imports the object at `module:name` or `folder/file.py:name`. If that fails, raises `error`, which calls the
    object `what`."""
    where, _, name = path.rpartition(":")
    try:
        module = _of_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        if not where or (isinstance(e, ModuleNotFoundError) and f"{where}.".startswith(f"{e.name}.")):
            advice = f"pass package.module:name or folder/file.py:name; the working directory is {os.getcwd()}"
            raise error(f"no {what} at {path!r}: {e}", advice=advice) from e
        message = f"no {what} at {path!r}: importing {where} failed: {type(e).__name__}: {e}"
        raise error(message, line=raised_at(e), advice="fix the error, so that it can be imported") from e
    try:
        return attrgetter(name)(module)
    except AttributeError:
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        close = ", ".join(nearest(name, own)) or "nothing"
        advice = f"the nearest names in {where}: {close}"
        raise error(f"no {what} at {path!r}: {where} has no {name!r}", advice=advice) from None


def _of_file(path: str) -> ModuleType:
    file = os.path.abspath(path)
    if not os.path.isfile(file):
        raise ModuleNotFoundError(f"there is no file {path}", name=path)
    name = os.path.basename(file).removesuffix(".py")
    with on_sys_path(os.path.dirname(file)):
        module = importlib.import_module(name)
    there = getattr(module, "__file__", None)
    if there is None or not os.path.samefile(there, file):
        raise ImportError(f"another module of that name is already imported ({there}): rename the file")
    return module


@contextlib.contextmanager
def on_sys_path(folder: str) -> Iterator[None]:
    """In this context, imports search the folder first."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
