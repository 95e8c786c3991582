"""Training steps in micro-batches, with the loss and the gradients of the whole batch.

Each micro-batch is a call of the compiled model and a backward(): each pass has its plans, and autograd accumulates
gradients in place. The forward pass of a micro-batch is issued before the backward pass of the previous one. On CUDA
each one in flight has its own stream, and a compiled model with its own lanes, events and memory, because autograd runs
the backward pass on the stream of the forward pass. So the activations of a micro-batch are allocated, used and freed
on one stream; two micro-batches share only gradients, and backward passes wait for each other, in order.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from dynaflow import _torch
from dynaflow.api import compile
from dynaflow.capture.captured_graph import BatchDims, is_named
from dynaflow.core import validate
from dynaflow.errors import SplitError, shown
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.split import parts_of, split_rows

IGNORED = -100
"""The label that torch's losses ignore."""
BATCH_NORMS = (nn.functional.batch_norm, torch.batch_norm)


class TrainStep:
    """Computes `model(**inputs).loss.backward()` in micro-batches; called with the inputs, returns the loss.

    model: returns the loss, or an object with `.loss` or ["loss"].
    scheduler, options: as in `compile`. A micro-batch is the batch that the scheduler sees.
    micro_batches: how many, of about equal size; or their sizes.
    in_flight: the most micro-batches whose activations are in memory at once.
    reduction: whether the loss is a mean over the batch or a sum.
    weight: for a mean, the number of items that it is taken over, given the inputs of some rows. By default the number
        of `labels` that are not -100 (without the first of each row where transformers shifts them), if there is such
        an input; otherwise the number of rows.
    batch_dims: which inputs carry the batch, and on which dim; by default all tensors, on dim 0.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        scheduler: OpSchedulerBase | str | None = None,
        *,
        micro_batches: int | Sequence[int] = 2,
        in_flight: int = 2,
        reduction: Literal["mean", "sum"] = "mean",
        weight: Callable[[Mapping[str, Any]], Any] | None = None,
        batch_dims: BatchDims | None = None,
        **options: Any,
    ) -> None:
        advice = 'at least one micro-batch, one of them in flight, and a reduction that is "mean" or "sum"'
        in_flight = validate.integer(in_flight, "in_flight", advice, least=1, most=1024, error=SplitError)
        micro_batches = parts_of(micro_batches, "TrainStep.micro_batches")
        if not isinstance(reduction, str) or reduction not in ("mean", "sum"):
            raise validate.invalid("reduction", reduction, advice, SplitError)
        if weight is not None:
            how = "pass a function of the inputs that returns a number"
            validate.function(weight, "weight", how, SplitError)
        if options.get("optimizer") is not None:
            raise SplitError(
                "TrainStep(optimizer=...) would make a step for each micro-batch",
                advice="call optimizer.step() when the step is done; compile(..., optimizer=...) takes whole batches",
            )
        if not callable(model) or isinstance(model, type):
            raise SplitError(
                f"{shown(model)} is not a model", advice="pass a module, or a function that returns the loss"
            )
        self.models = [compile(_to_loss(model), scheduler, batch_dims=batch_dims, **options) for _ in range(in_flight)]
        """One for each stream; on CPU all micro-batches go through the first."""
        self._micro_batches, self._batch_dims = micro_batches, batch_dims
        self._mean, self._weight, self._shifted = reduction == "mean", weight, _shifts_labels(model)
        self._signature = inspect.signature(self.models[0])
        for compiled in self.models:
            compiled._df_engine.refuse = _refuse_batch_norm
        self._sides: dict[torch.device, list[torch.cuda.Stream]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the loss of the whole batch. Gradients are accumulated."""
        inputs = self._by_name(args, kwargs)
        parts = self._parts(inputs)
        streams = self._streams([v.device for v in inputs.values() if isinstance(v, Tensor)])
        flying: deque[tuple[Tensor, float, Any]] = deque()
        losses, done = [], None
        try:
            for i, (part, weight) in enumerate(parts):
                if len(flying) == len(self.models):
                    done = _backward(*flying.popleft(), done)
                which = i % len(streams)
                with torch.cuda.stream(streams[which]):
                    flying.append((_checked(self.models[which](**part)), weight, streams[which]))
                    losses.append(flying[-1][0].detach() * weight)
            while flying:
                done = _backward(*flying.popleft(), done)
        finally:
            for side in streams[1:]:
                streams[0].wait_stream(side)
        if done is not None:
            for loss in losses:
                loss.record_stream(streams[0])
        return torch.stack(losses).sum(0)

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        inputs = dict(self._signature.bind(*args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                inputs.update(inputs.pop(parameter.name, {}))
        return inputs

    def _parts(self, inputs: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
        """Returns the inputs of each micro-batch, and the weight of its loss in the whole loss."""
        dims = dict(self._dims(inputs))
        sizes = {name: inputs[name].size(dim) for name, dim in dims.items()}
        if len(set(sizes.values())) != 1:
            raise SplitError(
                f"the inputs have no batch in common: {sizes}",
                advice='say which of them carry it, and on which dim: batch_dims={"x": 0}',
            )
        parts = []
        for rows in split_rows(self._micro_batches, next(iter(sizes.values()))):
            cut = {n: inputs[n].narrow(dim, rows.start, rows.stop - rows.start) for n, dim in dims.items()}
            parts.append(({**inputs, **cut}, self._items({**inputs, **cut}, rows.stop - rows.start)))
        total = sum(items for _, items in parts) if self._mean else 1.0
        # A micro-batch without items has no mean (0 / 0) and no weight; if none has items, neither has the batch.
        return [(part, items / total) for part, items in parts if items] or [(part, 1.0) for part, _ in parts]

    def _dims(self, inputs: dict[str, Any]) -> Iterator[tuple[str, int]]:
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                if any(isinstance(leaf, Tensor) for leaf in _torch.tree_leaves(value)):
                    raise SplitError(f"{name!r} has tensors inside", advice="give each as an input of its own")
            elif self._batch_dims is None:
                yield from [(name, 0)] if value.dim() else []
            else:
                found = [dim for wanted, dim in self._batch_dims.items() if is_named(name, wanted)]
                yield from [(name, found[0])] if found and found[0] is not None else []

    def _items(self, part: Mapping[str, Any], rows: int) -> float:
        if not self._mean:
            return 1.0
        if self._weight is not None:
            return float(self._weight(part))
        labels = part.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return float(rows)
        return float((labels[..., 1:] if self._shifted else labels).ne(IGNORED).sum())

    def _streams(self, devices: list[torch.device]) -> list[Any]:
        """Returns a stream for each micro-batch in flight, the caller's first; None on CPU."""
        device = next((device for device in devices if device.type == "cuda"), None)
        if device is None:
            return [None]
        if device not in self._sides:
            self._sides[device] = [torch.cuda.Stream(device) for _ in self.models[1:]]
        main = torch.cuda.current_stream(device)
        for side in self._sides[device]:
            side.wait_stream(main)
        return [main, *self._sides[device]]


def _backward(loss: Tensor, weight: float, stream: Any, last: Any) -> torch.cuda.Event | None:
    """Runs after the `last` backward pass, which wrote the same gradients. Returns an event at its end."""
    with torch.cuda.stream(stream):
        if last is not None:
            last.wait()
        loss.backward(torch.full_like(loss, weight))
        return None if stream is None else stream.record_event()


def _to_loss(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the model with its loss as the only result: for others autograd would make gradients of zeros."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        return result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)

    loss.__name__ = getattr(model, "__name__", type(model).__name__)
    with contextlib.suppress(TypeError, ValueError):  # builtins have none
        own = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        loss.__signature__ = own  # type: ignore[attr-defined]
    return loss


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise SplitError(
            f"the model's loss is not a scalar but {what}",
            advice="pass a function that returns the loss: lambda x, y: cross_entropy(model(x), y)",
        )
    return loss


def _refuse_batch_norm(gm: fx.GraphModule) -> None:
    """Raises if the graph calls batch norm: which modules a function uses is not known before."""
    for part in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in part.graph.nodes:
            own = node.target in BATCH_NORMS and (node.kwargs.get("training") or True in node.args[5:6])
            if own or node.target is torch.batch_norm_stats:  # that of SyncBatchNorm
                raise SplitError(
                    "batch norm in training mode takes its statistics from the whole batch",
                    advice="call eval() on it; or use compile, under which it runs once for all micro-batches",
                )


def _shifts_labels(model: Any) -> bool:
    """Whether the model is one of transformers' causal language models: the first label of each row doesn't count."""
    name = getattr(getattr(model, "loss_function", None), "__name__", "")
    return name == "ForCausalLMLoss" and not getattr(model.config, "is_encoder_decoder", False)
