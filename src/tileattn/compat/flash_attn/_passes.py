"""flash-attn's forward and backward pass as separate functions, without autograd.

Code that computes attention in parts calls them: a ring over several devices runs the forward pass for each part of the
keys, merges the parts by their lse, and runs the backward pass for each part with the merged out and lse. P = exp(S -
lse) and delta = rowsum(dout * out) are then those of the whole, so that the parts' gradients add up to the whole's.
Source: Liu et al. 2023, "Ring attention with blockwise transformers" (arXiv 2310.01889); the signatures are flash-attn
2.8's, whose functions with more than ten arguments these are.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...call.argument_names import renamed
from ...call.dropout import Dropout
from ...call.facts import Packed
from ...call.fp8 import accumulator
from ...call.head_dims import pad
from ...call.inputs import Inputs
from ...call.sequences import check_metadata
from ...call.validation import check_arguments, check_flags, check_packed_arguments
from ...runtime import operators as ops
from ...variant.key import encode
from ...variant.validation import check_operand_devices, check_variant
from ._attend import (
    Options,
    attend_pages,
    check_inputs,
    compute,
    last_contiguous,
    probabilities,
    without_autocast,
)
from ._probabilities import next_seed

_NAMES = {"scale": "softmax_scale"}  # an argument of `attention`, and flash-attn's name of it


def pass_options(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size_left: Any,
    window_size_right: Any,
    softcap: Any,
    alibi_slopes: Tensor | None,
    deterministic: Any = False,
) -> Options:
    """The checked options of a pass. Raises TypeError or ValueError for one that is wrong."""
    for name, size in (("window_size_left", window_size_left), ("window_size_right", window_size_right)):
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
            raise TypeError(f"{name} must be an int, -1 for no bound, got {size!r}")
    causal, deterministic = check_flags(causal=causal, deterministic=deterministic)
    window = (window_size_left, window_size_right)
    given = Options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, True)
    return given.with_numbers()


# --- The forward pass ---


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_softmax: Any, packed: Packed | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, softmax_lse, S_dmask and rng_state; S_dmask is empty without return_softmax.

    rng_state is int64 (2,): the seed of the dropout and 0, or zeros without dropout.
    """
    check_inputs(q, k, v, packed)
    (return_softmax,) = check_flags(return_softmax=return_softmax)
    if return_softmax and not options.dropout_p:
        raise ValueError("return_softmax must be False without dropout, as in flash-attn, got True and dropout_p=0")
    with torch.no_grad():
        seed = next_seed(q.device) if options.dropout_p else None
        try:
            result = compute(q, k, v, options, packed, return_lse=True)
        except (TypeError, ValueError) as error:
            raise renamed(error, _NAMES) from None
        out, lse = result
        shown = q.new_empty(0)
        if seed is not None and return_softmax:
            shown = probabilities(q, k, lse, options, packed, seed)
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return out, lse, shown, state if seed is None else torch.cat([seed, state[:1]])


