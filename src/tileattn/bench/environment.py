"""The provenance of a result: the device, the versions of the packages, and the commit of the code."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import tileattn

# Distributions whose versions are recorded where they are installed.
PACKAGES = ("tilelang", "triton", "flash-attn-4")


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's name as its maker gives it, such as "NVIDIA H200"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_name()} ({threads} thread{'s' * (threads > 1)})"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())):
        return match[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions by name: tileattn, torch, Python, the installed `PACKAGES`, and torch's CUDA and cuDNN."""
    by_name = {"tileattn": tileattn.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_name[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        by_name["cuda"] = torch.version.cuda
    if torch.backends.cudnn.is_available():
        by_name["cudnn"] = str(torch.backends.cudnn.version())
    return by_name


def commit() -> str | None:
    """The commit of this source tree, with "-dirty" if it has changes; None outside a git checkout."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """The output of git in the checkout that tracks this file; None outside a checkout, or without git."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        if subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True).returncode:
            return None
        return subprocess.run([*git, *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except FileNotFoundError:
        return None
