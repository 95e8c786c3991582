"""A program under `dynaflow.compile`: several calls of several sizes, with things happening in between."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dynaflow as df
from dynaflow._torch import TORCH
from dynaflow.api import engine_of
from tests.fuzz.compare import Mismatch, Run, Undefined, compare, compare_gradients, used_of
from tests.fuzz.dice import Dice
from tests.fuzz.engine_way import count_plans
from tests.fuzz.groups import Throws, dice_of
from tests.fuzz.processes import warn_of_failures
from tests.fuzz.programs import Program, copied_model, draw_program
from tests.fuzz.schedules import RandomScheduler, draw_scheduler
from tests.fuzz.sizes import Sizes
from tests.fuzz.steps.called import COMPILE
from tests.fuzz.tally import Tally
from tests.fuzz.verdicts import EAGER, judged
from tests.helpers import plans_of

LOOSELY = 100.0
FORK_SECONDS = 60


TORCHS = ("modified by an inplace operation", "backward through the graph a second time")
"""A graph may keep other inputs for its backward pass than eager does, which are then written to; and to autograd each
of its results depends on all of its inputs, so buffers with gradients of an earlier call count for all."""


class Torchs(Exception):
    """torch.compile can't do it either. (Where it does the wrong thing, we must not.)"""


class Door:
    """The program, plainly and compiled, side by side."""

    def __init__(self, program: Program, dice: Dice, tally: Tally) -> None:
        self.program, self.dice, self.tally = program, dice, tally
        self.inference = dice.one_in(5)
        self.plain = copied_model(program.model)
        self.model = program.model
        self.fast: Any = None
        self.used: list[tuple[Any, RandomScheduler]] = []
        """Engines, each with its first scheduler."""
        self.compile()

    def compile(self, model: Any = None) -> None:
        program, dice = self.program, self.dice
        scheduler = draw_scheduler(dice, [], program.rules, buckets=10)
        dims = None if program.batch_dims is None else dict(program.batch_dims)
        dynamic = {i.name: i.length_dims for i in program.given if i.length_dims} if not dice.one_in(4) else None
        self.fast = df.compile(
            self.model if model is None else model,
            scheduler,
            batch_dims=dims,
            dynamic_dims=dynamic,
            operators="eager",
            verify=dice.one_in(8),
        )
        self.used.append((engine_of(self.fast), scheduler))

    # Calls

    def call(self, sizes: Sizes, seed: int, mode: str) -> None:
        """One call on both sides, compared."""
        buffers = list(self.plain.buffers()) if hasattr(self.plain, "buffers") else []
        before = [buffer.clone() for buffer in buffers]
        try:
            expected = self._run(self.plain, self.plain, sizes, seed, mode)
        except EAGER as e:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.data.copy_(value)  # of a call that the other side does not make
            raise Undefined(str(e)) from e
        try:
            _compare(expected, self._run(self.fast, self.model, sizes, seed, mode), self._has_zeros())
        except (df.DynaFlowError, Mismatch) as e:
            if isinstance(e, Mismatch) and not isinstance(self.fast, df.CompiledModel):
                raise Torchs(str(e)) from e  # the outermost is torch's own
            raise
        except Exception as e:
            if any(text in str(e) for text in TORCHS) or self._is_torchs(sizes, seed, mode):
                raise Torchs(str(e)) from e
            raise

    def _run(self, function: Any, owner: Any, sizes: Sizes, seed: int, mode: str) -> tuple[Run, dict[str, Any]]:
        """`owner`: what has the parameters."""
        program = self.program
        parameters = list(owner.parameters()) if hasattr(owner, "parameters") else []
        buffers = list(owner.buffers()) if hasattr(owner, "buffers") else []
        with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
            memory = program.memory(sizes, seed)
            wanted: dict[str, torch.Tensor] = {}
            if mode == "grad":
                for given in program.given:
                    if given.grad:
                        wanted[given.name] = memory[given.name] = memory[given.name].detach().requires_grad_()
                wanted |= {f"parameter {n}": p for n, p in enumerate(parameters) if p.requires_grad}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warn_of_failures()
                results = function(**{i.name: memory[i.name] for i in program.given})
                results = results if isinstance(results, (tuple, list)) else (results,)
                grads = _gradients(results, wanted, seed)
        return Run({**memory, **{f"buffer {n}": b.clone() for n, b in enumerate(buffers)}}, results), grads

    def _has_zeros(self) -> bool:
        """Whether gradients may be zeros instead of none: a graph that comes behind another one can't know of what
        nothing is used."""
        return any(engine.stats.graph_breaks for engine, _ in self.used)

    def _is_torchs(self, sizes: Sizes, seed: int, mode: str) -> bool:
        """Whether plain torch.compile fails, too, on the plain model as it is after the call."""
        torch._dynamo.reset()
        model = copied_model(self.plain)
        compiled = torch.compile(model, backend="aot_eager" if mode == "grad" else "eager", dynamic=True)
        try:
            self._run(compiled, model, sizes, seed, mode)
        except Exception:
            return True
        return False

    # What happens in between

    def happens(self, name: str) -> None:
        self.tally.events[name] += 1
        _EVENTS[name](self)

    def set_attribute(self) -> None:
        value = self.dice.pick([3.0, 0.5])
        for model in (self.plain, self.fast):
            model.scale = value

    def set_on_the_model(self) -> None:
        for model in (self.plain, self.model):
            model.scale = 2.0

    def swap_parameters(self) -> None:
        owned = dict([*self.plain.named_parameters(), *self.plain.named_buffers()])
        for name, tensor in owned.items():
            kind = self.dice.below(3)
            value = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            for model in (self.plain, self.model):
                _swap(model, name, value.to(tensor.dtype).clone(), kind)

    def change_mode(self) -> None:
        training = self.dice.one_in(2)
        self.plain.train(training)
        self.fast = self.fast.train() if training else self.fast.eval()
        self._still_scheduled("train()" if training else "eval()")

    def convert(self) -> None:
        self.plain = self.plain.to("cpu")
        self.fast = self.fast.to("cpu")
        self._still_scheduled("to()")

    def _still_scheduled(self, what: str) -> None:
        if not isinstance(self.fast, df.CompiledModel):
            raise Mismatch(f"{what} of a compiled model gave a {type(self.fast).__name__}")

    def set_scheduler(self) -> None:
        scheduler = draw_scheduler(self.dice, [], self.program.rules, buckets=10)
        self.fast.set_scheduler(scheduler)

    def compile_again(self) -> None:
        self.compile()

    def compile_compiled(self) -> None:
        self.compile(self.fast)

    def call_from_compiled(self) -> None:
        inner, names = self.fast, ", ".join(i.name for i in self.program.given)
        scope: dict[str, Any] = {"inner": inner}
        keywords = ", ".join(f"{i.name}={i.name}" for i in self.program.given)
        exec(compile(f"def outer({names}):\n    return inner({keywords})\n", "<fuzz>", "exec"), scope)
        if self.dice.one_in(2):
            self.compile(scope["outer"])
        else:
            self.fast = torch.compile(scope["outer"], backend="eager")

    def copy(self) -> None:
        try:
            copy.deepcopy(self.plain)
        except RuntimeError as e:  # a buffer that is no leaf, after a write with gradients
            raise Undefined(str(e)) from e
        self.model = self.fast = copy.deepcopy(self.fast)
        self.plain = copied_model(self.plain)

    def pickle(self) -> None:
        self.model = self.fast = pickle.loads(pickle.dumps(self.fast))

    def run_in_threads(self) -> None:
        calls = [(self.program.draw_sizes(self.dice), self.dice.below(100)) for _ in range(3)]
        mode = self.draw_mode()
        errors: list[Exception] = []

        def run(sizes: Sizes, seed: int) -> None:
            try:
                expected = self._run(self.plain, self.plain, sizes, seed, mode)
            except EAGER:
                return
            try:
                _compare(expected, self._run(self.fast, self.model, sizes, seed, mode), self._has_zeros())
            except Exception as e:
                errors.append(e)

        threads = [threading.Thread(target=run, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error

    def fork(self) -> None:
        sizes, seed, mode = self.program.draw_sizes(self.dice), self.dice.below(100), self.draw_mode()
        ours, its = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(FORK_SECONDS)
            try:
                self.call(sizes, seed, mode)
            except (Undefined, Torchs, df.DynaFlowError):
                pass
            except BaseException:
                os.write(its, traceback.format_exc().encode())
            os._exit(0)
        os.close(its)
        with os.fdopen(ours) as pipe:
            failed = pipe.read()
        _, status = os.waitpid(child, 0)
        if failed or status:
            raise Mismatch(f"a call in a forked child {'fails' if failed else 'hangs'} ({status}):\n{failed}")

    def draw_mode(self) -> str:
        """Mostly the same: torch.compile captures anew for another."""
        if self.program.trains:
            return "no_grad" if self.dice.one_in(8) else "grad"
        # Before 2.13 transforms that differentiate give zeros in eager inference mode.
        refused = any(name in str(self.program) for name in ("by_grad", "by_per_sample_grad", "by_jvp"))
        wanted = self.inference != self.dice.one_in(8)
        return "inference" if wanted and (TORCH >= (2, 13) or not refused) else "no_grad"


_EVENTS: dict[str, Callable[[Door], None]] = {
    "set an attribute": Door.set_attribute,
    "set an attribute of the model": Door.set_on_the_model,
    "swap parameters": Door.swap_parameters,
    "train() or eval()": Door.change_mode,
    "to()": Door.convert,
    "set another scheduler": Door.set_scheduler,
    "compile again": Door.compile_again,
    "compile what is compiled": Door.compile_compiled,
    "call from something compiled": Door.call_from_compiled,
    "copy": Door.copy,
    "pickle": Door.pickle,
    "threads": Door.run_in_threads,
    "fork": Door.fork,
}

_OF_MODULES = [
    "set an attribute",
    "set an attribute of the model",
    "swap parameters",
    "train() or eval()",
    "to()",
    "copy",
]
LAST = "call from something compiled"
_OF_ALL = ["set another scheduler", "compile again", "compile what is compiled", LAST]


def run_door(dice: Dice, tally: Tally, show: Callable[[str], None] | None = None) -> None:
    torch._dynamo.reset()
    torch.backends.mha.set_fastpath_enabled(False)  # which eager torch alone takes
    program = draw_program(dice)
    if show is not None:
        show(str(program))
    door = Door(program, dice, tally)
    done, event = 0, ""
    try:
        for turn in range(2 + dice.below(2)):
            if turn and dice.one_in(2) and event != LAST:
                event = _draw_event(program, dice)
                if show is not None:
                    show(f"then: {event}")
                door.happens(event)
            sizes, seed, mode = program.draw_sizes(dice), dice.below(100), door.draw_mode()
            if show is not None:
                show(f"call: {sizes}, seed {seed}, {mode}")
            try:
                door.call(sizes, seed, mode)
                done += 1
            except Undefined:
                tally.undefined += not turn
        if done:
            tally.cases += 1
    finally:
        for engine, _ in door.used:
            engine.planner.lowerer.threads.close()
        if done:
            wanted = [s for _, s in door.used if s.may_split]
            tally.wanted += bool(wanted)
            plans = [p for engine, _ in door.used for p in plans_of(engine)]
            count_plans(plans, door.used[0][1], tally)
            tally.plain += any(engine.stats.plain_graphs for engine, _ in door.used)
            reasons = [reason for engine, _ in door.used for reason in engine.stats.plain_reasons]
            tally.events["(what torch.compile's tracer failed on)"] += sum("tracer failed" in r for r in reasons)


def _draw_event(program: Program, dice: Dice) -> str:
    known = list(_OF_ALL)
    if isinstance(program.model, nn.Module):
        known += _OF_MODULES * 2
        known += ["pickle"] if type(program.model).__module__ == "tests.fuzz.library" else []
    # Threads change for each other what a model writes, and torch's own state in jvp and in what eager torch compiles.
    shared = isinstance(program.model, nn.Module) and any(True for _ in program.model.buffers())
    unsafe = shared or any(name in str(program) for name in ["by_jvp", *COMPILE])
    known += ["fork"] if unsafe else ["threads", "fork"]
    return dice.pick(known)


class DoorWay:
    def run(self, number: int, tally: Tally) -> str | None:
        return self.run_with(dice_of("door", number), tally)

    def run_with(self, dice: Throws, tally: Tally, group: int | None = None, show: Any = None) -> str | None:
        try:
            run_door(dice("case"), tally, show)
        except Torchs:
            tally.torchs += 1
        except Exception as e:
            return judged(e, tally)
        return None

    def close(self) -> None: ...


def _compare(expected: tuple[Run, dict[str, Any]], found: tuple[Run, dict[str, Any]], zeros: bool) -> None:
    compare(expected[0], found[0], LOOSELY)
    compare_gradients(expected[1], found[1], LOOSELY, zeros)


def _gradients(results: Any, wanted: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
    """Of a loss in which each element of each result that it uses counts differently."""
    lossy = used_of([r for r in results if isinstance(r, torch.Tensor) and r.requires_grad], seed)
    if not wanted or not lossy:
        return dict.fromkeys(wanted)
    random = torch.Generator().manual_seed(3)
    parts = [torch.view_as_real(r.resolve_conj()) if r.is_complex() else r for r in lossy]
    loss = sum((p * torch.rand(p.shape, generator=random, dtype=torch.float64)).sum() for p in parts)
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)  # type: ignore[arg-type]
    return dict(zip(wanted, grads, strict=True))


def _swap(model: Any, name: str, value: torch.Tensor, kind: int) -> None:
    *path, last = name.split(".")
    owner = model.get_submodule(".".join(path))
    tensor = getattr(owner, last)
    if kind == 0:
        with torch.no_grad():
            tensor.copy_(value)
    elif kind == 1:
        tensor.data = value
    elif isinstance(tensor, nn.Parameter):
        setattr(owner, last, nn.Parameter(value, requires_grad=tensor.requires_grad))
    else:
        setattr(owner, last, value)
