"""Rules for operators that compute: most are a line of labels, some a function of their arguments.

`RULES` has the form of `view_rules.RULES`; `signatures.parse_signature` explains the notation. An operator is listed
here if it works row by row for all its arguments. Operators in no table are left to `dtensor_rules`.
"""

from __future__ import annotations

import torch

from dynaflow.capture.batch_analysis.signatures import (
    MIXED,
    Call,
    Operand,
    Refusal,
    Signature,
    broadcast_labels,
    by_name,
    dim_labels,
    leaves,
    parse_signature,
    wrap_dims,
)
from dynaflow.capture.batch_analysis.view_rules import Rule


def pointwise(call: Call) -> Signature:
    """All tensors are broadcast together; each output has the resulting shape."""
    operands = [Operand(t, broadcast_labels(t.ndim), stretches=True) for t in call.inputs()]
    return Signature(operands, [broadcast_labels(out.ndim) for out in call.outs])


def _along(name: str) -> Rule:
    """An operator on `self` that mixes the dims in the argument `name` and keeps all dims."""

    def rule(call: Call) -> Signature:
        tensor = call["self"]
        labels = dim_labels(tensor.ndim, wrap_dims(call[name], tensor.ndim))
        return Signature([Operand(tensor, labels)], [labels])

    return rule


def _reduce(call: Call) -> Signature:
    """A reduction of `self` over `dim` (by default all dims)."""
    tensor, dim = call["self"], call.bound.get("dim")
    gone = wrap_dims(() if dim is None else dim, tensor.ndim) or set(range(tensor.ndim))
    labels = dim_labels(tensor.ndim, gone)
    left = labels if call.bound.get("keepdim") else tuple(label for label in labels if label is not MIXED)
    return Signature([Operand(tensor, labels)], [left])


def _normalize(call: Call) -> Signature:
    """Layer and RMS norm: trailing dims are normalized, statistics keep the leading dims."""
    tensor = call["input"]
    labels = dim_labels(tensor.ndim, range(tensor.ndim - len(call["normalized_shape"]), tensor.ndim))
    return Signature([Operand(tensor, labels)], [labels])


