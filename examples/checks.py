"""Checks of the examples' options. A wrong option gives a one-line error before training starts, not a traceback."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from typer import BadParameter

PICTURES = (".png", ".svg", ".pdf")


def check_device(name: str) -> None:
    """Raises unless a tensor can be created and read on the device of this name."""
    try:
        torch.zeros(1, device=name).item()
    except (AssertionError, ImportError, RuntimeError) as error:  # AssertionError: a PyTorch without CUDA
        reason = str(error).splitlines()[0]
        raise BadParameter(f"--device must be one of this machine, such as cpu or cuda, got {name}: {reason}") from None


def check_rate(rate: float) -> None:
    """Raises unless a learning rate is positive and finite."""
    if not 0 < rate < math.inf:
        raise BadParameter(f"--rate must be a positive number, got {rate}")


def check_picture(path: Path) -> None:
    """Raises unless a picture can be drawn and written to `path`; creates the folder."""
    if path.suffix not in PICTURES:
        raise BadParameter(f"--out must end in {', '.join(PICTURES)}, got {path}")
    check_writable("--out", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadParameter('the picture needs matplotlib: pip install ".[plot]"') from None


def check_writable(option: str, path: Path) -> None:
    """Raises unless a file can be written to `path`; creates the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadParameter(f"{option} {path}: its folder cannot be made: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadParameter(f"{option} {path} cannot be written")
