"""Whether PyTorch's context parallelism is active; the only file that uses PyTorch's private names for it.

Inside ``torch.distributed.tensor.experimental.context_parallel``, which accelerate uses as well, tensors are shards of
the sequence, and PyTorch's scaled_dot_product_attention runs a ring over the ranks. Any other attention would compute
the rank's own shard only, and say nothing. The names are those of torch 2.13.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..variant.key import constant_under_compile


@constant_under_compile
def is_active() -> bool:
    """Whether the calls of this process are in a context-parallel region of PyTorch.

    The region gives DTensor handlers of its own for the flash operators, and takes them away at its end.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    return flash in module.DTensor._op_dispatcher._custom_op_handlers


def refuse_shards(function: str) -> None:
    """Raises NotImplementedError in a context-parallel region: `function` would attend to this rank's shard only."""
    if is_active():
        raise NotImplementedError(
            f"{function} in PyTorch's context_parallel would see this rank's shard of the sequence only: call "
            f'torch.nn.functional.scaled_dot_product_attention after activate_flash_attention_impl("tileattn"), which '
            f"takes plain causal attention, or use tileattn.parallel.Plan, which takes masks"
        )
