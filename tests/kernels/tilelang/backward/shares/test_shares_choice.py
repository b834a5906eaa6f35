"""Which calls split their groups of heads, into how many shares, and what is launched then. No GPU, no compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn import ALiBi, Causal, Documents, SlidingWindow, SoftCap, Strided
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import launch, library
from tileattn.kernels.tilelang.backward.defaults import MainConfig, default, short_default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig, HopperWideConfig
from tileattn.kernels.tilelang.backward.library import Kernels, SharesJob, kernel_jobs
from tileattn.kernels.tilelang.backward.shares import last_wave
from tileattn.kernels.tilelang.backward.shares.choice import (
    chosen,
    configurations,
    of_lengths,
    split,
    work,
    workspace_bytes,
)
from tileattn.kernels.tilelang.backward.shares.side_by_side import heads_side_by_side
from tileattn.variant.key import encode

SLOTS = 132


def call_of(
    dim: int = 64, mask: Any = None, mods: tuple[Any, ...] = (), needs: tuple[bool, ...] = (), **facts: Any
) -> BackwardCall:
    variant, _ = encode(mask, mods)
    deterministic = facts.pop("deterministic", False)
    facts = {"arch": "sm_90a", "needs_grad": True} | facts
    forward = AttentionCall(torch.bfloat16, dim, facts.pop("dim_v", dim), variant, **facts)
    return BackwardCall(forward, (True, True, True, False, *needs), False, deterministic)


def shapes(batch: int, seqlen_q: int, heads: int, kv_heads: int, dim: int, seqlen_k: int = 0) -> list[torch.Size]:
    return [torch.Size((batch, seqlen_q, heads, dim)), torch.Size((batch, seqlen_k or seqlen_q, kv_heads, dim))]


def of(call: BackwardCall, *sizes: int) -> int:
    """The shares of a call, with the default main kernel."""
    q_shape, k_shape = shapes(*sizes[:4], call.forward.head_dim, *sizes[4:])
    return chosen(call, default(call), q_shape, k_shape, SLOTS)


def test_calls_that_leave_multiprocessors_idle_are_split() -> None:
    plain = call_of()
    # 96 tiles of keys: 7 heads each on 96 multiprocessors, or 2 and 3 heads on all.
    assert of(plain, 1, 3072, 28, 4) == 3
    assert of(call_of(deterministic=True), 1, 3072, 28, 4) == 3
    assert of(plain, 1, 4224, 28, 4) == 1  # 132 tiles
    assert of(plain, 1, 3072, 28, 28) == 1  # no group
    assert of(call_of(mask=Causal()), 1, 4096, 8, 1) > 1


@pytest.mark.parametrize(
    ("dim", "batch", "seqlen", "heads", "kv_heads", "shares"),
    [
        (128, 1, 4096, 64, 8, 2),
        (128, 2, 8192, 64, 8, 2),
        (128, 1, 16384, 64, 8, 2),
        (128, 4, 4500, 28, 4, 2),
        (96, 2, 8192, 32, 4, 2),
        (112, 2, 8192, 64, 8, 4),
        (128, 1, 12000, 40, 8, 1),  # groups of 5 and 4
        (128, 2, 8192, 32, 8, 1),
        (64, 2, 8192, 64, 8, 1),
    ],
)
def test_large_groups_under_a_causal_mask_are_split(
    dim: int, batch: int, seqlen: int, heads: int, kv_heads: int, shares: int
) -> None:
    """As measured, benchmarks/results/backward/groups-h100.txt: the fastest number of shares, or one as fast."""
    assert of(call_of(dim, Causal()), batch, seqlen, heads, kv_heads) == shares


@pytest.mark.parametrize(
    ("dim", "mask", "batch", "seqlen", "heads", "kv_heads", "shares"),
    [
        (128, "window", 1, 27164, 32, 2, 4),  # 3 ran at 1.14 of the speed of 1, and 4 at 1.13
        (112, "documents", 1, 9509, 35, 5, 3),  # 1.29
        (128, "window", 4, 9562, 12, 3, 1),  # 2: 0.85
        (128, "window", 16, 2007, 56, 7, 1),  # 2: 0.89
        (128, "window", 32, 2048, 32, 4, 1),  # 2: 0.89
        (64, "window", 8, 2052, 32, 4, 1),  # 2: 0.91
        (128, "documents", 24, 1271, 8, 2, 1),  # 2: 0.97
        (128, "documents", 2, 12798, 42, 6, 1),  # 2: 1.03, and 3 % is not enough where lengths are guessed
    ],
)
def test_few_kv_heads_under_masks_that_only_a_call_knows(
    dim: int, mask: str, batch: int, seqlen: int, heads: int, kv_heads: int, shares: int
) -> None:
    """As measured on an H200 (benchmarks/results/backward/order-h200.txt)."""
    ids = torch.zeros(seqlen, dtype=torch.int32)
    masks = {"window": SlidingWindow(100, 0), "documents": Documents(ids) & Causal()}
    assert of(call_of(dim, masks[mask]), batch, seqlen, heads, kv_heads) == shares


def test_only_calls_whose_tiles_the_model_knows_or_guesses_are_split() -> None:
    sizes = (1, 3072, 28, 4)
    window, long = SlidingWindow(100, 0), (1, 27164, 32, 2)
    assert of(call_of(128, window), *long) == 4
    assert of(call_of(128, window, (SoftCap(9.0),)), *long) == 1
    assert of(call_of(128, window, packed=True), *long) == 1
    assert of(call_of(128, Strided(7)), *long) == 1
    assert of(call_of(mods=(ALiBi(torch.ones(28)),), needs=(True,)), *sizes) == 1
    assert of(call_of(dropout=True), *sizes) == 1
    assert of(call_of(packed=True), *sizes) == 1
    assert of(call_of(arch="sm_80"), *sizes) == 1
    assert of(call_of(256, window), *long) == 1
    assert of(call_of(256, mods=(SoftCap(9.0),)), *sizes) == of(call_of(256, packed=True), *sizes) == 1
    assert of(call_of(), 0, 3072, 28, 4) == of(call_of(), 1, 0, 28, 4) == 1


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_workspace_is_at_most_q_in_float32(causal: bool, dim: int) -> None:
    call, most = call_of(dim, Causal() if causal else None), 0
    for seqlen_k in (300, 1000, 3000, 6000):
        for heads, kv_heads in ((28, 4), (6, 1), (8, 1), (64, 2), (4, 1)):
            q_shape, k_shape = shapes(1, 3000, heads, kv_heads, dim, seqlen_k)
            shares = chosen(call, default(call), q_shape, k_shape, SLOTS)
            needed = workspace_bytes(call, k_shape, shares)
            assert needed <= 4 * q_shape.numel()
            most = max(most, needed)
    assert most > 0


def test_a_workspace_has_a_part_of_both_gradients_for_each_share() -> None:
    call = call_of(128, dim_v=64)
    k_shape = torch.Size((2, 100, 3, 128))
    assert workspace_bytes(call, k_shape, 1) == 0
    assert workspace_bytes(call, k_shape, 2) == 2 * 4 * 2 * 100 * 3 * (128 + 64)


def test_the_tiles_of_split_kernels() -> None:
    """Under a mask ptxas has no registers for 80 queries."""
    full, causal = call_of(128), call_of(128, Causal())
    assert split(full, default(full), 2) == HopperBackwardConfig(80, split=True)
    assert split(causal, default(causal), 2) == HopperBackwardConfig(64, split=True)
    assert split(full, default(full), 1) == default(full)
    generic = call_of(arch="sm_80")
    assert split(generic, default(generic), 2) == dataclasses.replace(default(generic), split=True)
    wide = call_of(256, Causal())
    assert split(wide, default(wide), 2) == HopperWideConfig(split=True)
    assert configurations(wide) == (None, HopperWideConfig(split=True))
    amd = call_of(arch="gfx942")
    with pytest.raises(ValueError, match="AmdBackwardConfig has no shares: it must be 1"):
        split(amd, default(amd), 2)
    assert configurations(causal) == (None, short_default(causal), HopperBackwardConfig(64, split=True))
    by_bits = HopperBackwardConfig(64, mask_words=True, split=True)
    assert configurations(call_of(128, SlidingWindow(5, 0))) == (None, by_bits)
    assert configurations(call_of(256, SlidingWindow(5, 0))) == (None,)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "queries"),
    [
        (512, 512, 64),
        (1024, 1024, 64),
        (2048, 2048, 64),
        (2500, 2500, 80),
        (4096, 4096, 80),
        (16384, 16384, 80),
        (400, 800, 80),  # five tiles of 80, seven of 64
        (500, 4000, 64),
        (854, 4593, 80),
        (2848, 39004, 80),
    ],
)
def test_queries_in_a_tile_under_a_causal_mask(seqlen_q: int, seqlen_k: int, queries: int) -> None:
    """As measured, benchmarks/results/backward/tiles-h200.txt."""
    causal = call_of(128, Causal())
    config = of_lengths(causal, seqlen_q, seqlen_k)
    assert config in (None, short_default(causal))
    assert (config or default(causal)).block_M == queries
    sizes = shapes(2, seqlen_q, 16, 16, 128, seqlen_k)
    assert launch.configured(causal, *sizes) == (config, (1, 0))
    for other in (call_of(128), call_of(64, Causal()), call_of(128, SlidingWindow(5, 0))):
        assert of_lengths(other, seqlen_q, seqlen_k) is None


def test_lists_of_tiles_are_walked_by_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the mask: the two have not run together."""
    call, sizes = call_of(128, SlidingWindow(100, 0)), shapes(1, 27164, 32, 2, 128)
    assert launch.configured(call, *sizes) == (None, (4, 0))
    monkeypatch.setattr(launch, "with_lists", lambda config, *_: dataclasses.replace(config, listed=True))
    config, of_groups = launch.configured(call, *sizes)
    assert isinstance(config, HopperBackwardConfig)
    assert config.listed
    assert of_groups == (1, 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dim", "causal", "batch", "seqlen", "heads", "kv_heads", "split"),
    [
        (192, True, 2, 4863, 8, 1, True),  # 152 tiles of 64 keys, of which 20 had all multiprocessors wait
        (256, True, 1, 3873, 12, 3, True),
        (256, False, 1, 2112, 32, 1, True),  # 33 blocks
        (256, False, 1, 2112, 32, 4, False),  # 132 blocks
        (256, False, 1, 2112, 8, 8, False),  # no groups
        (256, True, 4, 16384, 32, 8, False),  # many waves
    ],
)
def test_wide_heads(
    dim: int, causal: bool, batch: int, seqlen: int, heads: int, kv_heads: int, split: bool, deterministic: bool
) -> None:
    """As of other head dims, whether or not dq must be deterministic: it comes from another kernel."""
    call = call_of(dim, Causal() if causal else None, deterministic=deterministic)
    assert isinstance(default(call), HopperWideConfig)
    assert (of(call, batch, seqlen, heads, kv_heads) > 1) == split


