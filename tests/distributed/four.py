"""Cases for four ranks."""

from __future__ import annotations

from collections.abc import Callable

import dynaflow as df
from tests.distributed import pretrained
from tests.distributed.models import compare, is_split, lanes_of


def llama() -> None:
    model = pretrained.llama()
    fast = df.compile(model, operators="eager", fullgraph=True)
    for name in ("comm_overlap", "token_weave"):
        fast.set_scheduler(name)
        plan = compare(model, fast, input_ids=pretrained.tokens(5))
        assert is_split(plan, ".all_reduce")
        assert lanes_of(plan, ".all_reduce") == {"network"}


CASES: dict[str, Callable[[], None]] = {"llama": llama}
