from __future__ import annotations

import logging
import threading

import pytest
import torch

from dynaflow._torch.fakes import concrete_fake_mode, is_fake, is_plain_fake, make_fake, silence_fake_errors
from dynaflow._torch.symbols import Symbols
from dynaflow._torch.tensors import storage_id


def test_sizes_without_memory() -> None:
    with concrete_fake_mode():
        x = torch.empty(4, 6)
        y = x.t() @ x
    assert is_fake(x) and tuple(y.shape) == (6, 6) and not is_fake(torch.empty(2)) and not is_fake(3)


def test_what_is_more_than_a_shape() -> None:
    with concrete_fake_mode():
        plain, conj = torch.empty(4), torch.empty(4, dtype=torch.complex64).conj()
        grad = torch.empty(4, requires_grad=True)
    symbols = Symbols()
    with symbols.mode:
        symbolic = torch.empty(symbols.new("n", 4))
    assert is_plain_fake(plain)
    assert [is_plain_fake(t) for t in (conj, grad, symbolic, torch.empty(4))] == [False] * 4


def test_a_tensor_that_looks_so_again() -> None:
    with concrete_fake_mode() as mode:
        x = torch.empty(4, 6)
        y = x.t()[1:]
    device = torch.device("cpu")
    own = make_fake(mode, y.size(), y.stride(), 0, y.dtype, device, None)
    same = make_fake(mode, y.size(), y.stride(), y.storage_offset(), y.dtype, device, x)
    for made in own, same:
        assert is_plain_fake(made) and (made.size(), made.stride(), made.device) == (y.size(), y.stride(), device)
    assert same.storage_offset() == y.storage_offset() and storage_id(same) == storage_id(x) != storage_id(own)


def test_logs_are_silent_in_this_thread_alone(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    caplog.set_level(logging.ERROR, log.name)
    log.addHandler(caplog.handler)
    try:
        with silence_fake_errors():
            log.error("here")
            thread = threading.Thread(target=log.error, args=("there",))
            thread.start()
            thread.join()
        log.error("after")
    finally:
        log.removeHandler(caplog.handler)
    assert list(dict.fromkeys(caplog.messages)) == ["there", "after"]
