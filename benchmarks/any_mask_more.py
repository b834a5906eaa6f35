"""FlashAttention-4's kernels beside any_mask.py's: FlexAttention's backend for them, and FA-4's own lists of blocks.

    python benchmarks/any_mask.py --json fa4.json --more flex-fa4,fa4 --names dilated,blocks --seqlens 16384

`flex-fa4` is `flex_attention(..., kernel_options={"BACKEND": "FLASH"})`, for any pattern. `fa4` is
`flash_attn.cute.flash_attn_func(..., block_sparse_tensors=...)`, for "blocks", with the lists of FlexAttention's block
mask. Both need the package flash-attn-4. Where one refuses a pass, the row holds the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MORE = ("flex-fa4", "fa4")
Passes = dict[str, Callable[[], Any]]
MakePasses = Callable[[Callable[[], Tensor], Sequence[Tensor], Tensor], Passes]


def runs_of(name: str, given: Sequence[Tensor], mask: Any, passes: MakePasses) -> Passes:
    """Both passes of one of `MORE`.

    Args:
        given: q, k, v and the gradient of o: (1, seqlen, heads, head_dim).
        mask: FlexAttention's block mask.
        passes: makes both passes of a forward pass.
    """
    return _flex(given, mask, passes) if name == "flex-fa4" else _fa4(given, mask, passes)


def those_that_run(name: str, runs: Passes) -> tuple[Passes, dict[str, str]]:
    """The passes that run, after one call each, and the reasons of the others."""
    working: Passes = {}
    reasons: dict[str, str] = {}
    for work, run in runs.items():
        try:
            run()
            torch.cuda.synchronize()
            working[work] = run
        except Exception as error:  # whatever a compiler raises; the other passes go on
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reasons[f"{name} {work}"] = f"{type(error).__name__}: {' | '.join(lines[:3])[:300]}"
    return working, reasons


def _flex(given: Sequence[Tensor], mask: Any, passes: MakePasses) -> Passes:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    q, k, v, do = (x.detach().transpose(1, 2).requires_grad_(i < 3) for i, x in enumerate(given))
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    options = {"BACKEND": "FLASH"}
    return passes(lambda: compiled(q, k, v, block_mask=mask, kernel_options=options), (q, k, v), do.detach())


def _fa4(given: Sequence[Tensor], mask: Any, passes: MakePasses) -> Passes:
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    q, k, v, do = (x.detach().requires_grad_(i < 3) for i, x in enumerate(given))
    rows = BlockSparseTensorsTorch(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, block_size=mask.BLOCK_SIZE
    )
    columns = BlockSparseTensorsTorch(
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices, block_size=mask.BLOCK_SIZE
    )

    def forward() -> Tensor:
        found = flash_attn_func(q, k, v, block_sparse_tensors=rows, block_sparse_tensors_bwd=columns)
        return found[0] if isinstance(found, tuple) else found

    return passes(forward, (q, k, v), do.detach())
