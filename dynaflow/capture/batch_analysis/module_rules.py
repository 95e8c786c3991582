"""Row rules for our operators in `_torch/ops`, which replace modules of torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dynaflow._torch.ops.recurrent import RNNS
from dynaflow.capture.batch_analysis.signatures import Call, Labels, Operand, Refusal, Signature

_STEPS: Labels = (None, "rows", None)


def _rnn_rule(call: Call) -> Signature | Refusal:
    if call.bound.get("batch_sizes") is not None:
        return call.refuse("takes packed sequences, which concatenate the rows of all steps")
    given = [*call.bound.get("gradients", ()), call["input"], *call["hidden"]]
    wanted = call.bound.get("wanted", ())[1 + len(call["hidden"]) :]
    if any(wanted):
        return call.refuse("sums the gradients of its weights over all rows")
    outs = [_STEPS if out.ndim == 3 else None for out in call.outs]
    return Signature([Operand(t, _STEPS) for t in given], [*outs])


def _bag_rule(call: Call) -> Signature | Refusal:
    if call.bound.get("wanted", (False,))[0]:
        return call.refuse("sums the gradient of its weight over all rows")
    given = (call.bound.get(name) for name in ("gradient", "ids", "scales"))
    rows: Labels = ("rows", None)
    return Signature([Operand(t, rows) for t in given if isinstance(t, Tensor)], [rows])

RULES: dict[str, Callable[[Call], Signature | Refusal]] = {
    **dict.fromkeys((*RNNS, "rnn_backward"), _rnn_rule),
    **dict.fromkeys(("embedding_bag", "embedding_bag_backward"), _bag_rule),
}
"""By name of the operator."""
