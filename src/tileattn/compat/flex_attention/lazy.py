"""``create_block_mask``: a BlockMask that computes its blocks only when something asks for them.

PyTorch evaluates a mask_mod for all pairs of queries and keys to find the blocks. tileattn's kernels evaluate the
mask_mod itself, so :func:`tileattn.compat.flex_attention.flex_attention` never asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from .mods import check_mod

# What PyTorch's create_block_mask of the installed version takes; 2.11 has no argument after _compile.
_ACCEPTED = inspect.signature(torch_flex.create_block_mask)
# Attributes of a BlockMask that exist only once the blocks are computed.
_OF_BLOCKS = frozenset({
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
    "full_q_num_blocks", "full_q_indices", "dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt",
})  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The arguments of PyTorch's create_block_mask, and the device to which the result is moved."""

    mask_mod: Callable[..., Any]
    batch: int
    heads: int
    seq_lengths: tuple[int, int]
    device: Any
    block_size: tuple[int, int]
    options: dict[str, Any]
    moved_to: Any = None

    def block_mask(self) -> BlockMask:
        """PyTorch's BlockMask: evaluates the mask_mod for all pairs."""
        made = torch_flex.create_block_mask(
            self.mask_mod, self.batch, self.heads, *self.seq_lengths, self.device, self.block_size, **self.options
        )
        return made if self.moved_to is None else made.to(self.moved_to)


class LazyBlockMask(BlockMask):
    """A PyTorch BlockMask whose blocks are computed when one of their tensors is first read or set.

    From then on it is a BlockMask like any other: a full block skips the mask_mod, an absent one hides. Its ``shape``,
    ``BLOCK_SIZE``, ``seq_lengths`` and ``mask_mod`` need no blocks, nor do ``numel``, ``to`` and a smaller ``_adjust``.
    """

    def __init__(self, recipe: Recipe) -> None:
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "has_blocks", False)
        object.__setattr__(self, "seq_lengths", recipe.seq_lengths)
        object.__setattr__(self, "BLOCK_SIZE", recipe.block_size)
        object.__setattr__(self, "mask_mod", recipe.mask_mod)

    recipe: Recipe
    has_blocks: bool

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_BLOCKS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._compute()
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Blocks that are set, or that belong to another mask_mod than the new one, must have been computed before.
        if not self.has_blocks and (name in _OF_BLOCKS or name in ("mask_mod", "seq_lengths", "BLOCK_SIZE")):
            self._compute()
        object.__setattr__(self, name, value)

    def _compute(self) -> None:
        made = self.recipe.block_mask()
        object.__setattr__(self, "has_blocks", True)
        for name in _OF_BLOCKS:
            if hasattr(made, name):
                object.__setattr__(self, name, getattr(made, name))

    @classmethod
    def from_kv_blocks(cls, *arguments: Any, **options: Any) -> Any:
        """PyTorch's BlockMask of these blocks, which are not computed lazily."""
        return BlockMask.from_kv_blocks(*arguments, **options)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)."""
        if self.has_blocks:
            return (*self.kv_indices.shape[:-2], *self.seq_lengths)
        return (self.recipe.batch, self.recipe.heads, *self.seq_lengths)

    def to(self, device: torch.device | str) -> BlockMask:
        """The block mask with its blocks on another device. Tensors of its mask_mod stay where they are."""
        if self.has_blocks:
            return super().to(device)
        return LazyBlockMask(_replaced(self.recipe, moved_to=device))

    def _adjust(self, new_q_len: int, new_kv_len: int) -> Any:
        """The block mask cropped to smaller lengths, with the same mask_mod."""
        if self.has_blocks or new_q_len > self.seq_lengths[0] or new_kv_len > self.seq_lengths[1]:
            return super()._adjust(new_q_len, new_kv_len)
        return LazyBlockMask(_replaced(self.recipe, seq_lengths=(new_q_len, new_kv_len)))


def _replaced(recipe: Recipe, **fields: Any) -> Recipe:
    return Recipe(**{**vars(recipe), **fields})


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: Any = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """A BlockMask of a mask function, without evaluating it: the kernels do that.

    The arguments are those of ``torch.nn.attention.flex_attention.create_block_mask`` of the installed version. All but
    the first five matter only for the blocks, which are computed, by PyTorch's function, when something reads them:
    ``print``, ``sparsity``, ``to_dense``, indexing, ``as_tuple``, or another implementation.

    Args:
        mask_mod: a function ``mask_mod(b, h, q_idx, kv_idx) -> bool``. Queries and keys count from 0.
        B: the batch size; None or 1 for any.
        H: the number of query heads; None or 1 for any. With 1, mask_mod is still given each query's b and h.
        Q_LEN: the number of queries.
        KV_LEN: the number of keys.
        device: of the blocks; None means the current accelerator, or the CPU.
        BLOCK_SIZE: the size of a block, or (queries, keys).
        _compile: whether PyTorch compiles the computation of the blocks.
        separate_full_blocks: whether full blocks are listed by themselves (PyTorch 2.13).
        compute_dq_write_order: whether to add what PyTorch's own FLASH backward reads (PyTorch 2.13).
        dq_kv_order: belongs to the previous argument.

    Returns:
        A ``torch.nn.attention.flex_attention.BlockMask``. If the mask_mod captures tensors that are written in place,
        calls see what is written as long as no blocks have been computed.

    Raises:
        TypeError: mask_mod is not a function of four arguments, or a length is not an int.
        ValueError: a size is negative, BLOCK_SIZE is not positive, or the installed PyTorch lacks an option.
    """
    check_mod("mask_mod", mask_mod, ("b", "h", "q_idx", "kv_idx"))
    for name, size in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN), ("B", B), ("H", H)):
        _check_size(name, size, optional=name in "BH")
    options = {
        "_compile": _compile,
        "separate_full_blocks": separate_full_blocks,
        "compute_dq_write_order": compute_dq_write_order,
        "dq_kv_order": dq_kv_order,
    }
    defaults = {"_compile": False, "separate_full_blocks": True, "compute_dq_write_order": False, "dq_kv_order": True}
    given = {name: value for name, value in options.items() if value is not defaults[name]}
    for name in given:
        if name not in _ACCEPTED.parameters:
            raise ValueError(f"create_block_mask: PyTorch {torch.__version__} has no option {name}")
    batch, heads = (1 if size is None else size for size in (B, H))
    return LazyBlockMask(Recipe(mask_mod, batch, heads, (Q_LEN, KV_LEN), device, _block_size(BLOCK_SIZE), given))


create_block_mask.__signature__ = _ACCEPTED  # type: ignore[attr-defined]


def _check_size(name: str, size: Any, optional: bool) -> None:
    if size is None and optional:
        return
    if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
        raise TypeError(f"{name} must be an int{' or None' * optional}, got {size!r}")
    if size < 0:
        raise ValueError(f"{name} must be at least 0, got {size}")


def _block_size(size: Any) -> tuple[int, int]:
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sizes) != 2 or not all(isinstance(each, int) and each > 0 for each in sizes):
        raise ValueError(f"BLOCK_SIZE must be a positive int or two of them, (queries, keys), got {size!r}")
    return sizes