def test_costs_of_wide_heads() -> None:
    """Four products of 64 x 64, with the columns of padding: head dim 200 has those of 256."""
    q_shape, k_shape = shapes(1, 640, 8, 1, 256)
    whole = work(call_of(256), HopperWideConfig(), q_shape, k_shape, SLOTS)
    assert whole[0].tiles == (10,) * 10
    assert whole[1].tile == pytest.approx(8 * 64 * 64 * 256 * SLOTS / 640e12)
    assert whole[1].crowding == 0.0
    padded = work(call_of(200), HopperWideConfig(), *shapes(1, 640, 8, 1, 200), SLOTS)
    assert padded[1].tile == whole[1].tile


def test_more_shares_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="shares is 8, and a group has 7 heads: it must be at most that"):
        launch.prepare_backward_with(None, call_of(), *shapes(1, 100, 28, 4, 64), 1.0, 8)


def test_the_kernels_to_compile() -> None:
    call = call_of()
    assert SharesJob(torch.bfloat16, "sm_90a") not in kernel_jobs(call)
    config = split(call, default(call), 2)
    assert kernel_jobs(call, config)[3:] == (SharesJob(torch.bfloat16, "sm_90a"),)
    keys = {job.key for job in (*kernel_jobs(call), *kernel_jobs(call, config))}
    assert len(keys) == 5  # prepare, finish, main, split main, sums
    wide = call_of(256)
    split_wide = split(wide, default(wide), 2)
    assert kernel_jobs(wide, split_wide)[3:] == (SharesJob(torch.bfloat16, "sm_90a"),)
    assert len({job.key for job in (*kernel_jobs(wide), *kernel_jobs(wide, split_wide))}) == 5
    generic = call_of(arch="sm_80")
    assert len(kernel_jobs(generic, default(generic))) == 3
    assert str(SharesJob(torch.bfloat16, "sm_90a")) == "sums of dk and dv (torch.bfloat16 sm_90a)"