def _batch_norm(call: Call) -> Signature | Refusal:
    tensor = call["input"]
    by_channel = call.dim_of(tensor) == 1  # as in instance norm, which merges rows and channels
    if call.bound.get("training") and not by_channel:
        return call.refuse("in training takes its statistics over all rows")
    labels = dim_labels(tensor.ndim)
    given = [call.bound.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    operands = [Operand(tensor, labels), *(Operand(t, (1,)) for t in given if isinstance(t, torch.Tensor))]
    statistics = [(1,) if by_channel and out.numel() else None for out in call.outs[1:]]
    return Signature(operands, [labels, *statistics])


def _convolution(call: Call) -> Signature:
    # An input without batch dim starts with the channels, which are summed over.
    batched = next(leaves(list(call.bound.values()))).ndim == call["weight"].ndim
    return parse_signature(call, "n~,-,-->n~" if batched else "N~,-,-->N~")


def _loss(text: str | None = None) -> Rule:
    """A loss without reduction; `text` is the signature if it is not pointwise."""

    def rule(call: Call) -> Signature | Refusal:
        if call["reduction"] != 0:
            return call.refuse("sums up all rows; use reduction='none'")
        return parse_signature(call, text) if text else pointwise(call)

    return rule


def _searchsorted(call: Call) -> Signature:
    if call["sorted_sequence"].ndim == 1:
        return parse_signature(call, "-,*,-->*")
    # One sequence for each leading index, in which its own values are searched.
    given = [call[name] for name in ("sorted_sequence", "self", "sorter")]
    operands = [Operand(t, dim_labels(t.ndim, {t.ndim - 1})) for t in given if isinstance(t, torch.Tensor)]
    return Signature(operands, [dim_labels(out.ndim, {out.ndim - 1}) for out in call.outs])


def _layer(call: Call) -> Signature:
    """A whole layer, with the batch first. A mask of type 0 is shared by all rows."""
    given = [call.bound.get(name) for name in ("src", "query", "key", "value")]
    if call.bound.get("mask_type"):
        given.append(call.bound.get("mask"))
    operands = [Operand(t, (0, *(MIXED,) * (t.ndim - 1))) for t in given if isinstance(t, torch.Tensor)]
    return Signature(operands, [(0, *(MIXED,) * (out.ndim - 1)) for out in call.outs])


def _trilinear(call: Call) -> Signature:
    """Three tensors, each with new dims at `expand`, are multiplied and summed over `sumdim`."""
    given = [(call[f"i{n}"], set(call[f"expand{n}"])) for n in (1, 2, 3)]
    ndim, summed = given[0][0].ndim + len(given[0][1]), set(call["sumdim"])
    labels = dim_labels(ndim, summed)
    operands = [Operand(t, tuple(labels[d] for d in range(ndim) if d not in new), stretches=True) for t, new in given]
    return Signature(operands, [tuple(labels[d] for d in range(ndim) if d not in summed)])


def _never(why: str) -> Rule:
    return lambda call: call.refuse(why)


def _signature(text: str) -> Rule:
    return lambda call: parse_signature(call, text)


def _attention(text: str) -> Rule:
    """Dropout draws by position in the batch, and the backward pass draws again."""

    def rule(call: Call) -> Signature | Refusal:
        if call.bound.get("dropout_p"):
            return call.refuse("draws its dropout by position in the whole batch")
        wanted = call.bound.get("grad_input_mask", (False,))[-1] or call.bound.get("bias_requires_grad")
        return call.refuse("sums the gradient of its bias over all rows") if wanted else parse_signature(call, text)

    return rule


_ATTENTION: dict[str, str] = {
    # queries, keys and values as (batch, head, position, feature)
    "_scaled_dot_product_flash_attention": "bhQD,bhKD,bhKE->bhQE,bh~,-",
    """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
       _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
       _scaled_dot_product_attention_math scaled_dot_product_attention""": "bhQD,bhKD,bhKE,?bhQK->bhQE,bh~,-",
    "_scaled_dot_product_flash_attention_backward": "bhQE,bhQD,bhKD,bhKE,bhQE,bh~->bhQD,bhKD,bhKE",
    "_scaled_dot_product_flash_attention_for_cpu_backward":
        "bhQE,bhQD,bhKD,bhKE,bhQE,bh~,?bhQK->bhQD,bhKD,bhKE",
    "_scaled_dot_product_efficient_attention_backward":
        "bhQE,bhQD,bhKD,bhKE,?bhQK,bhQE,bh~->bhQD,bhKD,bhKE,-",
    "_scaled_dot_product_cudnn_attention_backward":
        "bhQE,bhQD,bhKD,bhKE,bhQE,bh~,-,-,?bhQK->bhQD,bhKD,bhKE",
    "_scaled_dot_product_fused_attention_overrideable_backward":
        "bhQE,bhQD,bhKD,bhKE,?bhQK,bhQE,bh~->bhQD,bhKD,bhKE,-",
    # and as (batch, position, head, feature)
    "_flash_attention_forward": "bQhD,bKhD,bKhE->bQhE,bh~,-",
    "_efficient_attention_forward": "bQhD,bKhD,bKhE,?bhQK->bQhE,bh~,-",
}  # fmt: skip

_SIGNATURES: dict[str, str] = {
    # matmuls
    "mm _int_mm": "iJ,Jk->ik",
    "bmm": "biJ,bJk->bik",
    "addmm _addmm_activation": "?ik,iJ,Jk->ik",
    "baddbmm": "?bik,biJ,bJk->bik",
    "mv": "iJ,J->i",
    "addmv": "?i,iJ,J->i",
    "addr": "?ij,i,j->ij",
    "dot vdot": "I,I->",
    "linear mkldnn_linear": "*D,oD,o->*o",
    "_scaled_mm": "iJ,Jk,?iS,?Sk,k,-->ik",
    "_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm": "iJ,-,-->iK",
    "_cdist_forward _euclidean_dist": "*pM,*rM->*pr",
    # images
    "cudnn_convolution_add_relu": "n~,-,n~,-->n~",
    "native_group_norm": "n~,-,-->n~",
    "pixel_shuffle pixel_unshuffle": "*CHW->*CHW",
    "native_channel_shuffle channel_shuffle affine_grid_generator": "n~->n~",
    "grid_sampler_2d grid_sampler_3d cudnn_grid_sampler": "nc~,n~->nc~",
    "im2col": "*CHW->*CL",
    "col2im": "*CL->*CHW",
    "max_unpool2d": "*HW,*HW->*HW",
    "max_unpool3d": "*DHW,*DHW->*DHW",
    """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
       _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
       upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
       _upsample_lanczos2d_aa""": "nc~->nc~",
    """avg_pool1d max_pool1d max_pool1d_with_indices adaptive_avg_pool1d adaptive_max_pool1d
       reflection_pad1d replication_pad1d""": "*L->*L",
    """avg_pool2d max_pool2d max_pool2d_with_indices mkldnn_max_pool2d _adaptive_avg_pool2d
       adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d adaptive_max_pool2d reflection_pad2d
       replication_pad2d tril triu""": "*HW->*HW",
    """avg_pool3d max_pool3d max_pool3d_with_indices mkldnn_max_pool3d _adaptive_avg_pool3d
       adaptive_avg_pool3d adaptive_max_pool3d reflection_pad3d replication_pad3d""": "*DHW->*DHW",
    # look-ups
    "embedding": "-,*->*D",
    "take": "-,*->*",
    "bucketize isin": "*,-->*",
    # others
    "view_as_real": "*->*X",
    "view_as_complex": "*X->*",
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell": "n~,n~,n~,-,-->n~",
    # stacks of matrices
    "linalg_inv_ex linalg_cholesky_ex": "*IJ->*IJ,*",
    "linalg_solve_triangular": "*IJ,*KL->*KL",
    "linalg_qr": "*IJ->*IJ",
    "_linalg_det": "*IJ->*,*IJ,*P",
    "_linalg_slogdet": "*IJ->*,*,*IJ,*P",
    "_linalg_eigh": "*IJ->*K,*IJ",
    "_linalg_svd": "*IJ->*IJ,*K,*IJ",
}

_ALONG: dict[str, str] = {
    "dim": """_softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp _logcumsumexp
        sort argsort topk glu _fft_r2c _fft_c2c _fft_c2r""",
    "dims": "flip",
}

_REDUCE = """sum nansum mean prod amax amin aminmax _aminmax max min any all argmax argmin std var std_mean
    var_mean logsumexp norm linalg_vector_norm median nanmedian mode kthvalue count_nonzero"""

# Pointwise, though not all of their overloads have the tag.
_POINTWISE = """alias detach clone _to_copy to copy lift lift_fresh lift_fresh_copy contiguous _lazy_clone
    _conj _neg_view fill zero zeros_like ones_like full_like empty_like masked_fill where gelu hardswish mish
    log_sigmoid_forward _prelu_kernel floor_divide rsub polar complex _add_relu abs native_dropout
    fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams"""

_REFUSED: dict[str, str] = {
    """nonzero nonzero_static masked_select _unique _unique2 unique_dim
       unique_consecutive unique_dim_consecutive
       repeat_interleave""": "makes a result whose size depends on the data of all rows",
    "bincount histc histogram": "counts over all rows",
    "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2": "groups its rows by offsets into the whole batch",
    "masked_scatter put": "takes its values in the order of all rows",
    "as_strided as_strided_scatter": "addresses memory directly, wherever the rows lie",
}

RULES: dict[str, Rule] = by_name(
    {
        **{names: _signature(text) for names, text in _SIGNATURES.items()},
        **{names: _attention(text) for names, text in _ATTENTION.items()},
        **{names: _along(dim) for dim, names in _ALONG.items()},
        **{names: _never(why) for names, why in _REFUSED.items()},
        _REDUCE: _reduce,
        _POINTWISE: pointwise,
        "native_layer_norm _fused_rms_norm rms_norm layer_norm": _normalize,
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
           _batch_norm_no_update cudnn_batch_norm miopen_batch_norm""": _batch_norm,
        """convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_relu
           cudnn_convolution_transpose mkldnn_convolution _conv_depthwise2d conv_depthwise3d
           _slow_conv2d_forward slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d
           slow_conv_transpose2d slow_conv_transpose3d""": _convolution,
        """mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
           binary_cross_entropy_with_logits""": _loss(),
        "nll_loss_forward nll_loss2d_forward": _loss("n~,n~,-->n~,-"),
        "searchsorted": _searchsorted,
        "_trilinear": _trilinear,
        "_native_multi_head_attention _transformer_encoder_layer_fwd": _layer,
    }
)
