"""The arguments of `Plan.attention`: their checks, and what follows from them before any tensor moves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.dropout import GROUP
from ..call.fp8 import FP8
from ..call.inputs import Operands as VariantOperands
from ..call.scalars import as_float, as_int
from ..call.validation import check_arguments, check_flags
from ..runtime.dispatch import check_name
from ..runtime.run import MaskLike, ScoreModLike, as_dropout_p, requires_grad, scale_or_default
from ..variant.key import encode, normalize
from ..variant.masks import Mask
from ..variant.scores import Bias
from ..variant.sparse.blocks import for_call
from ..variant.validation import check_operand_devices, check_variant
from .algorithms.call import Operands
from .algorithms.shifted import ScoreFn
from .consent.agreement import Signature
from .sharding.layout import Layout

ALGORITHMS = ("auto", "gather", "ulysses", "2d", "ring")


class Given(NamedTuple):
    """The arguments of `Plan.attention` but for q, k and v, as the user gave them."""

    mask: MaskLike | None
    score_mod: ScoreModLike | None
    causal: bool
    scale: float | None
    sink: Tensor | None
    dropout_p: float
    return_lse: bool
    deterministic: bool
    backend: str | None
    algorithm: str
    head_groups: int | None


def with_numbers(given: Given) -> Given:
    """With numbers of other types, as NumPy's, as Python's."""
    scale = None if given.scale is None else as_float("scale", given.scale)
    return given._replace(scale=scale, dropout_p=as_dropout_p(given.dropout_p), head_groups=as_int(given.head_groups))


class Checked(NamedTuple):
    """Arguments that are right, as far as one rank can tell.

    Attributes:
        mask, mods: normalised.
        given: the key and the operands of the mask as the user gave it, by which what is computed for it is kept.
        operands: sink and the variant's tensors.
        local: for each tensor of the variant, whether it has the rows of this rank's queries only.
        scale: a number.
        dropout_p, return_lse, deterministic, backend, algorithm, head_groups: as given.
        needs_grad: whether gradients may be asked for.
        heads: of q, and of k and v.
        signature: what all ranks must have in common, but for ranges of keys.
    """

    mask: Mask | None
    mods: tuple[ScoreFn, ...]
    given: tuple[str, VariantOperands]
    operands: Operands
    local: tuple[bool, ...]
    scale: float
    dropout_p: float
    return_lse: bool
    deterministic: bool
    backend: str | None
    algorithm: str
    head_groups: int | None
    needs_grad: bool
    heads: tuple[int, int]
    signature: Signature


def checked(
    layout: Layout, rank: int, rows: Sequence[Tensor], given: Given, requires: Sequence[bool] | None = None
) -> Checked:
    """Checks the arguments of a call.

    Args:
        layout, rank: of the plan.
        rows: q, k and v.
        given: the others.
        requires: which of q, k, v, the sink and the variant's tensors require gradients, where autograd is not asked.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: what is asked for is not built for several ranks.
    """
    q, k, v = rows
    check_arguments(q, k, v, given.sink, given.dropout_p, "bshd", given.scale)
    _check_shards(layout, rank, rows)
    causal, return_lse, deterministic = check_flags(
        causal=given.causal, return_lse=given.return_lse, deterministic=given.deterministic
    )
    check_name(given.backend)
    check_algorithm(given.algorithm, given.head_groups, k.shape[2])
    of_user, mods = normalize(given.mask, given.score_mod, causal)
    mask = _in_call(layout, q, k, of_user)
    _check_variant(layout, rank, q, mask, mods)
    key, operands = encode(mask, mods)
    check_operand_devices(operands.tensors, q)
    of_mask = encode(mask, ())
    of_given = of_mask if mask is of_user else encode(of_user, ())
    local = _local(layout, rank, len(of_mask[1].tensors), mods)
    if given.dropout_p and any(local):
        _check_begins(layout)
    tensors = tuple(operands.tensors)
    if requires is None:
        inputs = (q, k, v, given.sink, *tensors)
        needs_grad = torch.is_grad_enabled() and requires_grad(inputs)
        requires = [x is not None and x.requires_grad for x in inputs]
    else:
        needs_grad = any(requires)
    scale = scale_or_default(given.scale, q)
    signature = {
        "the shape (batch, heads, kv_heads, head_dim, head_dim_v)": str((*q.shape[::2], *k.shape[2:], v.shape[3])),
        "the dtype": str(q.dtype),
        "the device": q.device.type,
        "the mask and score modifications": _short(key),
        "the numbers of the mask and score modifications": str((operands.ints, operands.floats)),
        "the tensors of the mask and score modifications": str(_described(tensors, local)),
        "sink": "None" if given.sink is None else str(given.sink.dtype),
        "scale": str(scale),
        "dropout_p": str(given.dropout_p),
        "return_lse": str(return_lse),
        "deterministic": str(deterministic),
        "backend": repr(given.backend),
        "algorithm": repr(given.algorithm),
        "head_groups": str(given.head_groups),
        "which inputs require gradients": str(needs_grad and list(requires)),
    }
    return Checked(
        mask, mods, of_given, Operands(given.sink, tensors), local, scale, given.dropout_p, return_lse, deterministic,
        given.backend, given.algorithm, given.head_groups, needs_grad, (q.shape[2], k.shape[2]), signature,
    )  # fmt: skip


def _check_shards(layout: Layout, rank: int, rows: Sequence[Tensor]) -> None:
    q = rows[0]
    if q.dtype == FP8:
        raise NotImplementedError(
            "q, k and v of a parallel plan must be float16, bfloat16, float32 or float64, got float8_e4m3fn, which has "
            "no gradients and runs on one GPU only (tileattn.attention)"
        )
    expected = layout.rows(rank)
    for name, x in zip("qkv", rows):
        if x.shape[1] != expected:
            whole = " (the whole sequence: use plan.shard)" if x.shape[1] == layout.tokens else ""
            raise ValueError(
                f"{name} must be a shard with the {expected} rows of rank {rank}, got {x.shape[1]} rows{whole}"
            )
    if layout.packed and q.shape[0] != 1:
        raise ValueError(f"q, k and v of a plan with documents must have batch size 1, got {q.shape[0]}")


def check_algorithm(algorithm: Any, groups: Any, kv_heads: int) -> None:
    """Raises TypeError or ValueError for an unknown algorithm, or for head groups that it does not have."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    if groups is None:
        return
    if not isinstance(groups, int) or isinstance(groups, bool):
        raise TypeError(f"head_groups must be an int or None, got {groups!r}")
    if not 1 <= groups <= kv_heads:
        raise ValueError(f"head_groups must lie in 1 .. kv_heads = {kv_heads}, got {groups}")
    if algorithm not in ("auto", "gather", "2d"):
        raise ValueError(f"head_groups is for algorithm='gather' and '2d', got {groups} with {algorithm!r}")