def test_a_search_compiles_and_measures_what_will_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launch, "prepare_backward_with", lambda config, *rest: asked.append((config, *rest[-2:])))
    monkeypatch.setattr("tileattn.kernels.tilelang.tuned.compiled", lambda jobs: iter(asked.extend(jobs.items()) or ()))
    call = call_of()
    space = launch.backward_space(call, *shapes(1, 3072, 28, 4, 64), 0.125)
    assert space is not None
    space.prepare(space.default)
    list(space.compile([space.default]))
    assert asked == [(space.default, 3, 0), (space.default, kernel_jobs(call, split(call, space.default, 3)))]


@pytest.mark.parametrize("causal", [False, True])
def test_a_search_compiles_the_kernel_of_the_first_keys(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # 132 multiprocessors
    asked: dict[Any, Any] = {}
    monkeypatch.setattr("tileattn.kernels.tilelang.tuned.compiled", lambda jobs: iter(asked.update(jobs) or ()))
    call = call_of(128, Causal() if causal else None)
    space = launch.backward_space(call, *shapes(1, 1225, 16, 1, 128, 19349), 0.125)
    assert space is not None
    list(space.compile([space.default]))
    *own, sums, first = asked[space.default]
    assert (*own, sums) == kernel_jobs(call, split(call, space.default, 3))
    assert first.call == call_of(128)
    assert first.kernel == "main"
    assert first.config == (HopperBackwardConfig(64) if causal else space.default)


class Launched:
    """Kernels that note what they are launched with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, tuple[Any, ...]] = {}
        self.config: MainConfig | None = None
        self.configs: list[tuple[BackwardCall, MainConfig | None]] = []
        monkeypatch.setattr(launch, "backward_kernels", self.kernels)
        monkeypatch.setattr(launch, "main_kernel", lambda call, config: self.kernels(call, config).main)
        monkeypatch.setattr(launch, "add_shares", lambda call: self.noting("add"))

    def noting(self, name: str) -> Callable[..., None]:
        def run(*given: Any) -> None:
            name_of_launch = f"{name} again" if name == "main" and name in self.given else name
            assert name_of_launch not in self.given
            self.given[name_of_launch] = given

        return run

    def kernels(self, call: BackwardCall, config: MainConfig | None = None) -> Kernels:
        self.configs.append((call, config))
        self.config = config
        last = library.kernel_names(call)[2]
        return Kernels(
            self.noting("prepare"),
            self.noting("main"),
            self.noting("finish") if last == "finish" else None,
            self.noting("queries") if last == "queries" else None,
        )


def backward(call: BackwardCall, *sizes: int) -> tuple[Tensor, ...]:
    q_shape, k_shape = shapes(*sizes[:4], call.forward.head_dim, *sizes[4:])
    q, k = (torch.empty(shape, dtype=torch.bfloat16) for shape in (q_shape, k_shape))
    lse = torch.empty(q_shape[0], q_shape[2], q_shape[1])
    inputs = Inputs(q, k, k, None, Operands([], [], []), None, None)
    gradients = launch.prepare_backward(call, q_shape, k_shape, 0.125)(inputs, q, lse, q, None)
    return gradients[0], gradients[1], gradients[2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_split_call_adds_up_its_parts(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # 132 multiprocessors
    call = call_of(deterministic=deterministic)
    _, dk, dv = backward(call, 2, 1408, 12, 2)  # 44 blocks
    assert list(launched.given) == ["prepare", "main", "add", "queries" if deterministic else "finish"]
    assert launched.config == split(call, default(call), 3)
    parts = launched.given["main"][6:8]
    assert [x.shape for x in parts] == [torch.Size((2, 1408, 3 * 2, 64))] * 2
    assert [x.dtype for x in parts] == [torch.float32] * 2
    *of_parts, of_dk, of_dv, first = launched.given["add"]
    assert first == 0
    assert [x.shape for x in of_parts] == [(2, 1408, 3, 16, 8)] * 2
    assert [x.shape for x in (of_dk, of_dv)] == [(2, 1408, 16, 8)] * 2
    addresses = [x.data_ptr() for x in (*of_parts, of_dk, of_dv)]
    assert addresses == [x.data_ptr() for x in (*parts, dk, dv)]


def test_a_cut_of_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is asked for: 132 tiles of 64 keys whole, then 10 in shares; dq's own kernel reads all keys."""
    launched = Launched(monkeypatch)
    monkeypatch.setattr(last_wave, "is_cut", lambda config: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # 132 multiprocessors
    call = call_of(256)
    _, dk, dv = backward(call, 1, 1225, 16, 1, 142 * 64)
    assert list(launched.given) == ["prepare", "queries", "main", "main again", "add"]
    (of_first, first_config), (of_later, later_config) = launched.configs
    assert (of_first, first_config, of_later) == (call, HopperWideConfig(), call)
    assert later_config == HopperWideConfig(split=True)
    assert [x.shape for x in launched.given["main"][6:8]] == [(1, 132 * 64, 1, 256)] * 2
    *of_parts, of_dk, of_dv, first = launched.given["add"]
    shares = of_parts[0].shape[2]
    assert shares > 1
    assert first == 132 * 64
    assert [x.shape for x in launched.given["main again"][6:8]] == [(1, 10 * 64, shares, 256)] * 2
    assert [x.data_ptr() for x in (of_dk, of_dv)] == [dk.data_ptr(), dv.data_ptr()]
    assert launched.given["queries"][1].shape[1] == 142 * 64


def test_other_calls_have_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch)
    _, dk, dv = backward(call_of(), 1, 200, 4, 4)
    assert list(launched.given) == ["prepare", "main", "finish"]
    assert launched.config is None
    assert [x.data_ptr() for x in launched.given["main"][6:8]] == [dk.data_ptr(), dv.data_ptr()]


def test_the_kernel_for_dq_alone_reads_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that as many heads run side by side as have all their keys in the L2 cache."""
    launched = Launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # 132 multiprocessors
    call = call_of(128, Causal(), deterministic=True)
    sizes = 2, 3587, 32, 4, 12539
    q_shape, k_shape = shapes(*sizes[:4], 128, *sizes[4:])
    assert launch.configured(call, q_shape, k_shape)[1].whole_keys > 0
    backward(call, *sizes)
    assert launched.given["queries"][-1] == heads_side_by_side(call, q_shape, k_shape) == 32
    assert launched.given["queries"][1].shape == k_shape


@pytest.mark.parametrize("causal", [False, True])
def test_a_cut_call_launches_the_first_keys_whole(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wave of 132 tiles of the only kv head, and a second one of 20, each in three shares."""
    launched = Launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # 132 multiprocessors
    call = call_of(128, Causal() if causal else None)
    _, dk, dv = backward(call, 1, 1225, 16, 1, 19349)
    assert list(launched.given) == ["prepare", "main", "main again", "add", "finish"]
    (of_first, first_config), (of_later, later_config) = launched.configs
    assert of_later == call
    assert later_config == split(call, default(call), 3)
    assert of_first == call_of(128)  # all queries see these keys
    assert isinstance(later_config, HopperBackwardConfig)
    if causal:
        assert first_config == dataclasses.replace(later_config, split=False)
    else:
        assert first_config == default(call)

    _, k, v, *_ = launched.given["main"]
    assert [x.shape for x in (k, v)] == [(1, 16896, 1, 128)] * 2
    gradients = launched.given["main"][6:8]
    assert [x.shape for x in gradients] == [(1, 16896, 1, 128)] * 2
    assert [x.data_ptr() for x in gradients] == [dk.data_ptr(), dv.data_ptr()]

    _, later_k, later_v, *_ = launched.given["main again"]
    assert [x.shape for x in (later_k, later_v)] == [(1, 2453, 1, 128)] * 2
    assert later_k.data_ptr() == k.data_ptr() + 2 * 16896 * 128
    assert [x.shape for x in launched.given["main again"][6:8]] == [(1, 2453, 3, 128)] * 2
    *of_parts, of_dk, of_dv, first = launched.given["add"]
    assert first == 16896
    assert [x.shape for x in of_parts] == [(1, 2453, 3, 16, 8)] * 2
    assert [x.data_ptr() for x in (of_dk, of_dv)] == [dk.data_ptr(), dv.data_ptr()]
    # Both add to the same sums of dq.
    assert launched.given["main"][8].data_ptr() == launched.given["main again"][8].data_ptr()


@pytest.mark.parametrize("sizes", [(2, 1408, 12, 2), (1, 17608, 12, 3)])
def test_launches_on_two_streams_allocate_nothing(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory would belong to the second stream. The first call shares all groups, the other those of the last wave."""
    launched = Launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # 132 multiprocessors
    monkeypatch.setattr(launch, "runs_beside", lambda *_: True)

    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError("memory of a second stream")

    def beside(here: Callable[[], None], there: Callable[[], None], device: torch.device) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", allocate)
            here()
            there()

    monkeypatch.setattr(launch, "launch_beside", beside)
    backward(call_of(deterministic=True), *sizes)
    assert {"queries", "main", "add"} <= set(launched.given)
