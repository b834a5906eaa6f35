"""Base class of the attention modules: projections, heads, the causal mask and the checks of arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..api.attention import attention
from ..api.cache_step import LayerCache
from ..call.fp8 import accumulator
from ..call.scalars import as_float, as_int
from ..call.validation import check_flags
from ..runtime.run import autocast_dtype
from ..variant.key import CAUSAL
from ..variant.masks import Mask
from ..variant.scores import Bias
from .attn_mask import as_bias
from .memory import KVCacheSize, MemoryUsage
from .projections import fuse, split

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SelfAttention(nn.Module):
    """Self-attention with projections. A subclass chooses the attention by overriding `attend`, and `attend_cached`.

    With num_kv_heads equal to num_heads, one layer `qkv_proj` projects to queries, keys and values. Otherwise, and in
    :class:`GroupedQueryAttention` always, there are three: `q_proj`, `k_proj` and `v_proj`. The last layer is
    `out_proj`. Modules of any class with equal `embed_dim`, `num_heads`, `num_kv_heads` and `bias` can load each
    other's state dicts: with equal heads, one projection is split in three, or three are joined, as it is loaded.

    Args:
        embed_dim: width of x and of the output, a multiple of num_heads; head_dim is ``embed_dim // num_heads``.
        num_heads: heads of the queries.
        num_kv_heads: heads of keys and values, a divisor of num_heads; None: num_heads. Query head ``h`` uses
            key/value head ``h // (num_heads // num_kv_heads)``.
        dropout: probability of dropping an attention weight in training, at least 0 and less than 1; kept weights
            are scaled by ``1 / (1 - dropout)``.
        bias: whether the projections add a bias.
        causal: whether a position sees only itself and earlier positions (in PyTorch ``is_causal``).
        device, dtype: of the parameters, as in torch.nn.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names the argument, its value and what is accepted.
    """

    separate_projections = False  # whether there are three projections also with num_kv_heads equal to num_heads

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads = check_positive("embed_dim", embed_dim), check_positive("num_heads", num_heads)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_kv_heads is None:
            num_kv_heads = num_heads
        num_kv_heads = check_positive("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        dropout = _checked_dropout(dropout)
        bias, causal = check_flags(bias=bias, causal=causal)
        if dtype is not None and dtype not in _DTYPES:
            raise TypeError(f"dtype must be torch.float16, bfloat16, float32, float64 or None, got {dtype!r}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout: float = dropout
        self.causal = causal

        def linear(width: int) -> nn.Linear:
            return nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)

        if self._is_fused:
            self.qkv_proj = linear(3 * embed_dim)
        else:
            self.q_proj = linear(embed_dim)
            self.k_proj = linear(num_kv_heads * self.head_dim)
            self.v_proj = linear(num_kv_heads * self.head_dim)
        self.out_proj = linear(embed_dim)

    if TYPE_CHECKING:  # nn.Module.__call__ is untyped

        def __call__(
            self, x: Tensor, *, attn_mask: Tensor | None = None, cache: LayerCache | None = None
        ) -> tuple[Tensor, Tensor | None]: ...

    def forward(
        self, x: Tensor, *, attn_mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a sequence to itself; with a cache, of its new tokens to all of its tokens.

            cache = tileattn.PagedKVCache(batch, max_seqlen, num_kv_heads, head_dim, layers=len(layers))
            step = cache.step(x.shape[1])  # once for all layers: of a prompt, then of one token after the other
            for index, layer in enumerate(layers):
                x, _ = layer(x, cache=step.layer(index))

        The output is that of the same positions in a call on the whole sequences.

        Args:
            x: (batch, seqlen, embed_dim), in the parameters' dtype or under autocast. With a cache the new tokens; in a
                step with cu_seqlens_q (total, embed_dim).
            attn_mask: tensor (seqlen, seqlen), (batch, seqlen, seqlen) or (batch, num_heads, seqlen, seqlen); any of
                these sizes may be 1. A boolean mask is **True where a key is hidden**, as in
                ``torch.nn.MultiheadAttention``; PyTorch's ``scaled_dot_product_attention`` has it the other way round.
                A floating-point mask, in float32 or the dtype of the projections, is added to the scores, and is
                differentiable. It holds together with `causal`. Not together with a cache.
            cache: the keys and values of the earlier tokens in this layer, to which those of x are added. The module
                must be causal. In the dtype of the projections; there are no gradients and no dropout.

        Returns:
            The output, with x's shape, and None in place of the weights, which only :class:`NaiveAttention` returns.

        Raises:
            TypeError, ValueError: x or attn_mask is not a tensor, or has a wrong shape, dtype or device; with a cache,
                the module is not causal or in training with dropout, or there is an attn_mask.
            ValueError: gradients are recorded: a call with a cache belongs under torch.no_grad().
            NotImplementedError: the module takes no cache.
        """
        return self._forward(x, CAUSAL if self.causal else None, cache, attn_mask)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the projected heads, by :func:`tileattn.attention`.

        Args:
            q: (batch, seqlen, num_heads, head_dim).
            k: (batch, seqlen, num_kv_heads, head_dim).
            v: shaped as k.
            mask: which keys each query sees; it includes `causal`. None: every query sees all keys.
            bias: what `attn_mask` adds to the scores, (batch or 1, num_heads or 1, seqlen or 1, seqlen); -inf hides a
                key. Only passed in calls with an `attn_mask`.

        Returns:
            o, shaped as q, and the weights or None.
        """
        # `causal=True` without `mask` is the call with the least host overhead.
        causal = mask is CAUSAL
        o = attention(
            q,
            k,
            v,
            mask=None if causal else mask,
            causal=causal,
            score_mod=None if bias is None else Bias(bias),
            dropout_p=self.dropout_p,
        )
        return o, None

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, cache: LayerCache) -> Tensor:
        """Attention of the projected heads of new tokens over a cache, to which k and v are added.

        Args:
            q: (batch, new, num_heads, head_dim), or packed (total, num_heads, head_dim).
            k: the same with num_kv_heads.
            v: shaped as k.
            mask: as in `attend`, but never None.
            cache: the layer's part of a step.

        Returns:
            o, shaped as q.

        Raises:
            NotImplementedError: the class overrides `attend` and not this method.
        """
        if type(self).attend is not SelfAttention.attend:
            raise NotImplementedError(
                f"{type(self).__name__} takes no cache; MaskedAttention ('masked') and GroupedQueryAttention ('gqa') "
                "do, and load its state dict"
            )
        causal = mask is CAUSAL
        return cache.attend(q, k, v, causal=causal, mask=None if causal else mask)

    @property
    def dropout_p(self) -> float:
        """The dropout probability in the module's current mode: `dropout` in training, else 0."""
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        shown = [f"{self.embed_dim}, {self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            shown.append(f"num_kv_heads={self.num_kv_heads}")
        if self.dropout:
            shown.append(f"dropout={self.dropout}")
        if self.causal:
            shown.append("causal=True")
        return ", ".join(shown)

    def get_memory_usage(
        self,
        batch: int | None = None,
        seqlen: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> MemoryUsage:
        """The bytes of attention by its formulas: what is kept for the backward pass, and the layer's KV cache.

        The projections are not counted, nor what `forward` frees again; :func:`tileattn.profile` measures both.

        Args:
            batch: sequences, 1 or more.
            seqlen: positions in each, 1 or more.
            dtype: of q, k and v; None: the parameters' dtype.
            batch_size: another name of batch, FlashTile's.
            seq_len: another name of seqlen, FlashTile's.

        Raises:
            TypeError, ValueError: batch or seqlen is given twice or not at all, or is not a positive int, or dtype is
                not a torch.dtype.
        """
        batch = check_positive("batch", _once("batch", batch, "batch_size", batch_size))
        seqlen = check_positive("seqlen", _once("seqlen", seqlen, "seq_len", seq_len))
        dtype = self.out_proj.weight.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
        per_head = batch * seqlen * self.head_dim * dtype.itemsize
        rows = batch * self.num_heads * seqlen
        o, expanded = self.num_heads * per_head, 3 * self.num_heads * per_head
        naive = expanded + o + rows * seqlen * dtype.itemsize
        cache = KVCacheSize(bytes=2 * self.num_kv_heads * per_head, multi_head_bytes=2 * self.num_heads * per_head)
        qkv, weights, lse, tiles = self._kept(o + cache.bytes, rows, seqlen, dtype)
        return MemoryUsage(qkv=qkv, o=o, weights=weights, lse=lse, tiles=tiles, naive=naive, kv_cache=cache)

    def _kept(self, qkv: int, rows: int, seqlen: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """Bytes of q, k and v, of the weights, of lse, and of the tiles in memory, for `rows` rows of all heads."""
        return qkv, 0, rows * accumulator(dtype).itemsize, 0

    def _forward(
        self, x: Tensor, mask: Mask | None, cache: LayerCache | None = None, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError("x must be a dense tensor, got a nested one; see tileattn.varlen_attention")
        packed = cache is not None and cache.step.packed
        if x.ndim != (2 if packed else 3) or x.shape[-1] != self.embed_dim:
            rows = "total" if packed else "batch, seqlen"
            raise ValueError(f"x must have shape ({rows}, embed_dim={self.embed_dim}), got {tuple(x.shape)}")
        if cache is not None:
            self._check_cached(mask, attn_mask)
        try:
            q, k, v = self._heads(x)
        except RuntimeError:
            # Check the dtype only after a failure: a quantized projection may accept x in a dtype other than its
            # weight's.
            self._check_dtype(x)
            raise
        if cache is not None:
            assert mask is not None
            o, weights = self.attend_cached(q, k, v, mask, cache), None
        elif attn_mask is not None:
            o, weights = self._attend_masked(q, k, v, mask, attn_mask)
        else:
            o, weights = self.attend(q, k, v, mask)
        return self.out_proj(o.flatten(-2)), weights

    def _attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, attn_mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention under the user's `attn_mask`."""
        return self.attend(q, k, v, mask, as_bias(attn_mask, q))

    def _check_cached(self, mask: Mask | None, attn_mask: Tensor | None) -> None:
        """Raises if the outputs over a cache would not be those of the whole sequence."""
        if attn_mask is not None:
            raise ValueError("attn_mask must be None with a cache; MaskedAttention takes a mask or a function with one")
        if mask is None:
            raise ValueError("cache needs a module with causal=True: otherwise earlier tokens see later ones")
        if self.dropout_p:
            raise ValueError(f"cache needs a module without dropout, got {self.dropout_p} in training: call eval()")

    def _check_dtype(self, x: Tensor) -> None:
        parameter = next(self.parameters())
        if autocast_dtype(x) != autocast_dtype(parameter):
            raise TypeError(
                f"x must be {parameter.dtype}, as the parameters are, or under torch.autocast float16, bfloat16 or "
                f"float32, got {x.dtype}"
            )

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects x to q (batch, seqlen, num_heads, head_dim), k and v (batch, seqlen, num_kv_heads, head_dim).

        x may also be packed: (total, embed_dim) gives (total, num_heads, head_dim).
        """
        if self._is_fused:
            q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        # Both sizes are explicit: in a tensor without elements, PyTorch cannot infer a size of -1.
        q_heads, kv_heads = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        return q.unflatten(-1, q_heads), k.unflatten(-1, kv_heads), v.unflatten(-1, kv_heads)

    @property
    def _is_fused(self) -> bool:
        """Whether one layer projects to queries, keys and values."""
        return self.num_kv_heads == self.num_heads and not self.separate_projections

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Loads also what a module with the other kind of projections saved. `state_dict` is torch's own copy."""
        if self.num_kv_heads == self.num_heads:
            (fuse if self._is_fused else split)(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


def check_positive(name: str, value: Any) -> int:
    """The argument `name` as a positive int.

    Raises:
        TypeError: `value` is not an int.
        ValueError: `value` is less than 1.
    """
    value = as_int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a positive int, got {value}")
    return value


def _once(name: str, value: int | None, other_name: str, other: int | None) -> int | None:
    """The argument that has two names."""
    if value is not None and other is not None:
        raise TypeError(f"{name} and {other_name} are the same: give one, got {value!r} and {other!r}")
    return other if value is None else value


def _checked_dropout(dropout: Any) -> float:
    dropout = as_float("dropout", dropout, "a number of at least 0 and less than 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
    return float(dropout)
