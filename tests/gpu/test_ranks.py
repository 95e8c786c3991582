"""Two ranks on one GPU, over gloo: collectives of CUDA tensors in lanes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.distributed import one_card
from tests.distributed.launch import launch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return cache(lambda: launch("one_card", 2, tmp_path_factory.mktemp("ranks"), seconds=240.0))


@pytest.mark.parametrize("case", one_card.CASES)
def test_two_ranks_on_one_card(case, outcome):
    found = outcome()
    print(found.logs)
    found.check(case, 2)
