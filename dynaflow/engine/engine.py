"""The way of the data: capture -> partition -> schedule -> check -> lower -> run.

An Engine belongs to one compiled model. It turns each graph that Dynamo captures into a GraphRunner, which
finds or makes the plan for the arguments at hand and runs it. Plans belong to a scheduler; operators, threads
and streams to the engine, so another scheduler finds them ready.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.input_aliasing import Sharing, written_inputs
from dynaflow.capture.batch_analysis.probe import Contradiction, Unschedulable, probe
from dynaflow.capture.captured_graph import BatchDims, CapturedGraph, DynamicDims, make_batch_dynamic
from dynaflow.capture.captured_graph import copied as copied_graph
from dynaflow.capture.dynamic_dims import mark_arguments
from dynaflow.capture.higher_order import inline
from dynaflow.capture.joint_graph import (
    Mistraced,
    Passes,
    declares_regions,
    returns_gradients,
    returns_or_writes,
    strange_parts,
    takes_nested,
    untraceable_views,
    views_returned,
    wants_gradients,
)
from dynaflow.capture.optimizer_ops import Updates
from dynaflow.capture.serialize import is_given
from dynaflow.capture.torch_modules import TRACED, keep_bags, leave_out_dropouts
from dynaflow.core import forks, validate
from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.engine.plan_cache import Planned, Schedules, Situation
from dynaflow.engine.runner import GraphRunner, PlainRunner, PlanReady, Raiser, Spaces
from dynaflow.engine.snapshot import NoRoom, copied
from dynaflow.engine.trials import Trials
from dynaflow.errors import (
    NOT_FAILURES,
    DynaFlowError,
    PartitionError,
    ScheduleError,
    SplitError,
    fall_back,
    raised_at,
    shown,
)
from dynaflow.lower.compile_ops import Mode, Operators
from dynaflow.lower.executable import Lowered
from dynaflow.lower.lower import CudaGraph, Lowerer, OnTask
from dynaflow.lower.padding import Batch, Padding
from dynaflow.partition.op_graph import OpGraph
from dynaflow.partition.partition import partition
from dynaflow.partition.rules import SplitFunc, SplitModule
from dynaflow.schedule.base import OpSchedulerBase, checked_scheduler
from dynaflow.schedule.check import check
from dynaflow.schedule.context import ScheduleContext
from dynaflow.schedule.plan_store import KeptPlan, fact_value, frozen, functions_of, hashable, registered
from dynaflow.schedule.rank_consensus import Meetings
from dynaflow.schedule.split import request_count

Facts = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


PLANS_KEPT = 1024
"""Of each scheduler; then the oldest goes."""
NOT_CAPTURED = "torch.compile captured nothing: it is turned off (TORCHDYNAMO_DISABLE), or there is nothing to compute"
CHOICES = 8
"""How many schedulers may choose another one in a row."""
CUTS_KEPT = 32
"""Of each graph, for schedulers to come that cut it the same way."""


class _Local(threading.local):
    """What belongs to the call that a thread is making."""

    facts: Mapping[str, Any] | None = None
    plan_only = False


class _Marks(threading.local):
    """On tensors of the call that is being captured: how to take back the marks that make its batch dynamic."""

    undo: tuple[Callable[[], None], ...] = ()
    again: Any = ()
    """The frame that is traced again, since more had to be marked."""


marks = _Marks()


def take_marks_back() -> None:
    for undo in reversed(marks.undo):  # a tensor may have been marked twice
        undo()
    marks.undo, marks.again = (), ()


class Engine:
    def __init__(
        self,
        scheduler: OpSchedulerBase,
        *,
        batch_dims: BatchDims | None = None,
        dynamic_dims: DynamicDims | None = None,
        operators: Mode = "inductor",
        verify: bool = False,
        check: bool = True,
        facts: Facts | None = None,
        cudagraph: CudaGraph = None,
        static_inputs: Sequence[str] = (),
        on_task: OnTask | None = None,
        parameters: tuple[str, ...] = (),
        offload_saved: int | None = None,
        offload_most: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        name: str = "model",
    ) -> None:
        _torch.teach_dynamo(TRACED)
        self.name, self.offload = name, (offload_saved, offload_most)
        self.updates = None if optimizer is None else Updates(optimizer)
        self.batch_dims, self.verify, self.check_plans, self.parameters = batch_dims, verify, check, parameters
        self.dynamic_dims = dynamic_dims or {}
        self.stats = Stats()
        self.options: Mapping[str, Any] | None = None
        self.owned = False
        """A CompiledModel holds it; else its graphs do."""
        self.refuse: Callable[[fx.GraphModule], None] | None = None
        """Looks at each graph that is captured, and raises if it has something that can't be."""
        self.operators = Operators(operators)
        self.operators.failures = self.stats.compile_failures
        self.rewrite = operators == "inductor"
        """In training Inductor's front end may rewrite what is computed, as where it makes kernels of it."""
        self.lowerer = Lowerer(self.operators, on_task, self.stats, cudagraph, tuple(static_inputs))
        self.local = _Local()
        self._facts: Facts = facts or {}
        self._schedules = Schedules(checked_scheduler(scheduler))
        self.lock = forks.rlock()
        self._meetings = Meetings()
        self._breaks: Counter[str] = Counter()
        """Of all graphs in the process, before the first call."""
        self.deciding: list[threading.Thread] = []
        forks.tell(self)

    def after_fork(self) -> None:
        self.deciding.clear()
        self.situation = self._situation_in_child  # type: ignore[method-assign]

    def set_scheduler(self, scheduler: OpSchedulerBase) -> None:
        self._schedules = Schedules(checked_scheduler(scheduler))

    def plans(self) -> list[Plan]:
        """All that are kept."""
        with self.lock:
            return self._schedules.all_plans()

    @property
    def chooses(self) -> bool:
        """The scheduler leaves situations to others, and may have to try them."""
        return self._schedules.chooses

    def planned(self, call: Callable[[], Any], facts: Mapping[str, Any] | None = None) -> PlanReady | None:
        """What a call would run, lowered but not run; None if it comes to no graph. `facts`: beside those it has."""
        local, before = self.local, self.local.facts
        local.plan_only, local.facts = True, facts or before
        try:
            call()
        except PlanReady as ready:
            return ready
        finally:
            local.plan_only, local.facts = False, before
        return None

    def facts(self) -> Mapping[str, Any]:
        base = self._facts
        if callable(base):
            base = _called(base, "facts()", "mend it: it is asked in each call")
        if type(base) is not dict:  # that is the usual kind, and this is asked in each call
            base = validate.mapping(base, "facts()", 'return a mapping: {"phase": "decode"}')
        return {**base, **self.local.facts} if self.local.facts else base

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a first call: what looks like the batch is made dynamic, so that one trace will do."""
        self._breaks = _torch.breaks()
        if self.operators.mode == "inductor":
            _torch.warm_compiler()  # while the model is traced
        requests = request_count(self.facts().get("num_tokens"))
        take_marks_back()  # those of a call that this one is made in
        for undo in mark_arguments(args, kwargs, self.parameters, self.batch_dims, requests, self.dynamic_dims):
            marks.undo = (*marks.undo, undo)  # one by one: an interrupt leaves none behind

    def look_for_graphs(self) -> None:
        """After a first call: says why, if the model was not captured at all."""
        if not self.stats.graphs:
            self.stats.plain_reasons.extend(_torch.breaks() - self._breaks or [NOT_CAPTURED])

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """What Dynamo calls with a captured graph."""
        try:
            frame = _torch.traced_frame()
            if marks.again not in ((), frame):
                take_marks_back()  # of a frame whose second trace came to nothing
            if not (marks.again == frame or is_given(gm)):
                requests = request_count(self.facts().get("num_tokens"))
                more = make_batch_dynamic(gm, self.batch_dims, requests, self.parameters, self.dynamic_dims)
                if more:
                    marks.undo, marks.again = (*marks.undo, *more), frame
                    raise _torch.restart_capture()  # trace again, now that the batch may vary
            take_marks_back()
            self.operators.look_for_compiler({e.device.type for e in example_inputs if isinstance(e, torch.Tensor)})
            if self.refuse is not None:
                self.refuse(gm)
            if takes_nested(gm):
                return self._plain(gm, "it takes nested tensors, whose sizes are no numbers")
            left_out = leave_out_dropouts(gm)
            training = wants_gradients(gm)
            if not training and returns_gradients(gm):
                return self._plain(gm, "gradients are off, but a part of it turns them on, and returns what has them")
            inline(gm, training=training)
            keep_bags(gm)
            if training or strange_parts(gm) is not None:
                if left_out and returns_or_writes(gm, left_out):  # AOTAutograd would not know what they are
                    return self._plain(gm, "what a dropout returns that drops nothing is returned or written")
                return self._traced(gm, example_inputs, training)
            return self._runner(CapturedGraph(gm, self.parameters, self.batch_dims))
        except DynaFlowError as e:  # Dynamo would wrap it: let the call raise it instead
            take_marks_back()
            return Raiser(e)
        except Exception as e:
            if isinstance(e, NOT_FAILURES) or _torch.is_restart(e):
                raise
            take_marks_back()
            gm.graph.lint()
            return self._plain(gm, fall_back(e, self.name))

    def _traced(self, gm: fx.GraphModule, example_inputs: list[Any], training: bool) -> Callable[..., Any]:
        """What AOTAutograd makes of a graph: both passes of training, each with plans of its own; or one graph, in
        which the transforms of torch.func are what they come to."""
        strange = strange_parts(gm)
        if self._clash(gm, strange):
            if strange is not None:
                return self._plain(gm, f"it has {strange}, and inputs that share memory")
            return self._runner(CapturedGraph(gm, self.parameters, self.batch_dims))
        if (why := untraceable_views(gm)) is not None:
            return self._plain(gm, why)
        merge_calls = not declares_regions(gm, self._rules_now())
        passes = Passes(gm, self.parameters, self.batch_dims, *self.offload, self.updates,
                        training=training, merged_calls=merge_calls)  # fmt: skip
        native = self.operators.mode == "eager"
        ours: list[Exception] = []
        written: set[int] = set()
        engine_of = weakref.ref(self)  # AOTAutograd keeps `make`

        def make(part: fx.GraphModule, backward: bool) -> _torch.Boxed:
            engine = engine_of()
            try:
                assert engine is not None, "captured by a compiled model that is gone"
                written.update(_torch.written_inputs())
                if training and engine.operators.mode == "eager":
                    _torch.draw_by_seed(part)
                return passes.call(engine._runner(passes.read(part, backward)).boxed, backward)
            except Exception as e:
                ours.append(e)
                if not backward or engine is None or engine.updates is not None or isinstance(e, NOT_FAILURES):
                    raise
                engine.stats.plain_graphs += 1
                engine.stats.plain_reasons.append(fall_back(e, f"the backward pass of {engine.name}"))
                return _torch.boxed_forward(_torch.with_own_draws(part))

        try:
            made = _torch.compile_passes(
                copied_graph(gm), example_inputs, make, native=native, native_random=native and not training,
                rewrite=self.rewrite, merge_calls=merge_calls,
            )  # fmt: skip
            made = self._unless_shared(made, gm, frozenset(written), strange) if written else made
            return self._held(made, passes, gm) if training else made
        except Exception as e:
            if ours and isinstance(ours[0], Mistraced):
                return self._plain(gm, str(ours[0]))
            if ours and not isinstance(ours[0], NOT_FAILURES):
                return self._plain(gm, fall_back(ours[0], self.name))
            if ours or _torch.is_restart(e):
                raise
            why = f"{type(e).__name__}: {e}".strip().splitlines()[0]
            if strange is not None:
                return self._plain(gm, f"it has {strange}, and can't be traced ({why})")
            warnings.warn(
                f"the backward pass can't be traced ({why}); forward runs as scheduled, backward as autograd orders it",
                stacklevel=2,
            )
            return self._runner(CapturedGraph(gm, self.parameters, self.batch_dims))

    def _rules_now(self) -> tuple[Any, ...]:
        """Of the scheduler at hand; none if it fails, which it will say when it is asked for a plan."""
        try:
            return _checked_rules(self._schedules.scheduler)
        except Exception:
            return ()

    def _plain(self, gm: fx.GraphModule, why: str) -> PlainRunner:
        self.stats.graphs += 1
        self.stats.graph_breaks += _torch.is_part(gm)
        self.stats.plain_graphs += 1
        self.stats.plain_reasons.append(why)
        return PlainRunner(self, gm, why)

    def _clash(self, gm: fx.GraphModule, strange: str | None) -> bool:
        """Whether inputs of the call at hand share memory that the graph writes: its passes would not see that. What a
        graph with parts that can't be looked at writes is not known yet: it may be all."""
        nodes = gm.graph.find_nodes(op="placeholder")
        given = [_torch.graph_input(node)[2] for node in nodes]
        found = Sharing().find(given)
        if not found:
            return False
        returned = views_returned(gm)
        # If it overlaps itself, AOTAutograd makes its views anew by calls that have other gradients.
        windows = [o.one for o in found if o.one == o.other and given[o.one].requires_grad]
        if strange is not None or any(nodes[i] in returned for i in windows):
            return True
        graph = CapturedGraph(copied_graph(gm), self.parameters, self.batch_dims)
        try:
            return bool(Sharing(written_inputs(graph, probe(graph, ()))).find(given))
        except (Contradiction, Unschedulable):  # it runs plainly in any case
            return True

    def _held(self, made: Callable[..., Any], passes: Passes, gm: fx.GraphModule) -> Callable[..., Any]:
        """What AOTAutograd has made of the passes; what is to run backward holds the engine, since the compiled model
        may be gone by then. `gm`: what runs in forward-mode AD, which AOTAutograd's function knows nothing of."""
        engine_of = weakref.ref(self)
        without, notes = passes.without_gradients(), passes.may_leave_some_unused()
        plain = PlainRunner(self, gm, "forward-mode AD is on")

        def run(*args: Any) -> Any:
            if _torch.in_forward_mode():
                return plain(*args)
            results = made(*args)
            _torch.hold(engine_of(), results)
            if notes:
                _torch.note_unused(results)
            if any(results[i].requires_grad for i in without):
                results = [r.detach() if i in without else r for i, r in enumerate(results)]
            return results

        return run

    def _unless_shared(
        self, passes: Callable[..., Any], gm: fx.GraphModule, written: frozenset[int], strange: str | None
    ) -> Callable[..., Any]:
        """The passes; but for calls whose inputs share memory that the graph writes, the graph itself: plainly, if some
        of it can't be looked at."""
        runner = GraphRunner(self, CapturedGraph(copied_graph(gm), self.parameters, self.batch_dims))
        sharing = Sharing(written)

        def run(*args: Any) -> Any:
            if not sharing.find(list(args)):
                return passes(*args)
            if strange is not None and runner.plain is None:
                runner.run_plainly(f"it has {strange}, and inputs share memory that it writes")
            return runner(*args)

        return run

    def _runner(self, graph: CapturedGraph) -> GraphRunner:
        self.stats.graphs += 1
        self.stats.graph_breaks += graph.partial
        return GraphRunner(self, graph)

    # From arguments to a runnable plan

    def situation(self, runner: GraphRunner, args: Sequence[Any]) -> Situation:
        sizes, facts = runner.sizes(args), self.facts()
        schedules = self._schedules
        if schedules.chooses:
            schedules = self._chosen(runner, sizes, args, facts)
        return Situation(schedules, sizes, facts)

    def _situation_in_child(self, runner: GraphRunner, args: Sequence[Any]) -> Situation:
        if runner.graph.device.type == "cuda":
            raise DynaFlowError(
                f"{self.name} runs on CUDA, which can't be used in a process that was forked after its first use",
                advice='start the process by "spawn": torch.multiprocessing.set_start_method("spawn")',
            )
        return Engine.situation(self, runner, args)

    def find(self, runner: GraphRunner, situation: Situation, args: Sequence[Any]) -> Lowered | None:
        """The plan for these arguments; None when the graph can't be scheduled at all."""
        schedules, sizes, facts = situation
        found = self._stretched(schedules, runner, args, facts) if schedules.elastic else None
        if found is None:
            found = schedules.plans.get(self._key(schedules, runner, sizes, args, facts))
        if found is not None:
            self.stats.replays += 1
            return found
        with self.lock:
            return self.make(schedules, runner, sizes, args, facts)

    def _stretched(
        self, schedules: Schedules, runner: GraphRunner, args: Sequence[Any], facts: Mapping[str, Any]
    ) -> Lowered | None:
        """A plan made for another batch, with the cuts of this one."""
        with self.lock:
            graph, spaces, values = self._graph(schedules, runner, args, facts)
            if graph is None:
                return None
            ctx = self._context(graph, spaces, values, facts)
            elastic = schedules.elastic.get((runner, spaces, _key_of(schedules.scheduler, ctx)))
            if elastic is None or elastic.parts > ctx.max_parts:
                return None
            return elastic.at(ctx.resized(elastic.plan), {**runner.graph.hints, **values})

    def padding(self, runner: GraphRunner, situation: Situation, args: Sequence[Any]) -> tuple[Padding, Batch] | None:
        """How the batch is to be padded; None if it stays as it is."""
        schedules, _, facts = situation
        with self.lock:
            graph, spaces, values = self._graph(schedules, runner, args, facts)
            if graph is None or not spaces:
                return None
            rows = values[next(iter(spaces[0]))]
            padded = _user(schedules.scheduler, "bucket", rows)
            if not validate.is_integer(padded) or not rows <= padded <= rows << 20:
                raise ScheduleError(
                    f"{type(schedules.scheduler).__name__}.bucket({rows}) returned {shown(padded)}",
                    advice="return a number of rows that is no smaller than the batch, nor a million times as large",
                )
            if padded == rows:
                return None
            if (runner, spaces) not in schedules.paddings:
                schedules.paddings[runner, spaces] = Padding(graph)
            return schedules.paddings[runner, spaces], Batch({**runner.graph.hints, **values}, rows, int(padded))

    def _chosen(
        self, runner: GraphRunner, sizes: tuple[int, ...], args: Sequence[Any], facts: Mapping[str, Any]
    ) -> Schedules:
        """The schedules of whoever decides in this situation."""
        schedules, handed = self._schedules, 0
        while schedules.chooses:
            if handed > CHOICES:
                raise ScheduleError(
                    f"{type(schedules.scheduler).__name__}.choose() never comes to an end: "
                    f"{CHOICES} schedulers in a row have handed the call to another one",
                    advice="return self, or a scheduler without a choose() of its own",
                )
            handed += 1
            key = self._choice(schedules, runner, sizes, args, facts)
            if key not in schedules.chosen:
                with self.lock:
                    self._choose(schedules, runner, sizes, args, facts)
                key = self._choice(schedules, runner, sizes, args, facts)
            if schedules.chosen[key] is schedules:
                break
            schedules = schedules.chosen[key]
        return schedules

    def marked(self, lowered: Lowered, row: bool = False) -> Lowered:
        """The same plan for a recording; with `row`, its calls one after the other."""
        if row in lowered.with_marks:  # the lock may be held for long, by a tuner that compiles
            return lowered.with_marks[row]
        with self.lock:
            return lowered.marked(row)

    def note(self, runner: GraphRunner, args: Sequence[Any]) -> Any:
        """What a scheduler that chose for this situation has to say about it."""
        schedules = self._schedules
        return schedules.notes.get(self._choice(schedules, runner, runner.sizes(args), args, self.facts()))

    def trials(self, runner: GraphRunner, args: Sequence[Any]) -> Trials:
        schedules, sizes, facts = self.situation(runner, args)
        return Trials(self, schedules, runner, sizes, args, facts)

    def _choose(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], args: Any, facts: Mapping[str, Any]
    ) -> None:
        graph, spaces, values = self._graph(schedules, runner, args, facts)
        chosen = schedules.scheduler
        if graph is not None:
            ctx = self._context(graph, spaces, values, facts)
            ctx.trials = Trials(self, schedules, runner, sizes, args, facts)
            chosen = checked_scheduler(_user(schedules.scheduler, "choose", ctx))
            self._note_facts(schedules, runner, sizes, ctx)
            if ctx.later is not None:
                self._decide_later(schedules, self._choice(schedules, runner, sizes, args, facts), ctx)
        _make_room(schedules.chosen, PLANS_KEPT)
        key = self._choice(schedules, runner, sizes, args, facts)
        schedules.notes[key] = ctx.note if graph is not None else None
        schedules.choose(key, chosen)

    def _decide_later(self, schedules: Schedules, key: Any, ctx: ScheduleContext) -> None:
        """In a thread of its own, on copies: callers go on using the arguments."""
        later, trials = ctx.later, ctx.trials
        assert later is not None and isinstance(trials, Trials)
        try:
            trials.args = copied(trials.args, keep=trials.owned)
        except NoRoom as e:
            ctx.note = str(e)
            return
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def decide() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                try:
                    chosen = checked_scheduler(later(ctx))
                except Exception as e:
                    ctx.note = f"tuning failed: {type(e).__name__}: {e}"
                else:
                    with self.lock:
                        schedules.choose(key, chosen)
                schedules.notes[key] = ctx.note
                trials.args = ()

        thread = threading.Thread(target=decide, name="dynaflow-tune", daemon=True)
        self.deciding.append(thread)
        thread.start()

    def _choice(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], args: Any, facts: Mapping[str, Any]
    ) -> Any:
        """Under what a choice is kept: the scheduler's own key, or the situation."""
        if schedules.has_key:
            return (runner, self._own_key(schedules, runner, sizes, args, facts))
        return self._situation(schedules, runner, sizes, facts)

    def _own_key(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], args: Any, facts: Mapping[str, Any]
    ) -> Any:
        """What the scheduler's `key` says. It is asked once for the same sizes and the same facts that it read."""
        keeps = "num_tokens" not in facts  # of which the context knows more than what was read
        names = schedules.key_facts.get((runner, sizes), ())
        place = (runner, sizes, tuple([fact_value(facts, name) for name in names]))
        if keeps and place in schedules.own_keys:
            return schedules.own_keys[place]
        with self.lock:
            graph, spaces, values = self._graph(schedules, runner, args, facts)
            if graph is None:
                return None
            ctx = self._context(graph, spaces, values, facts)
            own = _key_of(schedules.scheduler, ctx)
            if keeps:
                names = tuple(sorted({*names, *ctx.facts.read}))
                _make_room(schedules.own_keys, PLANS_KEPT)
                schedules.key_facts[runner, sizes] = names
                schedules.own_keys[runner, sizes, tuple(fact_value(facts, name) for name in names)] = own
            return own

    def _key(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], args: Any, facts: Mapping[str, Any]
    ) -> Any:
        if schedules.has_key:
            own = self._own_key(schedules, runner, sizes, args, facts)
            # Cuts fall between requests: whatever the scheduler thinks, they fit these requests only.
            return (runner, sizes, frozen(facts.get("num_tokens")), own)
        return self._situation(schedules, runner, sizes, facts)

    def _situation(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], facts: Mapping[str, Any]
    ) -> Any:
        """The sizes, and of the facts what was read in calls of these sizes."""
        names = schedules.facts_read.get((runner, sizes))
        if not names:
            return (runner, sizes)
        return (runner, sizes, tuple(fact_value(facts, name) for name in names))

    def make(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], args: Any, facts: Mapping[str, Any]
    ) -> Lowered | None:
        key = self._key(schedules, runner, sizes, args, facts)
        if key in schedules.plans:  # another thread made it meanwhile
            return schedules.plans[key]
        made = self.plan(schedules, runner, sizes, args, facts)
        if made is None:
            return None
        self._meetings.agree(made.plan, made.graph)
        start = time.perf_counter()
        values = {**runner.graph.hints, **made.values}
        lowered = self._elastic(schedules, runner, made, key[-1], values) if schedules.is_elastic else None
        if lowered is None:
            lowered = self.lowerer.lower(made.plan, made.graph, values, made.functions)
        stats = self.stats
        stats.lower_seconds += time.perf_counter() - start
        stats.plans += 1
        stats.operators_compiled, stats.operators_shared = self.operators.compiled, self.operators.shared
        _make_room(schedules.plans, PLANS_KEPT)  # ragged batches may be different every time
        schedules.plans[self._key(schedules, runner, sizes, args, facts)] = lowered
        return lowered

    def _elastic(
        self, schedules: Schedules, runner: GraphRunner, made: Planned, own: Any, values: dict[sympy.Symbol, int]
    ) -> Lowered | None:
        """A function that serves other sizes under the scheduler's key as well; None if there is none."""
        place = (runner, made.graph.spaces, own)
        if place not in schedules.patterns or place in schedules.elastic:
            return None
        known = (e for e in schedules.elastic.values() if e.carries_out(made.plan, made.graph, made.functions))
        elastic = next((e for e in known if e.at(made.plan, values)), None)  # decided the same under another key
        elastic = elastic or self.lowerer.elastic(made.plan, made.graph, values, made.functions)
        if elastic is None:
            return None
        _make_room(schedules.elastic, PLANS_KEPT)
        schedules.elastic[place] = elastic
        return elastic.at(made.plan, values)

    def plan(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], args: Any, facts: Mapping[str, Any]
    ) -> Planned | None:
        """The scheduler's plan for these arguments, checked; None when the graph can't be scheduled at all."""
        graph, spaces, values = self._graph(schedules, runner, args, facts)
        if graph is None:
            return None
        ctx = self._context(graph, spaces, values, facts)
        start = time.perf_counter()
        kept = loaded = own = None
        if schedules.has_key:
            own = self._key(schedules, runner, sizes, args, facts)[-1]
        pattern = schedules.patterns.get((runner, spaces, own)) if schedules.has_key else None
        if pattern is not None and len(pattern[0].micro_batches) <= ctx.max_parts:
            plan, functions = ctx.resized(pattern[0]), pattern[1]
        else:
            kept = KeptPlan(schedules.scheduler, graph, sizes, ctx, facts)  # now: schedule() may change the scheduler
            loaded = None if schedules.is_elastic else kept.load()  # which does not tell what else it would serve
            if loaded is not None:
                plan, functions = loaded
                self.stats.plans_loaded += 1
            else:
                plan, functions = self._schedule(schedules.scheduler, ctx, runner.graph.partial)
                if schedules.has_key and ctx.even_split is not None:
                    schedules.patterns[runner, spaces, own] = (plan, functions)
        checked_at = time.perf_counter()
        if self.check_plans:
            check(plan, graph, ctx.batch_size, ctx.facts.get("num_tokens") if len(plan.micro_batches) > 1 else None)
        self.stats.schedule_seconds += checked_at - start
        self.stats.check_seconds += time.perf_counter() - checked_at
        if kept is not None and loaded is None:
            self.stats.plans_stored += kept.keep(plan, functions)
        if not schedules.has_key:
            self._note_facts(schedules, runner, sizes, ctx)
        return Planned(plan=plan, graph=graph, functions=functions, values=values)

    def _note_facts(
        self, schedules: Schedules, runner: GraphRunner, sizes: tuple[int, ...], ctx: ScheduleContext
    ) -> None:
        if ctx.facts.read:
            known = schedules.facts_read.get((runner, sizes), ())
            schedules.facts_read[runner, sizes] = tuple(sorted({*known, *ctx.facts.read}))

    def _schedule(self, scheduler: OpSchedulerBase, ctx: ScheduleContext, part: bool) -> tuple[Plan, Mapping[str, Any]]:
        self.stats.scheduler_calls += 1
        try:
            result = _user(scheduler, "schedule", ctx)
        except SplitError as e:
            if ctx.can_split or not (part or ctx.phase == "backward"):
                raise
            # A part of a model that breaks the graph may well have no batch, and a backward pass nothing but gradients
            # of weights, as where all below the head is frozen: that is nobody's mistake.
            self.stats.plain_graphs += 1
            self.stats.plain_reasons.append(str(e))
            return ctx.whole(), {}
        if result is not None and not isinstance(result, Plan):
            raise ScheduleError(
                f"{type(scheduler).__name__}.schedule() returned {shown(result)}",
                advice="return nothing, ctx.sequential(), or a Plan",
            )
        if isinstance(result, Plan):
            return result, functions_of(result, {**registered(scheduler.functions), **ctx.functions})
        return ctx.finish(), ctx.functions

    def _context(
        self, graph: OpGraph, spaces: Spaces, values: Mapping[sympy.Symbol, int], facts: Mapping[str, Any]
    ) -> ScheduleContext:
        rows = values[next(iter(spaces[0]))] if spaces else 1
        return ScheduleContext(
            graph, batch_size=rows, has_batch=bool(spaces), device=graph.graph.device, facts=facts, sizes=values
        )

    def _graph(
        self, schedules: Schedules, runner: GraphRunner, args: Any, facts: Mapping[str, Any]
    ) -> tuple[OpGraph | None, Spaces, dict[sympy.Symbol, int]]:
        """The graph cut as the scheduler wants it, the symbols that stand for its batch, and their values."""
        if runner.plain:
            return None, (), {}
        spaces, values = runner.spaces(args, facts)
        key = (runner, spaces)
        if key not in schedules.graphs:
            start = time.perf_counter()
            if schedules.rules is None:
                schedules.rules = _checked_rules(schedules.scheduler)
            found = runner.probe(spaces)
            if found is None:
                self.stats.plain_graphs += 1
                self.stats.plain_reasons.append(runner.plain or "")
                return None, (), {}
            complete = not self.stats.graph_breaks and runner.graph.phase != "backward"
            cut = (spaces, schedules.rules, complete)
            if cut not in runner.partitions:  # of other schedulers, which cut the same way
                _make_room(runner.partitions, CUTS_KEPT)
                runner.partitions[cut] = partition(runner.graph, found, schedules.rules, complete=complete)
                self.stats.partitions += 1
            schedules.graphs[key] = runner.partitions[cut]
            self.stats.partition_seconds += time.perf_counter() - start
        graph = schedules.graphs[key]
        return graph, graph.spaces, values


