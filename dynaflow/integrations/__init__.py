"""DynaFlow in other systems: one module per system, which imports the system only when it is used.

- `transformers`: `accelerate(model)` runs `generate` under a schedule; `transformers_caches` keeps its caches in place.
- `vllm`: the plugin that vLLM loads, and what it wraps; `vllm_batches`: which parts of vLLM's batch can run apart.
- `hooks`: wraps functions of another system and restores them. Which of theirs do we wrap? See `HOOKS` in each module:
  one list with the versions seen; nothing is wrapped by an import.

What all serving systems need is in `dynaflow.serving`.
"""

import importlib
from typing import Any

SYSTEMS = ("transformers", "vllm")


def __getattr__(name: str) -> Any:
    """`dynaflow.integrations.transformers`, imported on first use."""
    if name in SYSTEMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
