"""`tileattn.profile`: speed and peak memory of a call, and the share of the machine's ceilings that it reaches.

>>> q, k, v = (torch.randn(4, 4096, 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
>>> flops = 4 * 4 * 16 * 4096**2 * 128
>>> print(tileattn.profile(tileattn.attention, q, k, v, flops=flops))
>>> print(tileattn.profile_all({"tileattn": tileattn.attention, "naive": naive}, q, k, v, flops=flops))

The benchmark uses the same methods: `tileattn.measure.timing` (on a GPU events around each call after the L2 cache has
been overwritten; on a CPU the wall clock), `memory` (peak bytes above the level before the call), `ceilings` (a matrix
product and a copy on this machine) and `rounds` (callables take turns, so that heat and drift affect all alike).
"""

from __future__ import annotations

import io
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median, quantiles
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tileattn.measure import ceilings, memory, rounds, timing
from tileattn.measure.ceilings import Ceiling
from tileattn.measure.units import human_bytes

DASH = "—"
# Longer names are folded in a table, so that the numbers beside them stay on a screen.
NAME_WIDTH = 48
# In which PyTorch multiplies matrices on any device; for another dtype, such as fp8, the ceiling is bfloat16's.
CEILING_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# On a CPU a ceiling is reached with less, and should not take seconds.
CPU_MATMUL_SIZE = 1024
CPU_COPIED_BYTES = 2**27
CEILING_EFFORT = timing.Effort(warmup_ms=20.0, measure_ms=40.0, rounds=3)


@dataclass(frozen=True)
class Profile:
    """The measurements of one callable.

    Attributes:
        name: Name of the callable.
        device: "cuda:0", "cpu", ...
        ms: Median milliseconds of a call.
        spread_ms: First and third quartile, in milliseconds.
        calls: Number of timed calls.
        peak_bytes: Most memory allocated at one time above the level before the call, with the result.
        flops, bytes: Floating-point operations and memory traffic of a call, as the caller gave them; else None.
        ceiling: Speeds of a matrix product and a copy on this machine; None where nothing is compared with them.
    """

    name: str
    device: str
    ms: float
    spread_ms: tuple[float, float]
    calls: int
    peak_bytes: int
    flops: float | None = None
    bytes: float | None = None
    ceiling: Ceiling | None = None

    @property
    def tflops(self) -> float | None:
        """10^12 FLOPs per second."""
        return None if self.flops is None else self.flops / self.ms / 1e9

    @property
    def tbps(self) -> float | None:
        """10^12 bytes per second."""
        return None if self.bytes is None else self.bytes / self.ms / 1e9

    @property
    def flops_fraction(self) -> float | None:
        """FLOP rate over that of the matrix product."""
        return None if self.tflops is None or self.ceiling is None else self.tflops / self.ceiling.matmul_tflops

    @property
    def bytes_fraction(self) -> float | None:
        """Bandwidth over that of the copy."""
        return None if self.tbps is None or self.ceiling is None else self.tbps / self.ceiling.copy_tbps

    def __str__(self) -> str:
        low, high = self.spread_ms
        parts = [
            f"{self.name} on {self.device}: {_ms(self.ms)} ms (quartiles {_ms(low)} to {_ms(high)}, {self.calls} calls)"
        ]
        parts.append(f"peak memory {human_bytes(self.peak_bytes)}")
        for rate, unit, fraction, of in (
            (self.tflops, "FLOPS", self.flops_fraction, "the matrix product's"),
            (self.tbps, "B/s", self.bytes_fraction, "the copy's"),
        ):
            if rate is not None:
                parts.append(rate_text(rate, unit) + ("" if fraction is None else f", {fraction:.0%} of {of}"))
        return "; ".join(parts)


