"""DynaFlow in the systems that people run: one file a system, which imports it only when it is used."""

import importlib
from typing import Any

SYSTEMS = ("transformers", "vllm")


def __getattr__(name: str) -> Any:
    """`dynaflow.integrations.transformers`, imported when asked for."""
    if name in SYSTEMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
