"""PyTorch's context_parallel, for plain causal attention (SDPA's kernels) and for masks (FlexAttention).

All names of torch that are private or a prototype are taken here, when they are needed, as torch 2.11 and 2.13 have
them. A name that is missing is an `Unavailable`, which the tables show.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
BALANCERS = "torch.distributed.tensor.experimental._context_parallel._load_balancer"
ROTATE_METHODS = ("allgather", "alltoall")
KERNELS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}
SEQ_DIM = 2  # of (batch, heads, rows, head_dim)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Unavailable(NotImplementedError):
    """This torch, or this device, does not have it."""


def _name(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"not available in torch {torch.__version__}: {module}.{name}") from error


def mesh(device_type: str, ranks: int) -> Any:
    """A DeviceMesh of all ranks."""
    return _name("torch.distributed.device_mesh", "init_device_mesh")(device_type, (ranks,))


# --- The ring over SDPA's kernels ---


def check_ring(device_type: str) -> None:
    """Raises Unavailable where PyTorch's ring has no kernel."""
    if device_type != "cuda":
        raise Unavailable("PyTorch's ring has kernels for GPUs only")
    for name in ("context_parallel", "set_rotate_method", "_cp_options"):
        _name(CONTEXT_PARALLEL, name)


def ring_tokens(seqlen: int, rank: int, ranks: int) -> Tensor:
    """The tokens of a rank, as context_parallel shards a causal sequence."""
    if seqlen % (2 * ranks):
        raise Unavailable(f"context_parallel balances lengths that are multiples of {2 * ranks}, got {seqlen}")
    return _shard(_name(BALANCERS, "_HeadTailLoadBalancer")(seqlen, ranks, "cpu")._generate_indices(), rank, ranks)


@contextmanager
def ring(device_mesh: Any, seqlen: int, kernel: str, method: str) -> Iterator[None]:
    """Inside, SDPA takes shards of a sequence. kernel: a key of `KERNELS`; method: how keys go round."""
    context_parallel, options = (_name(CONTEXT_PARALLEL, name) for name in ("context_parallel", "_cp_options"))
    options.enable_load_balance = True  # FlexAttention's path switches it off for the whole process
    _name(CONTEXT_PARALLEL, "set_rotate_method")(method)
    buffer = torch.empty(seqlen, device=device_mesh.device_type)  # there must be one to shard
    sdpa_kernel = _name("torch.nn.attention", "sdpa_kernel")
    backend = getattr(_name("torch.nn.attention", "SDPBackend"), KERNELS[kernel])
    failure: Exception | None = None
    with (
        context_parallel(device_mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}),
        sdpa_kernel(backend),
    ):
        try:
            yield
        except Exception as error:  # left by an exception, torch 2.11 would keep SDPA patched
            failure = error
    if failure is not None:
        raise failure


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call inside `ring`, which patches F, of (batch, heads, rows, head_dim)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


# --- FlexAttention ---


class FlexParallel:
    """FlexAttention over the ranks of a mesh: keys and values are gathered, and a balancer orders the tokens.

    Args:
        device_mesh: of all ranks.
        mask_mod: of whole positions.
        seqlen: tokens of the whole sequence.
        balancer: what `document_balancer` or `time_balancer` returned, or None for shards in order.

    Attributes:
        tokens: those of this rank, in the order of its rows.
    """

    def __init__(self, device_mesh: Any, mask_mod: MaskMod, seqlen: int, balancer: Any) -> None:
        rank, ranks = device_mesh.get_local_rank(), device_mesh.size()
        _name(CONTEXT_PARALLEL, "_cp_options").enable_load_balance = balancer is not None
        whole = torch.arange(seqlen)[None] if balancer is None else balancer._generate_indices().cpu()
        self.tokens = _shard(whole, rank, ranks)
        make_mask = _name(CONTEXT_PARALLEL, "_create_cp_block_mask")
        self.block_mask = make_mask(mask_mod, 1, 1, seqlen, seqlen, device_mesh, balancer)
        style = _name(CONTEXT_PARALLEL, "_ContextParallel")
        parallelize = _name("torch.distributed.tensor.parallel", "parallelize_module")
        self.module = parallelize(_Flex(), device_mesh, style(seq_dim=SEQ_DIM, attention_type=style.AttentionType.FLEX))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o of this rank's rows, (batch, heads, rows, head_dim)."""
        out: Tensor = self.module(q, k, v, block_mask=self.block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return out


class _Flex(torch.nn.Module):
    """flex_attention, compiled for the shapes of one case."""

    def __init__(self) -> None:
        super().__init__()
        flex = _name("torch.nn.attention.flex_attention", "flex_attention")
        self.compiled = torch.compile(flex, dynamic=False, fullgraph=True)

    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.compiled(*tensors, **options)
        return out


def document_balancer(lengths: Sequence[int], ranks: int, device: torch.device) -> Any:
    """Cuts each document over all ranks."""
    if wrong := [length for length in lengths if length % (2 * ranks)]:
        raise Unavailable(f"the document balancer takes multiples of {2 * ranks}, got a document of {wrong[0]}")
    return _name(BALANCERS, "_PerDocumentHeadTailLoadBalancer")([list(lengths)], ranks, device)


def time_balancer(mask_mod: MaskMod, seqlen: int, ranks: int, device: torch.device) -> Any:
    """Deals blocks of queries by the number of blocks of keys that they see."""
    make = torch.compile(_name("torch.nn.attention.flex_attention", "create_block_mask"), dynamic=False)
    return _name(BALANCERS, "_PTRRLoadBalancer")(make(mask_mod, 1, 1, seqlen, seqlen, device=device), ranks)


def forget_compiled() -> None:
    """Empties Dynamo's cache: after eight shapes it would fall back to a path 50 times slower."""
    _name("torch._dynamo", "reset")()


def _shard(indices: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's part of indices (1, seqlen)."""
    size = indices.shape[1] // ranks
    return indices[0, rank * size : (rank + 1) * size].long()
