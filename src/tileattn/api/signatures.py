"""The keyword arguments of the attention functions, as types for their overloads.

The return type of an attention function depends on `return_lse`. A type checker therefore needs three signatures of
each function: for False, for True and for a bool. The classes here list the other keyword arguments once for all three.
Nothing uses the classes at run time: the functions' own signatures list every argument, and a test compares the two.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from ..call.decoding import DecodePlan, Splits
from ..runtime.run import MaskLike, ScoreModLike


class SharedOptions(TypedDict, total=False):
    """Keyword arguments of both :func:`tileattn.attention` and :func:`tileattn.varlen_attention`."""

    mask: MaskLike | None
    score_mod: ScoreModLike | None
    causal: bool
    scale: float | None
    sink: Tensor | None
    dropout_p: float
    deterministic: bool
    backend: str | None


class AttentionOptions(SharedOptions, total=False):
    """Keyword arguments of :func:`tileattn.attention`, without `return_lse`."""

    key_padding_mask: Tensor | None
    layout: str
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None


class VarlenOptions(SharedOptions, total=False):
    """Keyword arguments of :func:`tileattn.varlen_attention`, without `return_lse`."""


class DecodeKeywords(TypedDict, total=False):
    """Keyword arguments of :func:`tileattn.decode`, without `return_lse`."""

    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    causal: bool
    mask: MaskLike | None
    score_mod: ScoreModLike | None
    tree_mask: Tensor | None
    sink: Tensor | None
    scale: float | None
    splits: Splits
    plan: DecodePlan | None
    out: Tensor | None
    backend: str | None
