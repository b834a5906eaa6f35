"""``flash_attn.modules.mha``: attention without projections as modules, and the slopes of ALiBi."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import flash_attn_interface as interface
from .._absent import absent_names

if not TYPE_CHECKING:
    _LAYER = "a module of tileattn.nn, or FlashSelfAttention of the same module between your own projections"
    _EAGER = "FlashSelfAttention or FlashCrossAttention of the same module, which run on a CPU as well"
    __getattr__ = absent_names(
        __name__,
        {
            "MHA": _LAYER,
            "ParallelMHA": _LAYER,
            "SelfAttention": _EAGER,
            "CrossAttention": _EAGER,
            "LinearResidual": "torch.nn.Linear",
        },
    )


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slope of each head, for ``alibi_slopes=``.

    For a power of two they are ``2 ** (-8 i / nheads)``, ``i = 1 .. nheads``. Other numbers of heads take those of the
    next lower power of two, then every other one of twice that power.

    Raises:
        ValueError: nheads is less than 1.

    Source: Press et al. 2021 (ALiBi, arXiv 2108.12409).
    """
    if nheads < 1:
        raise ValueError(f"nheads must be at least 1, got {nheads}")
    lower = 1 << (nheads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    return slopes + [2.0 ** (-4 * i / lower) for i in range(1, 2 * (nheads - lower), 2)]


class _Attention(nn.Module):
    """The options of a call, kept."""

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        self.deterministic = deterministic
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            # `module.half()` has taken this buffer along; the functions want float32.
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_Attention):
    """Attention of qkv; the options are those of :func:`flash_attn.flash_attn_func`.

    Args:
        causal: used by calls that give none.
        softmax_scale: None means ``head_dim ** -0.5``.
        attention_dropout: dropout_p in training; otherwise it is 0.
        window_size: (left, right); -1 is no bound.
        alibi_slopes: a buffer, which is not in the state dict.
        deterministic: ask for gradients that are bitwise equal from run to run.
    """

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attention on padded batches, or with cu_seqlens on packed sequences.

        Args:
            qkv: (batch, seqlen, 3, heads, head_dim), or with cu_seqlens (total, 3, heads, head_dim).
            causal: None: as the module was made.
            cu_seqlens: int32 (batch + 1,).
            max_seqlen: the longest length; needed with cu_seqlens.

        Returns:
            (batch, seqlen, heads, head_dim), or (total, heads, head_dim).
        """
        options = self._options(causal)
        if cu_seqlens is None:
            o: Any = interface.flash_attn_qkvpacked_func(qkv, **options)
        else:
            _check_given(max_seqlen=max_seqlen)
            o = interface.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)  # type: ignore[arg-type]
        return o  # type: ignore[no-any-return]


class FlashCrossAttention(_Attention):
    """Attention of q to kv; arguments as :class:`FlashSelfAttention`."""

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """Attention on padded batches, or with cu_seqlens on packed sequences.

        Args:
            q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens (total_q, heads, head_dim).
            kv: (batch, seqlen_k, 2, kv_heads, head_dim), or with cu_seqlens (total_k, 2, kv_heads, head_dim).
            causal: None: as the module was made.
            cu_seqlens: int32 (batch + 1,), of the queries.
            max_seqlen: the longest of the queries' lengths; needed with cu_seqlens.
            cu_seqlens_k: the same of the keys; needed with cu_seqlens.
            max_seqlen_k: the same of the keys; needed with cu_seqlens.

        Returns:
            Like q.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            o: Any = interface.flash_attn_kvpacked_func(q, kv, **options)
        else:
            _check_given(max_seqlen=max_seqlen, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
            lengths: Any = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
            o = interface.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **options)
        return o  # type: ignore[no-any-return]


def _check_given(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is None:
            raise ValueError(f"{name} must be given with cu_seqlens, got None")
