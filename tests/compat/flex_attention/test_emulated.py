"""FlexAttention's masks in TileLang's generated code for sm_80, forward and backward, run on the CPU by emulate().

The tiles that the kernels visit are those within the bounds of a BlockMask's blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

pytest.importorskip("tilelang")

from tests.compat.flex_attention.test_block_masks import BATCH, HEADS, causal, random_blocks
from tests.tools.flex_oracle import table_of
from tileattn import FunctionMask
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.inputs import Inputs
from tileattn.compat.flex_attention import create_block_mask
from tileattn.compat.flex_attention.blocks import mask_of
from tileattn.kernels.tilelang.backward import launch as backward_launch
from tileattn.kernels.tilelang.backward import library
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.kernel import forward_kernel
from tileattn.testing import (
    assert_accurate,
    assert_forward_accurate,
    eager_attention,
    eager_gradients,
    oracle_attention,
    oracle_gradients,
)
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++")]

MASKS = {
    "blocks of any kind": random_blocks((2, 4), (70, 150), (16, 8)),
    "more queries than keys": random_blocks((1, 1), (150, 70), (64, 16), seed=1),
    "function": create_block_mask(causal, None, None, 70, 150, device="cpu"),
}


@pytest.mark.parametrize("name", MASKS)
def test_both_passes(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block_mask = MASKS[name]
    leaves = dict(zip("qkv", inputs(block_mask)))
    standard = (*leaves.values(), by_table(block_mask))
    o, lse, do, grads = run(block_mask, leaves, monkeypatch, tmp_path)
    assert_forward_accurate(name, (o, lse), oracle_attention(*standard), eager_attention(*standard))
    oracle, sizes = oracle_gradients(leaves, do, None, *standard)
    eager = eager_gradients(leaves, do, None, *standard)
    for leaf in leaves:
        of_eager = [each[leaf] for each in eager]
        assert_accurate(f"d{leaf}", grads[leaf], oracle[leaf], of_eager, gradient=True, size=sizes[leaf])


def inputs(block_mask: BlockMask) -> list[Tensor]:
    """q, k and v (batch, seqlen, heads, head_dim) in float16."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = block_mask.seq_lengths
    shapes = [(BATCH, length, HEADS, 16) for length in (rows, keys, keys)]
    return [torch.randn(shape, generator=generator).half().requires_grad_() for shape in shapes]


def by_table(block_mask: BlockMask) -> FunctionMask:
    """The same mask by the description of the format, of tileattn's positions."""
    table, (rows, keys) = table_of_any(block_mask), block_mask.seq_lengths
    return FunctionMask(lambda b, h, q, k: table[b, h, q - (keys - rows), k])


def table_of_any(block_mask: BlockMask) -> Tensor:
    if not hasattr(block_mask, "recipe"):
        return table_of(block_mask, BATCH, HEADS)
    rows, keys = map(torch.arange, block_mask.seq_lengths)
    return causal(0, 0, rows[:, None], keys).expand(BATCH, HEADS, -1, -1)  # type: ignore[no-any-return]


def run(
    block_mask: BlockMask, leaves: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """o, lse, the gradient of o, and those of q, k and v."""

    def kernels(call: BackwardCall) -> Any:
        made = {name: Kernel(kernel(call, name), folder) for name in library.kernel_names(call)}
        return library.Kernels(made["prepare"], made["main"], made.get("finish"), made.get("queries"))

    monkeypatch.setattr(
        forward_launch, "forward_function", lambda call, config: Kernel(forward_kernel(call, config), folder)
    )
    monkeypatch.setattr(backward_launch, "backward_kernels", kernels)
    q, k, v = (x.detach() for x in leaves.values())
    variant, operands = encode(mask_of(block_mask, q.transpose(1, 2), k.transpose(1, 2)), ())
    call = AttentionCall(torch.float16, 16, 16, variant, needs_grad=True, arch=ARCH)
    given, scale = Inputs(q, k, v, None, operands), 0.25
    o, lse = forward_launch.prepare(call, q.shape, k.shape, scale)(given)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).half()
    needs = (True, True, True, False, *(False for _ in operands.tensors))
    backward = backward_launch.prepare_backward(BackwardCall(call, needs), q.shape, k.shape, scale)
    dq, dk, dv, *_ = backward(given, o, lse, do, None)
    return o, lse, do, {"q": dq, "k": dk, "v": dv}
