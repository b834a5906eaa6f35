"""Masks and score modifications of conformance cases, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..variant import math as tm
from ..variant.masks import Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow
from ..variant.scores import ALiBi, Bias, SoftCap
from ..variant.sparse.blocks import BlockSparse
from .call_arguments import ScoreFn
from .tensors import Draw


class Sizes(Protocol):
    """What masks and modifications of a shape, of whichever kind, are sized by."""

    @property
    def batch(self) -> int:
        """Number of batch elements, or of sequences."""

    @property
    def heads(self) -> int:
        """Of the queries."""

    @property
    def kv_heads(self) -> int:
        """Of the keys."""

    @property
    def seqlen_q(self) -> int:
        """Of the longest sequence."""

    @property
    def seqlen_k(self) -> int:
        """Of the longest sequence; of `decode`, the capacity."""


def _window(draw: Draw, shape: Sizes) -> Mask:
    sizes = ((0, 0), (37, 0), (16, 50), (200, 5), (3, 300))
    return SlidingWindow(*sizes[(shape.seqlen_q + shape.seqlen_k) % len(sizes)])


def _prefix(draw: Draw, shape: Sizes) -> Mask:
    return PrefixLM(shape.seqlen_k // 3)


def _documents(draw: Draw, batch: tuple[int, ...], shape: Sizes) -> Documents:
    """About four documents to a sequence, of any lengths."""
    begins = draw.integers(max(1, shape.seqlen_k // 4), *batch, shape.seqlen_k) == 0
    return Documents(begins.cumsum(-1).to(torch.int32))


def _padding(draw: Draw, shape: Sizes) -> KeyPadding:
    """On the right, on the left and, in every third batch element, between; a second one has no key at all."""
    if draw.device.type == "meta":
        return KeyPadding(torch.empty((shape.batch, shape.seqlen_k), dtype=torch.bool, device="meta"))
    length = draw.integers(shape.seqlen_k + 1, shape.batch, 1)
    length[3:4] = 0
    places = torch.arange(shape.seqlen_k, device=draw.device)
    kinds = [places < length, places >= length, draw.integers(3, shape.batch, shape.seqlen_k) > 0]
    return KeyPadding(torch.stack([kinds[i % 3][i] for i in range(shape.batch)]))


def _blocks(draw: Draw, shape: Sizes, heads: int, block_q: int, block_k: int) -> BlockSparse:
    """A third of the blocks; the second row and the second column of blocks are empty."""
    blocks = draw.integers(3, shape.batch, heads, *_counted(shape, block_q, block_k)) == 0
    blocks[:, :, 1], blocks[..., 1] = False, False
    return BlockSparse(blocks, (block_q, block_k))


def _block_lists(draw: Draw, shape: Sizes) -> BlockSparse:
    """Lists that name blocks in any order, some twice, and have numbers behind their counts that do not count."""
    rows, _ = _counted(shape, 32, 128)
    numbers = draw.integers(max(1, -(-shape.seqlen_k // 128)), shape.batch, shape.heads, rows, 4)
    numbers[..., 1:2] = -1
    numbers[..., 3:] = 1_000_000
    return BlockSparse(numbers, (32, 128), draw.integers(4, shape.batch, shape.heads, rows))


def _counted(shape: Sizes, block_q: int, block_k: int) -> tuple[int, int]:
    # A dimension of one block would be another kernel; more blocks than there are are never reached.
    return max(2, -(-shape.seqlen_q // block_q)), max(2, -(-shape.seqlen_k // block_k))


def _function(draw: Draw, shape: Sizes) -> Mask:
    return FunctionMask(lambda b, h, q, k: ((h % 2 == 0) & (k <= q)) | (k % 3 == b % 2))


def _function_of_tensor(draw: Draw, shape: Sizes) -> Mask:
    keep = draw.integers(4, shape.seqlen_k)
    return FunctionMask(lambda b, h, q, k: (keep[k] > 0) & (k <= q + 5))


def _function_empty_rows(draw: Draw, shape: Sizes) -> Mask:
    return FunctionMask(lambda b, h, q, k: (q % 2 == 0) & (k <= q))


MASKS: dict[str, Callable[[Draw, Sizes], Mask | None]] = {
    "none": lambda draw, shape: None,
    "causal": lambda draw, shape: Causal(),
    "window": _window,
    "window_left": lambda draw, shape: SlidingWindow(29, None),
    "window_right": lambda draw, shape: SlidingWindow(None, 31),
    "prefix": _prefix,
    "prefix_b": lambda draw, shape: PrefixLM(draw.integers(shape.seqlen_k + 1, shape.batch).to(torch.int32)),
    "documents": lambda draw, shape: _documents(draw, (shape.batch,), shape),
    "causal&documents": lambda draw, shape: Causal() & _documents(draw, (), shape),
    "padding": _padding,
    "causal&padding": lambda draw, shape: Causal() & _padding(draw, shape),
    "prefix|window": lambda draw, shape: _prefix(draw, shape) | _window(draw, shape),
    "blocks": lambda draw, shape: _blocks(draw, shape, shape.heads, 64, 32),
    "blocks_kv": lambda draw, shape: _blocks(draw, shape, shape.kv_heads, 1, 16),
    "block_lists": _block_lists,
    "causal&blocks": lambda draw, shape: Causal() & _blocks(draw, shape, 1, 48, 64),
    "blocks|window": lambda draw, shape: _blocks(draw, shape, shape.heads, 64, 32) | _window(draw, shape),
    "function": _function,
    "function_tensor": _function_of_tensor,
    "function_empty_rows": _function_empty_rows,
}


def _bias(draw: Draw, shape: Sizes, batch: int, heads: int, rows: int) -> ScoreFn:
    """Rows with a gap behind them: a bias has any strides, too."""
    return Bias(draw.normal(batch, heads, rows, shape.seqlen_k + 3)[..., : shape.seqlen_k])


def _rows(draw: Draw, dtype: torch.dtype, begin: int, *shape: int) -> Tensor:
    """Standard normal, in rows of a multiple of 16 elements of memory, from element `begin` on; NaN where none is."""
    memory = torch.full((*shape[:-1], (begin + shape[-1] + 15) // 16 * 16), torch.nan, dtype=dtype, device=draw.device)
    rows = memory[..., begin : begin + shape[-1]]
    return rows.copy_(draw.normal(*shape))


def _bias_in_rows(
    draw: Draw, shape: Sizes, batch: int, heads: int, dtype: torch.dtype = torch.float32, begin: int = 0
) -> ScoreFn:
    """Rows that begin at multiples of 32 bytes, or, with another `begin`, one or more elements behind."""
    return Bias(_rows(draw, dtype, begin, batch, heads, shape.seqlen_q, shape.seqlen_k))


def _user_in_rows(draw: Draw, shape: Sizes) -> ScoreFn:
    """A modification of the user's that reads a table as a bias does."""
    table = _rows(draw, torch.float16, 0, shape.heads, shape.seqlen_q, shape.seqlen_k)

    def gate(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x = table[h, q - (table.shape[2] - table.shape[1]), k]
        return tm.where(x > 0, tm.tanh(score), score * x)

    return gate


def _user(draw: Draw, shape: Sizes) -> ScoreFn:
    def shift(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + 0.125 * (h + b) + tm.where((q - k) % 3 == 0, 0.5, -0.25)

    return shift


def _user_of_tensor(draw: Draw, shape: Sizes) -> ScoreFn:
    table = draw.normal(shape.heads, shape.seqlen_k)

    def gate(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return tm.minimum(score, 2.0) * tm.tanh(table[h, k])

    return gate


SCORES: dict[str, Callable[[Draw, Sizes], ScoreFn]] = {
    "softcap": lambda draw, shape: SoftCap(2.0 if shape.seqlen_k % 2 else 30.0),
    "alibi": lambda draw, shape: ALiBi(draw.normal(shape.heads).abs() / 16),
    "alibi_b": lambda draw, shape: ALiBi(draw.normal(shape.batch, shape.heads).abs() / 16),
    "bias": lambda draw, shape: _bias(draw, shape, 1, shape.heads, shape.seqlen_q),
    "bias_1": lambda draw, shape: _bias(draw, shape, 1, 1, shape.seqlen_q),
    "bias_b": lambda draw, shape: _bias(draw, shape, shape.batch, 1, shape.seqlen_q),
    "bias_bh": lambda draw, shape: _bias(draw, shape, shape.batch, shape.heads, shape.seqlen_q),
    "bias_bhk": lambda draw, shape: _bias(draw, shape, shape.batch, shape.heads, 1),
    "bias_tiles": lambda draw, shape: _bias_in_rows(draw, shape, 1, shape.heads),
    "bias_tiles_1": lambda draw, shape: _bias_in_rows(draw, shape, 1, 1),
    "bias_tiles_bf16_b": lambda draw, shape: _bias_in_rows(draw, shape, shape.batch, 1, torch.bfloat16),
    "bias_tiles_fp16_bh": lambda draw, shape: _bias_in_rows(draw, shape, shape.batch, shape.heads, torch.float16),
    "bias_unaligned": lambda draw, shape: _bias_in_rows(draw, shape, 1, shape.heads, torch.bfloat16, 1),
    "user_tiles_tensor": _user_in_rows,
    "user": _user,
    "user_tensor": _user_of_tensor,
}
