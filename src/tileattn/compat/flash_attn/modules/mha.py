"""``flash_attn.modules.mha``: modules that run attention without projections, and ALiBi's slopes."""

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

    If nheads is a power of two, the slopes are ``2 ** (-8 i / nheads)``, ``i = 1 .. nheads``. Otherwise they are the
    slopes of the next lower power of two, followed by every other slope of twice that power.

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
    """Base class of the modules: it stores the options of a call."""

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
            # `module.half()` converts this buffer, too; the functions need float32.
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_Attention):
    """Self-attention of qkv, by :func:`flash_attn.flash_attn_func`.

    Args:
        causal: the default of `forward`.
        softmax_scale: None means ``head_dim ** -0.5``.
        attention_dropout: dropout_p in training; otherwise dropout_p is 0.
        window_size: (left, right); -1 means no bound.
        alibi_slopes: (heads,) or (batch, heads); registered as a buffer that is not in the state dict.
        deterministic: whether gradients must be bitwise equal from run to run.
    """

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attention on a padded batch or, with cu_seqlens, on packed sequences.

        Args:
            qkv: (batch, seqlen, 3, heads, head_dim), or with cu_seqlens (total, 3, heads, head_dim).
            causal: None: the module's `causal`.
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
    """Cross-attention of q to kv; arguments as :class:`FlashSelfAttention`."""

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
        """Attention on a padded batch or, with cu_seqlens, on packed sequences.

        Args:
            q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens (total_q, heads, head_dim).
            kv: (batch, seqlen_k, 2, kv_heads, head_dim), or with cu_seqlens (total_k, 2, kv_heads, head_dim).
            causal: None: the module's `causal`.
            cu_seqlens: int32 (batch + 1,), of the queries.
            max_seqlen: the largest number of queries in a sequence; needed with cu_seqlens.
            cu_seqlens_k: int32 (batch + 1,), of the keys; needed with cu_seqlens.
            max_seqlen_k: the largest number of keys in a sequence; needed with cu_seqlens.

        Returns:
            The output, with q's shape.
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
