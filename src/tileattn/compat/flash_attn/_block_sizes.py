"""How many keys a tile of flash-attn's forward kernel has: its tests ask, to read the ``S_dmask`` that it returns."""

from __future__ import annotations

import torch


def get_block_size_n(device: torch.device | str | int, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys in a tile of the forward kernel that flash-attn 2.8 takes. It says nothing of tileattn's kernels.

    The ``S_dmask`` returned here needs no conversion by these tiles: it holds probabilities.

    Args:
        device: where the call runs; a device that is no CUDA device counts as sm_80.
        head_dim: 1 to 256.
        is_dropout: whether dropout_p is above 0.
        is_causal: whether the call is causal.

    Raises:
        ValueError: head_dim is not in 1 to 256.
    """
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim must lie in 1 .. 256, as in flash-attn, got {head_dim}")
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if 96 < head_dim <= 128:
        # Kernels of sm_86 and sm_89, which have less shared memory, take larger tiles only where half are skipped.
        large = not is_dropout and (is_causal or not _has_little_shared_memory(device))
        return 64 if large else 32
    return 64


def _has_little_shared_memory(device: torch.device | str | int) -> bool:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return major == 8 and minor > 0