def _make_room(kept: dict[Any, Any], most: int) -> None:
    """For one more: the oldest goes, if there are as many as may be kept."""
    if len(kept) >= most:
        kept.pop(next(iter(kept)))


def _user(scheduler: OpSchedulerBase, method: str, *args: Any) -> Any:
    """Calls a scheduler's method."""

    def call() -> Any:
        found = getattr(scheduler, method)(*args)
        return list(found) if method == "partition" and isinstance(found, Iterator) else found

    advice = f"mend {method}(), or the options that it was given"
    return _called(call, f"the scheduler {type(scheduler).__name__}", advice)


def _called(code: Callable[[], Any], name: str, advice: str) -> Any:
    """What the user's code returns; what it raises names the line."""
    try:
        return code()
    except DynaFlowError:
        raise
    except Exception as e:
        raise ScheduleError(f"{name} raised {type(e).__name__}: {e}", line=raised_at(e), advice=advice) from e


def _key_of(scheduler: OpSchedulerBase, ctx: ScheduleContext) -> Any:
    return hashable(_user(scheduler, "key", ctx), f"what {type(scheduler).__name__}.key() returned")


def _checked_rules(scheduler: OpSchedulerBase) -> tuple[Any, ...]:
    found = _user(scheduler, "partition")
    rules = tuple([found] if (listed := validate.members(found)) is None else listed)
    for rule in rules:
        if not isinstance(rule, (SplitModule, SplitFunc)):
            raise PartitionError(
                f"{type(scheduler).__name__}.partition() returned {shown(rule)}",
                advice="return a list of SplitModule and SplitFunc; an empty one, if there is nothing to cut",
            )
    return rules
