"""Whether something else uses the device: times that are measured beside other work are too long."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import torch

# Of the device's time, used by others, from which a run says so.
BUSY = 0.1
LOOK_SECONDS = 0.3
# Until a busy device is looked at again: longer than what nvidia-smi's figure reaches back.
AGAIN_SECONDS = 1.2
STAT = Path("/proc/stat")


def busy_share(device: torch.device) -> float | None:
    """The share of the device's time that is used now, 0 to 1. None if this system does not say.

    To be called while this process does not use the device itself. A CPU is the cores that this process may run on,
    watched for `LOOK_SECONDS`. A GPU is what nvidia-smi reports, over its last second at most. That second may hold
    work that this process, or one before it, has just finished. So a busy device is looked at twice, and the smaller
    share counts.
    """
    share = _share(device)
    if share is None or share < BUSY:
        return share
    time.sleep(AGAIN_SECONDS)
    again = _share(device)
    return share if again is None else min(share, again)


def _share(device: torch.device) -> float | None:
    return _gpu_share(device) if device.type == "cuda" else _cpu_share()


def _cpu_share() -> float | None:
    if not STAT.exists():
        return None
    before = _core_ticks(STAT.read_text())
    time.sleep(LOOK_SECONDS)
    after = _core_ticks(STAT.read_text())
    mine = [core for core in os.sched_getaffinity(0) if core in before and core in after]
    busy, total = (sum(after[core][i] - before[core][i] for core in mine) for i in range(2))
    return busy / total if total else None


def _core_ticks(stat: str) -> dict[int, tuple[int, int]]:
    """Busy ticks and all ticks of each core since the system started, from the text of /proc/stat."""
    ticks = {}
    for line in stat.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name != "cpu":
            # user nice system idle iowait irq softirq steal; what follows is counted in user and nice already.
            numbers = [int(count) for count in counts[:8]]
            ticks[int(name[3:])] = (sum(numbers) - numbers[3] - numbers[4], sum(numbers))
    return ticks


def _gpu_share(device: torch.device) -> float | None:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    query = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):  # an AMD GPU, or a driver that hangs
        return None
    answer = done.stdout.strip()
    return int(answer) / 100 if done.returncode == 0 and answer.isdecimal() else None
