"""The torch functions that treat every record by itself, or do so along any axis but some. A function that is not named
here is not known to, and a model that calls it is taken record by record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SPACES = (torch, Tensor, F, torch._C._nn, torch.special, torch.linalg, torch.fft)


def functions(names: str) -> list[Callable[..., Any]]:
    """All functions and methods of torch by these names."""
    found = (getattr(space, name, None) for name in names.split() for space in SPACES)
    return [func for func in found if callable(func)]


def getters(names: str) -> list[Callable[..., Any]]:
    """What reading these attributes of a tensor calls."""
    return [getattr(Tensor, name).__get__ for name in names.split()]


def pure(func: Callable[..., Any]) -> bool:
    """Whether it is a function of torch that changes none of its arguments."""
    name = getattr(func, "__name__", "_")
    known = isinstance(func, BuiltinFunctionType) and any(getattr(space, name, None) == func for space in SPACES)
    return known and not name.endswith("_")


def in_place(names: str) -> str:
    """The same with an underscore, where torch has them."""
    return " ".join(f"{name}_" for name in names.split())


ARITHMETIC = """
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_not bitwise_or
bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp
exp2 expit expm1 fill floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot isclose
isfinite isinf isnan isneginf isposinf le ldexp lerp less less_equal lgamma log log10 log1p log2 logaddexp logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative
nextafter not_equal polar positive pow rad2deg reciprocal remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc
sinh sqrt square sub subtract tan tanh true_divide trunc where xlog1py xlogy zero copy
"""
ACTIVATIONS = """
alpha_dropout celu dropout elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logsigmoid mish
relu relu6 rrelu selu silu softplus softshrink softsign tanhshrink threshold feature_alpha_dropout
"""
CHANGED = ARITHMETIC + ACTIVATIONS
OPERATORS = """
__abs__ __add__ __and__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ __ne__ __neg__ __or__
__pos__ __pow__ __radd__ __rdiv__ __rfloordiv__ __rmod__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__
__xor__ __iadd__ __iand__ __idiv__ __ifloordiv__ __imod__ __imul__ __ior__ __ipow__ __isub__ __itruediv__ __ixor__
"""
CONVERSIONS = """
bfloat16 bool clone contiguous cpu cuda detach double float half int long short to type real imag resolve_conj
"""
LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like"
LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits huber_loss hinge_embedding_loss kl_div l1_loss
mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
"""
ELEMENTWISE = functions(
    " ".join(
        (ARITHMETIC, in_place(ARITHMETIC), ACTIVATIONS, in_place(ACTIVATIONS), OPERATORS, CONVERSIONS, LIKE, LOSSES)
    )
)
"""Each number of the result depends on the numbers at its place. (Losses with a reduction return no row per record.)"""

BATCH_FIRST = functions(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices avg_pool1d avg_pool2d
    avg_pool3d channel_shuffle conv_transpose1d conv_transpose2d conv_transpose3d cross_entropy dropout1d dropout2d
    dropout3d fold grid_sample interpolate local_response_norm lp_pool1d lp_pool2d max_pool1d max_pool2d max_pool3d
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d
    multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss pixel_shuffle pixel_unshuffle unfold
    upsample native_channel_shuffle conv1d conv2d conv3d group_norm
    """
)
"""Records lie along the first axis of every tensor with records."""

REQUIRED = object()
ALONG: dict[Callable[..., Any], tuple[int, Any]] = {}
"""Functions that join numbers along the axes that argument `dim`, at this place, names (with this default)."""


def _along(place: int, default: Any, names: str) -> None:
    ALONG.update(dict.fromkeys(functions(names), (place, default)))


_along(
    1, REQUIRED, """
    all any amax amin argmax argmin cummax cummin cumprod cumsum flip gather logcumsumexp logsumexp max mean median min
    nanmean nanmedian nansum narrow prod select softmax log_softmax softmin std sum var count_nonzero
    std_mean var_mean scatter scatter_add
    """,
)  # fmt: skip
_along(1, 0, "unbind")
_along(1, -1, "glu")
EMPTY = set(functions("empty empty_like new_empty"))
"""What they return holds whatever was in memory before."""
SPLITS = functions("chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split")
ALONG.update(dict.fromkeys(SPLITS, (2, 0)))
_along(2, -1, "fft ifft rfft irfft hfft ihfft diff")
_along(2, 1, "normalize cosine_similarity")
_along(2, REQUIRED, "take_along_dim roll norm vector_norm repeat_interleave kthvalue")
ALONG[Tensor.unfold] = (1, REQUIRED)
BATCH_FIRST.remove(Tensor.unfold)

LAST_TWO = functions("tril triu tril_ triu_ matrix_exp")
RESHAPES = functions(
    "flatten ravel reshape reshape_as squeeze squeeze_ unflatten unsqueeze unsqueeze_ view view_as unsafe_view"
)
MOVES = functions("adjoint moveaxis movedim permute swapaxes swapdims t transpose transpose_ t_") + getters("T mT H mH")
SPREADS = functions("broadcast_to expand expand_as repeat tile")
FACTORIES = functions("empty full ones rand randn zeros new_empty new_full new_ones new_zeros")
LENT = {
    **dict.fromkeys(functions("new_empty new_full new_ones new_zeros"), 0),
    **dict.fromkeys(functions("to type_as expand_as view_as reshape_as"), 1),
}
"""How many tensors such a function reads numbers of; others lend it a type or a shape."""
JOINS = functions("cat concat concatenate stack")
ALONE = [
    torch._C._set_grad_enabled, torch.meshgrid, torch.cartesian_prod,
    *functions("arange linspace logspace tensor scalar_tensor eye triu_indices tril_indices as_tensor asarray outer"),
]  # fmt: skip
"""They make constants, of numbers and constants only."""

IN_PLACE = {
    *functions(in_place(CHANGED)),
    Tensor.__setitem__, *functions(" ".join(n for n in OPERATORS.split() if n.startswith("__i") and n != "__invert__")),
    *functions("squeeze_ unsqueeze_ transpose_ t_ tril_ triu_"),
}  # fmt: skip
"""They change their first argument, and return it or nothing."""


def _sizes(entries: Iterable[tuple[str, range]]) -> dict[Callable[..., Any], range]:
    return {func: places for names, places in entries for func in functions(names)}


SIZES: dict[Callable[..., Any], range] = _sizes(
    [
        ("empty ones rand randn zeros", range(99)),
        ("full arange", range(1)),
        ("new_empty new_ones new_zeros view reshape expand repeat tile broadcast_to", range(1, 99)),
        ("new_full", range(1, 2)),
        ("unflatten", range(2, 3)),
    ]
)
"""Which arguments are sizes, and so may grow with the batch."""

METADATA = {
    *getters(
        "shape dtype device is_cuda is_cpu layout ndim requires_grad is_sparse is_quantized is_nested is_mps itemsize"
        " nbytes is_leaf is_meta is_mkldnn is_xpu"
    ),
    *functions(
        "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex is_signed get_device"
        " element_size __len__ is_same_size storage_offset is_conj is_neg is_inference result_type can_cast"
        " broadcast_shapes is_grad_enabled"
    ),
}
"""They tell sizes and types; what a model makes of these shows in the arguments of its other calls."""
