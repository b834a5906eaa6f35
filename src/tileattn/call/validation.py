"""Checks of the arguments of the public functions. Each error names what was given and what is accepted."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from .fp8 import FP8
from .likely_layout import MOST_HEADS, warn_of_bhsd
from .scalars import as_flag

Function = TypeVar("Function", bound=Callable[..., Any])
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, FP8)

# Argument names of other libraries, and what to pass to tileattn instead.
_ELSEWHERE = {
    "is_causal": "causal=, aligned bottom-right (is_causal=, aligned top-left, belongs to "
    "tileattn.scaled_dot_product_attention)",
    "attn_mask": "mask= (for a tensor, tileattn.scaled_dot_product_attention takes attn_mask=)",
    "block_mask": "mask=, the function that create_block_mask was given",
    "softmax_scale": "scale=",
    "softcap": "score_mod=tileattn.SoftCap(cap)",
    "window_size": "mask=tileattn.SlidingWindow(left, right)",
    "alibi_slopes": "score_mod=tileattn.ALiBi(slopes)",
    "block_table": "page_table=",
    "cache_seqlens": "seqlens_k",
    "num_splits": "splits=",
    "enable_gqa": "nothing: k and v may always have fewer heads than q",
}
_OF_CACHES = ("block_table", "cache_seqlens", "num_splits")


def without_unknown(function: Function) -> Function:
    """Removes ``**unknown``, which only :func:`refuse_unknown` reads, from the signature that tools show."""
    signature = inspect.signature(function)
    shown = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def refuse_unknown(function: Callable[..., Any], unknown: Iterable[str]) -> NoReturn:
    """Raises TypeError for the first unknown keyword argument, and suggests the right one if it is known."""
    name = next(iter(unknown))
    parameters = inspect.signature(function).parameters.values()
    own = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    near = difflib.get_close_matches(name, own, n=1)
    instead = _ELSEWHERE.get(name) or (f"{near[0]}=" if near else None)
    if name in _OF_CACHES and "page_table" not in own:
        instead = f"{instead} of tileattn.decode"
    advice = f"use {instead}" if instead else f"keyword arguments are {', '.join(own)}"
    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {advice}")


def check_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    dropout_p: float,
    layout: str,
    scale: float | None,
) -> None:
    """Raises TypeError or ValueError unless q, k, v (in `layout`) and the options make one attention call."""
    if layout != "bshd" and layout != "bhsd":
        raise ValueError(f'layout must be "bshd" or "bhsd", got {layout!r}')
    dimensions = (
        "4 dimensions, (batch, seqlen, heads, head_dim) for layout='bshd', (batch, heads, seqlen, head_dim) for 'bhsd'"
    )
    _check_tensors(q, k, v, 4, dimensions)
    _check_shapes(q, k, v, layout)
    _check_options(q, q.shape[2 if layout == "bshd" else 1], sink, dropout_p, scale)


def check_packed_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> None:
    """The same for packed sequences: q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim)."""
    _check_tensors(q, k, v, 3, "3 dimensions, (total, heads, head_dim)")
    if q.dtype == FP8:
        raise TypeError("q must be float16, bfloat16, float32 or float64: packed sequences are not taken in fp8")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"k and v must have one total and one number of heads, got {k.shape[0]} and {k.shape[1]} in k, "
            f"{v.shape[0]} and {v.shape[1]} in v"
        )
    check_heads(q.shape[1:], k.shape[1:], v.shape[2])
    _check_options(q, q.shape[1], sink, dropout_p, scale)


def check_flags(**flags: Any) -> tuple[Any, ...]:
    """The flags as bools, in order. Raises TypeError if one is not a bool (:func:`tileattn.call.scalars.as_flag`)."""
    return tuple([as_flag(name, value) for name, value in flags.items()])


def _check_tensors(q: Any, k: Any, v: Any, ndim: int, dimensions: str) -> None:
    """The checks of tensors that do not depend on the layout."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor, ndim, dimensions)
    if q.dtype == torch.float8_e5m2:
        raise TypeError(
            "q must not be torch.float8_e5m2, whose 2 bits of mantissa are for gradients; use torch.float8_e4m3fn"
        )
    if q.dtype not in _DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32, float64 or float8_e4m3fn, got {q.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")


def check_dense(name: str, tensor: Any, ndim: int, dimensions: str) -> None:
    """Raises TypeError or ValueError unless it is a dense tensor of `ndim` dimensions, the last one contiguous."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one; tileattn.varlen_attention takes its parts, "
            f"{name}.values() and {name}.offsets().int() as cu_seqlens"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {dimensions}, got shape {tuple(tensor.shape)}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension, got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; use {name}.contiguous()"
        )


def check_int32(
    name: str,
    x: Any,
    sizes: Mapping[str, int | None],
    device: torch.device,
    *,
    owner: str = "q",
    contiguous: bool = True,
) -> None:
    """Raises TypeError or ValueError unless it is an int32 tensor of these sizes, on the device of the owner.

    Args:
        name: the argument's name.
        x: the argument.
        sizes: the dimensions, by name; None for one of any size.
        device: where it must be.
        owner: whose device that is.
        contiguous: whether it must be contiguous.
    """
    comma = "," * (len(sizes) == 1)
    shape = f"({', '.join(sizes)}{comma})"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be an int32 tensor {shape}, got {type(x).__name__}")
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}; use {name}.int()")
    if x.ndim != len(sizes) or any(size not in (None, given) for size, given in zip(sizes.values(), x.shape)):
        if set(sizes.values()) != {None}:
            known = (str(dim if size is None else size) for dim, size in sizes.items())
            shape += f" = ({', '.join(known)}{comma})"
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {owner}'s device {device}, got {x.device}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}; use {name}.contiguous()")


def _check_options(q: torch.Tensor, heads: int, sink: Any, dropout_p: Any, scale: Any) -> None:
    if sink is not None:
        check_sink(sink, q, heads)
    _check_dropout(dropout_p)
    if scale is not None:
        check_scale(scale)


def _check_dropout(p: Any) -> None:
    if not isinstance(p, (int, float, torch.SymFloat)) or isinstance(p, bool):
        raise TypeError(f"dropout_p must be a probability, a number from 0 to 1, got {p!r}")
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_p must be a probability, a number from 0 to 1, got {p!r}")


def check_scale(scale: Any) -> None:
    if not isinstance(scale, (int, float, torch.SymFloat)) or isinstance(scale, bool):
        raise TypeError(f"scale must be a finite number or None, got {scale!r}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    batch, _, heads, head_dim = q.shape
    kv_batch, seqlen_k, kv_heads, head_dim_k = k.shape
    if kv_batch != batch or v.shape[0] != batch:
        raise ValueError(f"q, k and v must have one batch size, got {batch}, {kv_batch} and {v.shape[0]}")
    if v.shape[1] != seqlen_k or v.shape[2] != kv_heads:
        raise ValueError(
            f"k and v must have one seqlen and one number of heads, got {seqlen_k} and {kv_heads} in k, "
            f"{v.shape[1]} and {v.shape[2]} in v (layout={layout!r})"
        )
    check_heads((heads, head_dim), (kv_heads, head_dim_k), v.shape[3], f" (layout={layout!r})")
    if kv_heads > MOST_HEADS and layout == "bshd":
        warn_of_bhsd(q, k)


def check_heads(of_q: Sequence[int], of_k: Sequence[int], head_dim_v: int, where: str = "") -> None:
    """Checks (heads, head_dim) of q and of k, and head_dim_v."""
    (heads, head_dim), (kv_heads, head_dim_k) = of_q, of_k
    if head_dim_k != head_dim:
        raise ValueError(f"q and k must have one head_dim, got {head_dim} and {head_dim_k}")
    if head_dim == 0 or head_dim_v == 0:
        raise ValueError(f"head dims must be at least 1, got {head_dim} for q and k, {head_dim_v} for v")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"the heads of q must be a multiple of the heads of k and v, got {heads} and {kv_heads}{where}"
        )


def check_sink(sink: Any, q: torch.Tensor, heads: int) -> None:
    if not isinstance(sink, torch.Tensor) or not sink.dtype.is_floating_point:
        raise TypeError(f"sink must be a floating-point tensor, got {getattr(sink, 'dtype', type(sink).__name__)}")
    if tuple(sink.shape) != (heads,):
        raise ValueError(f"sink must have shape (heads,) = ({heads},), got {tuple(sink.shape)}")
    if sink.device != q.device:
        raise ValueError(f"sink must be on q's device {q.device}, got {sink.device}")


def check_descales(descales: Sequence[Any], q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises TypeError or ValueError if a descale of q, k or v does not fit q and k (bshd). None means not given."""
    shape = (k.shape[0], k.shape[2])
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales):
        if descale is None:
            continue
        if q.dtype != FP8:
            raise TypeError(f"{name} is for float8_e4m3fn inputs only, got q, k and v in {q.dtype}")
        if not isinstance(descale, torch.Tensor) or descale.dtype != torch.float32:
            got = getattr(descale, "dtype", type(descale).__name__)
            raise TypeError(f"{name} must be a float32 tensor or None, got {got}")
        if not _broadcasts(descale.shape, shape):
            raise ValueError(
                f"{name} must have shape (batch, kv_heads) = {shape}, or one that broadcasts to it, got "
                f"{tuple(descale.shape)}"
            )
        if descale.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {descale.device}")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(mine in (1, size) for mine, size in zip(reversed(shape), reversed(to)))
