"""The ladder's interface to dispatch: it parses backend names, refuses calls with a reason, and launches kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...call.facts import CAUSAL, AttentionCall
from ...call.inputs import Inputs
from ...installation import pip_install
from ..packages import asked_for_any_machine
from .compile import has_compiler
from .launch import launcher
from .rungs import (
    ACCUMULATIONS,
    HEAD_DIMS,
    LARGE_HEAD_DIMS,
    LAYOUTS,
    NAME,
    ORIGINAL_NAMES,
    ORIGINAL_OPTIONS,
    RUNGS,
    STAGES,
    Kernel,
    RungOptions,
    Tiles,
)
from .tiles import candidates

DTYPES = (torch.float16, torch.bfloat16)
# KiB of shared memory that a thread block may use, by compute capability; unknown ones count as the smallest.
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
ACCEPTED = (
    f"{NAME!r} or '{NAME}:RUNG,stages=N,acc=A,smem=L,tiles=T', each part optional, with RUNG one of "
    f"{', '.join(RUNGS)}; N one of {', '.join(map(str, STAGES))}; A one of {', '.join(ACCUMULATIONS)}; L one of "
    f"{', '.join(LAYOUTS)}; T one of the rung's candidates, block_M x block_N x warps x blocks, such as 128x64x4x2. "
    f"Also the names of flash-attention-mma: {', '.join(ORIGINAL_NAMES)}, and split-q+share-kv+acc-f32+stage2"
)


@dataclass(frozen=True)
class Choice:
    """The options in a backend's name. None: chosen by the call's head dim."""

    rung: str | None = None
    stages: int = 2
    acc: str = "fp32"
    smem: str = "swizzle"
    tiles: Tiles | None = None

    def options(self, head_dim: int) -> RungOptions:
        """The rung and its options for a head dim."""
        return RungOptions(self.rung or best_rung(head_dim, self.acc), self.stages, self.acc, self.smem)

    def kernel(self, call: AttentionCall) -> Kernel:
        """The kernel for a call that `refusal` accepts."""
        options = self.options(call.head_dim)
        return Kernel(options, call.dtype, call.head_dim, self.tiles or candidates(options, call.head_dim)[0])


def best_rung(head_dim: int, acc: str) -> str:
    """The fastest rung on an H200; measured at head dims 64, 128 and 512 (docs/ladder.md).

    Keeping Q in registers (shared_qkv) is faster only if float16 sums leave registers for Q beside O and S. Computing
    the next tile's scores ahead (pipelined) is faster only if the head dim is small as well.
    """
    if head_dim > HEAD_DIMS[-1]:
        return "tiled_d"
    if acc == "fp16":
        return "pipelined" if head_dim == 64 else "shared_qkv"
    return "shared_kv"


def parse(options: str) -> Choice:
    """Parses the part of a backend's name after "mma:".

    Raises:
        ValueError: the part is malformed; the message shows the accepted form.
    """
    choice = Choice()
    given: set[str] = set()
    for part in _from_original(options).split(",") if options else ():
        name, _, value = part.partition("=") if "=" in part else ("rung", "", part)
        parsed = _parse_one(name, value)
        if parsed is None or name in given:
            raise ValueError(f"backend must be {ACCEPTED}; got {part!r} in {f'{NAME}:{options}'!r}")
        given.add(name)
        choice = dataclasses.replace(choice, **{name: parsed})
    return choice


def _from_original(options: str) -> str:
    """Options with the rung as flash-attention-mma writes it, "split-q+share-kv+stage1", in our form; others as given.

    Its tags name stages, float32 accumulation and swizzled tiles. What they do not name has our defaults: `acc=fp16`
    and `smem=padded` have no tag. It swizzles Q, or Q and K, or all three; ours are swizzled all or none.
    """
    first, comma, rest = options.partition(",")
    tags = first.split("+")
    rungs = [tag for tag in tags if tag not in ORIGINAL_OPTIONS]
    if len(rungs) == 2 and rungs[0] == "split-q" and rungs[1] not in ("split-q", "split-kv"):
        del rungs[0]
    if len(rungs) != 1 or rungs[0] not in ORIGINAL_NAMES:
        return options
    named = [ORIGINAL_OPTIONS[tag] for tag in tags if tag in ORIGINAL_OPTIONS]
    return ",".join([ORIGINAL_NAMES[rungs[0]], *named]) + comma + rest


def _parse_one(name: str, value: str) -> str | int | Tiles | None:
    """The value of an option; None if the option does not exist or does not have this value."""
    choices = {"rung": RUNGS, "stages": STAGES, "acc": ACCUMULATIONS, "smem": LAYOUTS}
    if name == "tiles":
        sizes = value.split("x")
        return Tiles(*map(int, sizes)) if len(sizes) in (4, 5) and all(size.isdecimal() for size in sizes) else None
    return next((choice for choice in choices.get(name, ()) if str(choice) == value), None)


def refusal(choice: Choice, call: AttentionCall) -> str | None:
    """The reason why the ladder cannot run a call; None if it can."""
    if not (call.arch.startswith("sm_") and int(call.arch[3:].rstrip("af")) >= 80):
        return f"device {call.arch!r} is no NVIDIA GPU from sm_80 on"
    if not (asked_for_any_machine() or has_compiler()):
        return f"cuda-core is not installed ({pip_install('mma')})"
    if call.needs_grad:
        return "it has no backward pass (an input requires grad)"
    if call.dtype not in DTYPES:
        return f"dtype must be float16 or bfloat16, not {call.dtype}"
    if choice.acc == "fp16" and call.dtype != torch.float16:
        return f"acc=fp16 takes float16 only, not {call.dtype}"
    if call.variant not in ("", CAUSAL):
        return "it knows no mask but Causal, and no score modification"
    if call.sink or call.dropout:
        return f"it has no {'sink' if call.sink else 'dropout'}"
    if call.packed:
        return "it does not take packed sequences"
    if not call.aligned:
        return "q, k and v must begin at, and step by, multiples of 16 bytes"
    return _refusal_sizes(choice, call)


def _refusal_sizes(choice: Choice, call: AttentionCall) -> str | None:
    dims = HEAD_DIMS + LARGE_HEAD_DIMS
    if choice.rung is not None:
        dims = LARGE_HEAD_DIMS if choice.rung == "tiled_d" else HEAD_DIMS
    for name, size in (("head_dim", call.head_dim), ("head_dim_v", call.head_dim_v)):
        if size not in dims:
            return f"{name} must be one of {', '.join(map(str, dims))}, not {size}"
    if call.head_dim != call.head_dim_v:
        return f"head_dim and head_dim_v must be equal, not {call.head_dim} and {call.head_dim_v}"
    options = choice.options(call.head_dim)
    tiles = candidates(options, call.head_dim)
    if choice.tiles is not None and choice.tiles not in tiles:
        return f"tiles of {options} at head_dim {call.head_dim} must be one of {', '.join(map(str, tiles))}"
    needed, available = choice.kernel(call).shared_memory(), _shared_memory(call.arch)
    if needed > available:
        return f"a block needs {needed} bytes of shared memory, and has {available} on {call.arch}"
    return None


def _shared_memory(arch: str) -> int:
    return SHARED_KIB.get(int(arch[3:].rstrip("af")), min(SHARED_KIB.values())) * 1024


def reservation(choice: Choice, call: AttentionCall) -> str:
    """The reason why the ladder runs only calls that name it."""
    return f"it is there to learn from: name it, backend={NAME!r}"


def prepare(
    choice: Choice, call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    batch, seqlen_q, heads, _ = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    kernel = choice.kernel(call)
    blocks = -(-seqlen_q // kernel.tiles.block_M) * heads * batch
    sizes = (int(call.variant == CAUSAL), seqlen_q, seqlen_k, heads, heads // kv_heads)

    def forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, *_ = inputs
        if blocks == 0 or seqlen_k == 0:
            return torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full(
                (batch, heads, seqlen_q), -torch.inf, dtype=torch.float32
            )
        o = q.new_empty(q_shape)
        lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32) if call.return_lse else None
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0 if lse is None else lse.data_ptr())
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        launcher(kernel, call.arch, q.device.index)(blocks, *addresses, *sizes, *strides, float(scale))
        return o, lse

    return forward