def _in_call(layout: Layout, q: Tensor, k: Tensor, mask: Mask | None) -> Mask | None:
    """The mask of the whole call, in which rows are positions."""
    batch, longest = _whole(layout, q)
    return for_call(mask, lambda: (batch, q.shape[2], k.shape[2], longest, longest), lambda: 0)


def _whole(layout: Layout, q: Tensor) -> tuple[int, int]:
    """The number of batch elements, or of sequences, of the whole call, and the longest length."""
    sequences = len(layout.bounds) - 1
    longest = max((layout.length(sequence) for sequence in range(sequences)), default=0)
    return sequences if layout.packed else q.shape[0], longest


def _check_variant(layout: Layout, rank: int, q: Tensor, mask: Mask | None, mods: Sequence[ScoreFn]) -> None:
    """Tensors of variants are whole, but a bias may have the rows of this rank's queries."""
    batch, longest = _whole(layout, q)
    whole = [mod for mod in mods if not is_local_bias(mod, layout, rank)]
    check_variant(mask, whole, batch, q.shape[2], longest, longest)
    check_variant(
        None, [mod for mod in mods if is_local_bias(mod, layout, rank)], batch, q.shape[2], layout.rows(rank), longest
    )


def is_local_bias(mod: ScoreFn, layout: Layout, rank: int) -> bool:
    """Whether a modification is a bias with the rows of this rank's queries, in the order of its shard."""
    if type(mod) is not Bias or layout.packed:
        return False
    tensor: Any = mod.tensor
    if not isinstance(tensor, Tensor) or tensor.ndim != 4:
        return False
    return tensor.shape[2] == layout.rows(rank) and tensor.shape[2] not in (1, layout.tokens)


def _check_begins(layout: Layout) -> None:
    """With dropout, rows of zeros stand before queries that do not begin at a multiple of 16; a bias has none there."""
    begins = [(run.start, rank) for rank, runs in enumerate(layout.runs) for run in runs if run.start % GROUP]
    if begins:
        start, rank = begins[0]
        raise NotImplementedError(
            f"a Bias with the rows of one rank goes with dropout_p only where the runs of all ranks begin at multiples "
            f"of {GROUP}, and one of rank {rank} begins at {start}: give the Bias whole, or choose a seqlen that is a "
            f"multiple of {2 * GROUP} x ranks"
        )


def _local(layout: Layout, rank: int, of_mask: int, mods: Sequence[ScoreFn]) -> tuple[bool, ...]:
    """For each tensor, `of_mask` of a mask and then those of modifications, whether it has local rows."""
    local = [False] * of_mask
    for mod in mods:
        local += [is_local_bias(mod, layout, rank)] * len(encode(None, (mod,))[1].tensors)
    return tuple(local)


def _described(tensors: Sequence[Tensor], local: Sequence[bool]) -> list[tuple[Any, ...]]:
    """Dtype and shape of each; of a bias of local rows, whose number differs from rank to rank, not the rows."""
    return [
        (str(x.dtype).removeprefix("torch."), "local rows" if mine else tuple(x.shape))
        for x, mine in zip(tensors, local)
    ]


def _short(key: str) -> str:
    """A variant key; a long one cut, with a digest of the whole."""
    text = key or "none"
    return text if len(text) <= 200 else f"{text[:200]}... ({digest(text)})"


def digest(text: str) -> str:
    """Some hexadecimal digits that differ for different texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