def forward_pass_of_pages(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_softmax: Any, packed: Packed, used: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for packed queries over pages (block_table in `used`) or over the first keys only (seqused_k)."""
    if return_softmax:
        raise ValueError("return_softmax must be False with block_table or seqused_k, which take no dropout, got True")
    with torch.no_grad():
        out, lse, shown = attend_pages(q, k, v, options, packed, **used)
    return out, lse, shown, torch.zeros(2, dtype=torch.int64, device=q.device)


def refuse_leftpad(leftpad_k: Any) -> None:
    """Raises NotImplementedError if leftpad_k is given."""
    if leftpad_k is not None:
        raise NotImplementedError(
            "leftpad_k is not taken by _flash_attn_varlen_forward of tileattn.compat.flash_attn: use "
            "flash_attn_with_kvcache, whose cache_leftpad is the same"
        )


# --- The backward pass ---


class Results(NamedTuple):
    """What the forward pass, or the merge of several, gave, and the gradient of out; with flash-attn's names.

    dout and out: as q, with v's head_dim. softmax_lse: (batch, heads, seqlen_q), or packed (heads, total_q).
    """

    dout: Tensor
    out: Tensor
    softmax_lse: Tensor


class Gradients(NamedTuple):
    """The tensors into which the backward pass writes; None for a gradient that is not wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


@torch.no_grad()
def backward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: Results,
    gradients: Gradients,
    options: Options,
    rng_state: Tensor | None,
    packed: Packed | None = None,
) -> Tensor:
    """Writes the gradients of q, k and v; returns an empty tensor in place of flash-attn's softmax_d.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    check_inputs(q, k, v, packed)
    q, k, v = map(last_contiguous, (q, k, v))
    _check_call(q, k, v, options, packed)
    _check_results(q, v, results, packed)
    _check_gradients((q, k, v), gradients)
    dropout = Dropout(options.dropout_p, _seed(rng_state, q.device)) if options.dropout_p else None
    dout, out, lse = last_contiguous(results.dout), last_contiguous(results.out), results.softmax_lse.contiguous()
    if packed is not None:
        q, k, v, dout, out, lse = (x[None] for x in (q, k, v, dout, out, lse))
    call, inputs = _call(q, k, v, options, packed)
    needs = (*(x is not None for x in gradients), False, *(False for _ in inputs.operands.tensors))
    if any(needs):
        run = ops.trace_backward if ops.is_traced(q) else ops.run_backward
        with without_autocast(q.device.type):
            computed = run(call, inputs._replace(dropout=dropout), needs, pad(out), lse, pad(dout), None)
        wanted = [x for x in gradients if x is not None]
        for given, gradient in zip(wanted, computed, strict=True):
            rows = gradient if packed is None else gradient[0]
            given.copy_(rows[..., : given.shape[-1]])
    return torch.empty(0, dtype=accumulator(q.dtype), device=q.device)


def _call(q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed | None) -> tuple[ops.Options, Inputs]:
    """The call in tileattn's terms, of bshd tensors, without dropout."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    if packed is not None:
        batch, seqlen_q, seqlen_k = packed.cu_seqlens_q.shape[0] - 1, packed.max_seqlen_q, packed.max_seqlen_k
    mask, mods = options.mask(seqlen_k), options.score_mods()
    check_variant(mask, mods, batch, q.shape[2], seqlen_q, seqlen_k)
    variant, operands = encode(mask, tuple(mods))
    check_operand_devices(operands.tensors, q)
    call = ops.Options(variant, options.scale(q), None, options.deterministic, needs_grad=True)
    return call, Inputs(pad(q), pad(k), pad(v), operands=operands, packed=packed)


def _check_call(q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed | None) -> None:
    try:
        if packed is None:
            check_arguments(q, k, v, None, options.dropout_p, "bshd", options.softmax_scale)
        else:
            check_packed_arguments(q, k, v, None, options.dropout_p, options.softmax_scale)
            check_metadata(packed, q.device)
    except (TypeError, ValueError) as error:
        raise renamed(error, _NAMES) from None


def _check_results(q: Tensor, v: Tensor, results: Results, packed: Packed | None) -> None:
    shape = (*q.shape[:-1], v.shape[-1])
    for name, x in (("dout", results.dout), ("out", results.out)):
        _check(name, x, shape, q.dtype, q.device)
    rows = (q.shape[0], q.shape[2], q.shape[1]) if packed is None else (q.shape[1], q.shape[0])
    _check("softmax_lse", results.softmax_lse, rows, accumulator(q.dtype), q.device)


def _check_gradients(inputs: tuple[Tensor, Tensor, Tensor], gradients: Gradients) -> None:
    for name, x, given in zip(Gradients._fields, inputs, gradients):
        if given is not None:
            _check(name, given, x.shape, x.dtype, x.device)


def _check(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on q's device {device}, got {x.device}")


def _seed(rng_state: Any, device: torch.device) -> Tensor:
    """The seed in the rng_state that the forward pass returned."""
    if rng_state is None:
        _refuse_unknown_dropout()
    _check("rng_state", rng_state, (2,), torch.int64, device)
    seed: Tensor = rng_state[:1]
    return seed


def _refuse_unknown_dropout() -> NoReturn:
    raise ValueError(
        "rng_state must be given with dropout_p > 0: it is the fourth result of the forward pass, and says which "
        "weights were dropped. ring-flash-attn does not pass it, so use it with dropout_p=0"
    )
