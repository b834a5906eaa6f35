"""The kernel for dk and dv beside that for dq, on two streams, where another kernel than the main one computes dq.

Both read what prepare.py leaves, and neither writes what the other reads or writes. One after another, each ends with
multiprocessors that have no block left: 1 to 10 % of the pass (docs/design/backward.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

from ....call.facts import CAUSAL, BackwardCall
from ....variant.program import program
from .defaults import MainConfig
from .hopper.config import HopperBackwardConfig, HopperWideConfig

# Operations of a pass below which it stays on one stream: 100 us at 500 TFLOPS. Events and another stream take the host
# about 10 us.
LEAST_WORK = 5e10
PLACES = 16  # for which second streams are kept

# For each device, stream and thread the second stream. Streams come from PyTorch's pool, which keeps them for ever.
_seconds: dict[Hashable, torch.cuda.Stream] = {}


def runs_beside(call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size) -> bool:
    """Whether two kernels with all the work of a pass are worth two streams.

    That is in calls whose work is known, dense with all keys or a causal mask, of the Hopper schedules, where it was
    measured, from :data:`LEAST_WORK` on.

    Args:
        config: of the main kernel.
        q_shape, k_shape: (batch, seqlen, heads, head_dim).
    """
    forward = call.forward
    known = program(forward.variant).allows is None or forward.variant == CAUSAL
    if forward.packed or not known or not isinstance(config, (HopperBackwardConfig, HopperWideConfig)):
        return False
    batch, seqlen_q, heads, _ = q_shape
    scores = batch * heads * _visible(seqlen_q, k_shape[1], forward.variant == CAUSAL)
    # S twice, dQ and dK; dP twice, and dV.
    return 2 * scores * (4 * forward.head_dim + 3 * forward.head_dim_v) >= LEAST_WORK


def _visible(seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """The scores that a head computes, without those that a causal mask hides."""
    if not causal:
        return seqlen_q * seqlen_k
    rows = min(seqlen_q, seqlen_k)  # the last query sees all keys, each before it one less
    return rows * seqlen_k - rows * (rows - 1) // 2


def launch_beside(here: Callable[[], None], there: Callable[[], None], device: torch.device) -> None:
    """Launches `here` on the device's current stream, then `there` on a second one, as if both were on the current one.

    Both come after all that is on the current stream, and all that follows there comes after both. So memory that is
    freed afterwards may be used again on the current stream at once, and a CUDA graph that captures this stream
    captures both. Neither may allocate memory, which would belong to the second stream.
    """
    if device.type != "cuda":
        here()
        there()
        return
    current = torch.cuda.current_stream(device)
    second = _second(current)
    second.wait_stream(current)
    try:
        here()
        with torch.cuda.stream(second):
            there()
    finally:  # what has been launched uses memory that the caller of a failed launch frees
        current.wait_stream(second)


def _second(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """The second stream beside a thread's current one, which is that of no other: a capture may not see other work."""
    place = current.device_index, current.cuda_stream, threading.get_ident()
    found = _seconds.get(place)
    if found is None:
        if len(_seconds) >= PLACES:
            _seconds.clear()
        found = torch.cuda.Stream(current.device)
        if found == current:  # the pool gives each of its streams in turn
            found = torch.cuda.Stream(current.device)
        _seconds[place] = found
    return found
