from __future__ import annotations

import sympy
import torch

from dynaflow._torch.symbols import Symbols, expression, hint_of, number


def test_numbers_and_symbols() -> None:
    world = Symbols()
    size = world.new("n", 8)
    symbol = number(size)
    assert isinstance(symbol, sympy.Symbol) and expression(size) == symbol and hint_of(size) == 8
    assert expression(size * 2 + 1) == 2 * symbol + 1 and hint_of(size * 2) == 16
    assert expression(3) == sympy.Integer(3) and number(3) is None and number("n") is None
    assert hint_of(3) == 3 and hint_of("n") == "n"


def test_two_symbols_that_are_found_equal_are_one() -> None:
    world = Symbols()
    one, other = world.new("n", 8), world.new("m", 8)
    assert expression(one) != expression(other)
    torch._check(one == other)
    assert expression(one) == expression(other)


def test_what_was_assumed_is_a_function_of_the_sizes() -> None:
    world = Symbols()
    n, m = world.new("n", 8), world.new("m", 5)
    symbols = [number(n), number(m)]
    assert world.assumed(symbols)(1, 1), "nothing so far"
    assert n > m
    assert n % 4 == 0
    holds = world.assumed(symbols)
    assert holds(8, 5) and holds(12, 11)
    assert not holds(8, 8) and not holds(9, 5)
    assert world.assumed(symbols[1:])(100), "what other symbols take part in is not looked at"


def test_a_tensor_in_this_world_has_symbolic_sizes() -> None:
    world = Symbols()
    n = world.new("n", 8)
    with world.mode:
        made = torch.empty(n, 2)
    assert expression(made.shape[0]) == number(n) and expression(made.stride(0)) == 2