@dataclass(frozen=True)
class Profiles:
    """The profiles of several callables, in the given order; `print` shows a table."""

    profiles: tuple[Profile, ...]

    def __getitem__(self, name: str) -> Profile:
        """The profile of a callable by its name."""
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise KeyError(f"{name!r} is not one of {', '.join(repr(profile.name) for profile in self.profiles)}")

    def __iter__(self) -> Iterator[Profile]:
        return iter(self.profiles)

    def table(self) -> Table:
        """For rich. Speeds are relative to the first."""
        first = self.profiles[0]
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=_on(first), title_justify="left"
        )
        table.add_column("", overflow="fold", max_width=NAME_WIDTH)
        for heading in ("ms", "quartiles", "speed", "memory", "rate", "of matmul", "bandwidth", "of copy"):
            table.add_column(heading, justify="right", no_wrap=True)
        for each in self.profiles:
            low, high = each.spread_ms
            table.add_row(
                Text(each.name),  # a name may have brackets, which rich reads as markup in a str
                _ms(each.ms),
                f"{_ms(low)} to {_ms(high)}",
                f"{first.ms / each.ms:.2f}×",
                human_bytes(each.peak_bytes),
                rate_text(each.tflops, "FLOPS"),
                _percent(each.flops_fraction),
                rate_text(each.tbps, "B/s"),
                _percent(each.bytes_fraction),
            )
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        # Wider than any table, which takes no more than its content needs. A notebook is no place for this text yet.
        Console(file=text, width=1000, color_system=None, force_jupyter=False).print(self.table())
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def profile(
    fn: Callable[..., object],
    *args: Any,
    flops: float | None = None,
    bytes: float | None = None,
    device: torch.device | str | None = None,
    effort: timing.Effort = timing.DEFAULT,
) -> Profile:
    """Measures ``fn(*args)``.

    Args:
        fn: Any callable; for keyword arguments, a lambda or `functools.partial`. It is called many times, so a call
            must not disturb the next one.
        *args: Its arguments.
        flops: Floating-point operations of a call, for the fraction of the ceiling. A product of (m, k) and (k, n)
            has 2 m n k.
        bytes: The least number of bytes that a call reads and writes, for the fraction of the ceiling.
        device: The device it runs on. Default: that of the first tensor among the arguments; the CPU without a GPU.
        effort: How long it is measured.

    Raises:
        TypeError: fn cannot be called, flops or bytes is not a number, or effort is not an Effort.
        ValueError: flops or bytes is not positive and finite, the device does not exist, or no argument is a tensor and
            `device` is not given on a machine with a GPU.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}")
    (one,) = profile_all({_name(fn): fn}, *args, flops=flops, bytes=bytes, device=device, effort=effort)
    return one


def profile_all(
    fns: Mapping[str, Callable[..., object]],
    *args: Any,
    flops: float | None = None,
    bytes: float | None = None,
    device: torch.device | str | None = None,
    effort: timing.Effort = timing.DEFAULT,
) -> Profiles:
    """Measures several callables on the same arguments, in turns.

    Args:
        fns: The callables by their names in the table.
        *args: The arguments of all of them.
        flops: Floating-point operations of a call, as for `profile`.
        bytes: The least number of bytes that a call reads and writes, as for `profile`.
        device: The device they run on, as for `profile`.
        effort: How long each is measured.
    """
    _check(fns, flops, bytes, effort)
    where = _device(args, device)
    calls = {name: partial(fn, *args) for name, fn in fns.items()}
    peaks = {}
    with current(where):
        for name, call in calls.items():
            call()  # compiles, and makes the workspaces that a call finds the next time
            peaks[name] = memory.peak_bytes(call, where)
        samples = _samples(list(calls.values()), where, effort)
    ceiling = None if flops is None and bytes is None else machine_ceiling(where, _dtype(args))
    return Profiles(
        tuple(
            Profile(name, str(where), median(ms), _quartiles(ms), len(ms), peaks[name], flops, bytes, ceiling)
            for name, ms in zip(calls, samples)
        )
    )


def machine_ceiling(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Ceiling:
    """Speeds of a matrix product of this dtype and of a copy on a device, measured once per process.

    Args:
        device: "cuda:0", "cpu", ...
        dtype: float16, bfloat16, float32 or float64; any other is replaced by bfloat16.
    """
    return _machine_ceiling(_known_device(device), dtype if dtype in CEILING_DTYPES else torch.bfloat16)


@lru_cache(maxsize=32)
def _machine_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    sizes = {} if device.type == "cuda" else {"size": CPU_MATMUL_SIZE, "copied": CPU_COPIED_BYTES}
    with torch.no_grad(), current(device):
        ceiling = ceilings.measure(str(dtype).removeprefix("torch."), device, CEILING_EFFORT, dtype=dtype, **sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(ceiling, when="beside the calls")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device, so that events are recorded on its stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check(
    fns: Mapping[str, Callable[..., object]], flops: float | None, bytes: float | None, effort: timing.Effort
) -> None:
    if not isinstance(fns, Mapping):
        raise TypeError(f"fns must be a mapping from names to callables, got {type(fns).__name__}")
    if not fns:
        raise ValueError("fns must name at least one callable, got none")
    for name, fn in fns.items():
        if not isinstance(name, str):
            raise TypeError(f"fns must have names of type str, got {name!r}")
        if not callable(fn):
            raise TypeError(f"{name} must be callable, got {type(fn).__name__}")
    _check_count("flops", flops)
    _check_count("bytes", bytes)
    if not isinstance(effort, timing.Effort):
        raise TypeError(f"effort must be a tileattn.measure.timing.Effort, got {effort!r}")


def _check_count(what: str, count: Any) -> None:
    if count is None:
        return
    if not isinstance(count, numbers.Real):
        raise TypeError(f"{what} must be a number or None, got {count!r}")
    if not 0 < _float(count) < math.inf:
        raise ValueError(f"{what} must be positive and finite, or None, got {_float(count):g}")


def _float(count: Any) -> float:
    """Infinity for an integer that is larger than any float."""
    try:
        return float(count)
    except OverflowError:
        return math.inf if count > 0 else -math.inf


def _device(args: Sequence[Any], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return _known_device(device)
    tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
    if tensor is None and torch.cuda.is_available():
        raise ValueError("device must be given where no argument is a tensor, for a GPU is timed otherwise than a CPU")
    return torch.device("cpu") if tensor is None else _known_device(tensor.device, "the first tensor's device")


def _known_device(device: torch.device | str, name: str = "device") -> torch.device:
    """The CPU or a GPU that is there."""
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        known = None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = known is not None and (known.index or 0) < {"cpu": 1, "cuda": count}.get(known.type, 0)
    if known is None or not here:
        accepted = "cpu" + (f", cuda, cuda:0 to cuda:{count - 1}" if count else " (PyTorch finds no GPU here)")
        raise ValueError(f"{name} must be one of this machine, got {str(device)!r}; accepted: {accepted}")
    return _indexed(known)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _dtype(args: Sequence[Any]) -> torch.dtype:
    """Dtype of the first floating-point tensor among the arguments."""
    floats = (each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point())
    return next(floats, torch.float32)


def _samples(calls: Sequence[Callable[[], object]], device: torch.device, effort: timing.Effort) -> list[list[float]]:
    """Milliseconds of each callable, which take turns."""
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(effort.rounds):
        for index in rounds.order(len(calls), number):
            samples[index] += timing.sample_ms(calls[index], device, effort)
    return samples


def _quartiles(ms: Sequence[float]) -> tuple[float, float]:
    if len(ms) < 2:
        return ms[0], ms[0]
    low, _, high = quantiles(ms, n=4, method="inclusive")
    return low, high


def _name(fn: Callable[..., object]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _on(profile: Profile) -> str:
    ceiling = profile.ceiling
    if ceiling is None:
        return f"on {profile.device}"
    product, copy = rate_text(ceiling.matmul_tflops, "FLOPS"), rate_text(ceiling.copy_tbps, "B/s")
    return f"on {profile.device}: matrix product {product}, copy {copy}"


def _percent(fraction: float | None) -> str:
    return DASH if fraction is None else f"{fraction:.0%}"


def rate_text(tera: float | None, unit: str) -> str:
    """10^12 per second, with the prefix that leaves one to three digits before the point."""
    if tera is None:
        return DASH
    for prefix, factor in (("T", 1.0), ("G", 1e3)):
        if tera * factor >= 1:
            return f"{tera * factor:.3g} {prefix}{unit}"
    return f"{tera * 1e6:.3g} M{unit}"


def _ms(ms: float) -> str:
    if ms < 0.001:
        return f"{ms:.6f}"  # to a nanosecond
    return f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"
