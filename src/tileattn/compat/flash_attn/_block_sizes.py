"""The number of keys in a tile of flash-attn's forward kernel. flash-attn's tests need it to read its ``S_dmask``."""

from __future__ import annotations

import torch


def get_block_size_n(device: torch.device | str | int, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys in a tile of the forward kernel that flash-attn 2.8 selects, which is unrelated to tileattn's tiles.

    tileattn's ``S_dmask`` holds probabilities, so its readers do not need the tiles.

    Args:
        device: where the call runs; a device other than CUDA counts as sm_80.
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
        # sm_86 and sm_89 have less shared memory: there flash-attn uses large tiles only for causal calls.
        large = not is_dropout and (is_causal or not _has_little_shared_memory(device))
        return 64 if large else 32
    return 64


def _has_little_shared_memory(device: torch.device | str | int) -> bool:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return major == 8 and minor > 0
