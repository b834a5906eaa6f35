"""The sets of kernels that `tileattn bundle` compiles: the table of the preset "default", and parts of it.

The command, the page docs/bundles.md and the tests derive from :data:`DEFAULT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from tileattn.bench import warmup
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.packages import any_machine
from tileattn.kernels.tilelang.backend import refusal
from tileattn.kernels.tilelang.backward.library import BackwardJob
from tileattn.kernels.tilelang.build.job import KernelJob
from tileattn.kernels.tilelang.packed.library import PlanJob


@dataclass(frozen=True)
class Preset:
    """What a set of kernels covers: every combination of these, in both passes, for any sizes.

    Attributes:
        dtypes: names of `bench.cases.DTYPES`.
        head_dims: (head_dim, head_dim_v).
        masks: variants, each plain and with a sink.
        modified: variants with score modifications, without a sink.
        plain: variants that are also there for tensors that TMA cannot copy ("unaligned"), and whose backward pass is
            there with a fixed order of sums ("deterministic").
        decode: variants of `decode`; none leaves out decoding and `append_kv`.
        page_sizes: of caches, in tokens; 0 is a contiguous cache.
        rotary: how `append_kv` rotates.
    """

    dtypes: Sequence[str]
    head_dims: Sequence[tuple[int, int]]
    masks: Sequence[str]
    modified: Sequence[str]
    plain: Sequence[str]
    decode: Sequence[str] = ()
    page_sizes: Sequence[int] = ()
    rotary: Sequence[str] = ("none",)


DEFAULT = Preset(
    dtypes=("fp16", "bf16"),
    head_dims=((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
    masks=("full", "causal", "window1024", "causal+documents1024", "window1024+documents1024"),
    modified=("causal+softcap50", "causal+alibi", "causal+softcap50+window1024"),
    plain=("full", "causal"),
    decode=("causal", "window1024"),
    page_sizes=(0, 16, 64),
    rotary=("none", "halves"),
)


# Every head dim that is common, every mask and modification that has a name, and documents for decoding.
ALL = replace(
    DEFAULT,
    head_dims=(*((dim, dim) for dim in (32, 64, 72, 80, 96, 112, 128, 160, 192, 256)), (192, 128)),
    masks=(*DEFAULT.masks, "prefix256", "causal+prefix256", "documents1024"),
    modified=(
        *DEFAULT.modified,
        *("softcap50", "alibi", "bias", "causal+bias", "bias+dbias", "causal+bias+dbias", "window1024+alibi"),
    ),
    decode=("full", "causal", "window1024", "causal+softcap50", "window1024+softcap50", "causal+alibi"),
    rotary=("none", "halves", "interleaved"),
)
# What most programs call first: the package has their sources, so that nvcc alone compiles them (`build/ahead.py`).
FIRST = replace(DEFAULT, head_dims=((64, 64), (128, 128)), masks=("full", "causal"), modified=(), plain=(), decode=())
# Of these "sample" takes some: what is assembled for architectures that are not at hand.
SAMPLE = Preset(
    dtypes=("bf16", "fp16"),
    head_dims=((64, 64), (128, 128), (256, 256)),
    masks=("full", "causal", "window1024"),
    modified=("causal+softcap50", "causal+alibi"),
    plain=("causal",),
    decode=("causal", "window1024"),
    page_sizes=(0, 16),
)
SAMPLED = 24
NAMES = ("default", "all", "first", "sample")


def named(name: str, arch: str) -> list[KernelJob]:
    """The kernels of a preset, by its name."""
    if name == "sample":
        return sample(arch)
    return jobs({"default": DEFAULT, "all": ALL, "first": FIRST}[name], arch)


def sample(arch: str) -> list[KernelJob]:
    """`SAMPLED` kernels that differ: of each kind some, spread evenly over the table."""
    by_kind: dict[object, list[KernelJob]] = {}
    for job in jobs(SAMPLE, arch):
        kind: object = job.kernel if isinstance(job, BackwardJob) else type(job)
        by_kind.setdefault(kind, []).append(job)
    found: list[KernelJob] = []
    while by_kind:  # small kinds give all that they have, and the others share what is left
        kind = min(by_kind, key=lambda each: len(by_kind[each]))
        share = (SAMPLED - len(found)) // len(by_kind)
        found += _spread(by_kind.pop(kind), share)
    return found


def _spread(of: Sequence[KernelJob], count: int) -> list[KernelJob]:
    count = min(count, len(of))
    return [of[(2 * place + 1) * len(of) // (2 * count)] for place in range(count)]


def jobs(preset: Preset, arch: str) -> list[KernelJob]:
    """The kernels of a preset, each once: attention in both passes, dense and packed, and decoding.

    Those that prepare, finish, plan, and list tiles are among them.
    """
    forward, backward = _forward_calls(preset, arch), _backward_calls(preset, arch)
    found = cast("list[KernelJob]", warmup.jobs(forward, backward))
    found += [PlanJob(arch)] * any(call.packed for call in forward)
    if preset.decode and not arch.startswith("gfx"):
        facts = preset.head_dims, preset.decode, preset.dtypes, preset.page_sizes, arch
        appending = warmup.append_calls(preset.head_dims, preset.dtypes, preset.page_sizes, preset.rotary, arch)
        found += cast("list[KernelJob]", warmup.decode_jobs(warmup.decode_calls(*facts), appending))
    return list({job.key: job for job in found}.values())


def _variants(preset: Preset) -> list[str]:
    with_sink = ["sink" if name == "full" else f"{name}+sink" for name in preset.masks]
    return [*preset.masks, *with_sink, *preset.modified]


def _forward_calls(preset: Preset, arch: str) -> list[AttentionCall]:
    calls = warmup.calls(preset.head_dims, _variants(preset), preset.dtypes, arch)
    plain = warmup.calls(preset.head_dims, preset.plain, preset.dtypes, arch)
    calls += [replace(call, aligned=False) for call in plain]
    return _that_run([*calls, *(replace(call, packed=True) for call in calls)])


def _backward_calls(preset: Preset, arch: str) -> list[BackwardCall]:
    calls = warmup.backward_calls(preset.head_dims, _variants(preset), preset.dtypes, arch)
    plain = warmup.backward_calls(preset.head_dims, preset.plain, preset.dtypes, arch)
    calls += [replace(call, forward=replace(call.forward, aligned=False), aligned=False) for call in plain]
    calls += [replace(call, deterministic=True) for call in plain]
    packed = [replace(call, forward=replace(call.forward, packed=True)) for call in calls]
    return [call for call in (*calls, *packed) if _that_run([call.forward])]


def _that_run(calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    with any_machine():
        return [call for call in calls if refusal(call) is None]
