"""Cases for four ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import dynaflow as df
from tests.distributed import pretrained, training
from tests.distributed.models import compare, is_split, lanes_of


def llama() -> None:
    model = pretrained.llama()
    fast = df.compile(model, operators="eager", fullgraph=True)
    for name in ("comm_overlap", "token_weave"):
        fast.set_scheduler(name)
        plan = compare(model, fast, input_ids=pretrained.tokens(5))
        assert is_split(plan, ".all_reduce")
        assert lanes_of(plan, ".all_reduce") == {"network"}


CASES: dict[str, Callable[[], None]] = {
    "llama": llama,
    "train_tensor_parallel": training.tensor_parallel,
    "train_data_parallel": partial(training.data_parallel, operators="eager"),
    "train_sharded": training.CASES["sharded"],
    "train_summed": training.CASES["summed"],
}
