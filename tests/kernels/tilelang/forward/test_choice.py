"""Which kernel a call's sizes get, and how many heads run side by side: on paper, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import make_call
from tileattn import Causal, Documents, Mask, SlidingWindow
from tileattn.call.facts import AttentionCall
from tileattn.kernels.tilelang.forward import choice, launch
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.defaults import default, defaults
from tileattn.kernels.tilelang.forward.wide import WIDE

CAUSAL, FULL = make_call(Causal()), make_call()
SHORT_128, LONG_128 = default(FULL, 1), default(FULL)
WIDE_128 = WIDE[128, 128, "full"]


def shapes(
    batch: int, seqlen_q: int, heads: int, seqlen_k: int | None = None, dim: int = 128
) -> tuple[torch.Size, torch.Size]:
    return torch.Size((batch, seqlen_q, heads, dim)), torch.Size((batch, seqlen_k or seqlen_q, heads, dim))


def blocks_turns(config: HopperConfig, batch: int, seqlen: int, heads: int) -> int:
    rows = config.cluster * config.block_M
    return -(-(-(-seqlen // rows) * batch * heads) // (choice.MULTIPROCESSORS // config.cluster))


# As measured on an H200 (docs/design/forward.md): the faster of two kernels.
@pytest.mark.parametrize(
    ("call", "sizes", "expected"),
    [
        (CAUSAL, shapes(1, 33333, 8), WIDE_128),
        (CAUSAL, shapes(1, 7700, 14), WIDE_128),
        (CAUSAL, shapes(1, 12345, 20), WIDE_128),
        (CAUSAL, shapes(1, 2500, 16, 30000), WIDE_128),
        (CAUSAL, shapes(4, 3300, 16), default(CAUSAL)),
        (CAUSAL, shapes(4, 1000, 12, 8100), default(CAUSAL)),  # three turns of 192 rows each instead of 128
        (FULL, shapes(2, 4222, 12), WIDE_128),
        (FULL, shapes(5, 1500, 12), SHORT_128),
        (FULL, shapes(3, 1300, 16, 6000), SHORT_128),  # 336 tiles of 192 queries: a third turn for 72
        (FULL, shapes(1, 30000, 6), LONG_128),
    ],
    ids=str,
)
def test_the_faster_kernel_is_chosen(
    call: AttentionCall, sizes: tuple[torch.Size, torch.Size], expected: HopperConfig
) -> None:
    assert choice.chosen(call, *sizes) == expected


def test_turns_count_where_tasks_cost_the_same() -> None:
    """One head more than fills the blocks costs a turn; up to there more heads cost nothing."""
    speed = choice.Speed(1.0, 0)
    times = [choice.launch_time(SHORT_128, speed, FULL, *shapes(1, 1280, heads)) for heads in (12, 13, 14, 26)]
    turns = [blocks_turns(SHORT_128, 1, 1280, heads) for heads in (12, 13, 14, 26)]
    assert turns == [1, 1, 2, 2]
    assert times == [time * times[0] for time in turns]


def test_causal_tasks_are_shared_by_the_blocks() -> None:
    """Many tasks that cost as much as their keys: about half of what they cost without a mask."""
    speed = choice.Speed(1.0, 0)
    config = default(CAUSAL)
    assert isinstance(config, HopperConfig)
    sizes = shapes(2, 8192, 33)
    full, causal = (choice.launch_time(config, speed, call, *sizes) for call in (FULL, CAUSAL))
    assert causal == pytest.approx(full * 65 / 128)


OTHERS = {
    "window": make_call(SlidingWindow(500, 0)),
    "packed": replace(CAUSAL, packed=True),
    "dropout": replace(CAUSAL, dropout=True),
    "unaligned": replace(CAUSAL, aligned=False),
    "sm_80": replace(CAUSAL, arch="sm_80"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_keep_their_rows(name: str) -> None:
    call = OTHERS[name]
    assert choice.chosen(call, *shapes(1, 33333, 8)) == default(call)
    assert WIDE_128 not in defaults(call)


@pytest.mark.parametrize(("dim", "words"), [(160, True), (192, False), (256, True)])
def test_windows_of_wide_heads_hide_scores_by_bits(dim: int, words: bool) -> None:
    """Where that was measured, which packed sequences were not."""
    window = default(make_call(SlidingWindow(99, 0), dim=dim))
    packed = default(make_call(SlidingWindow(99, 0), dim=dim, packed=True))
    assert isinstance(window, HopperConfig)
    assert window.mask_words == words
    assert packed == replace(window, mask_words=False)


@pytest.mark.parametrize("also", [None, Causal()], ids=["documents", "causal"])
def test_long_documents_take_wide_tiles_at_head_dim_64(also: Mask | None) -> None:
    """As measured on an H200: 13.7k tokens run faster in them, 3.5k in short documents do not."""
    documents = Documents(torch.zeros(9, dtype=torch.int32))
    call = make_call(documents if also is None else documents & also, dim=64)
    short, long = default(call, 8192), default(call, 8193)
    assert isinstance(short, HopperConfig)
    assert isinstance(long, HopperConfig)
    assert (short.block_M, long.block_M) == (128, 192)
    assert short.mask_words
    assert long.mask_words
    assert default(replace(call, packed=True), 8193) == default(replace(call, packed=True), 8192)
    assert default(replace(call, head_dim=96, head_dim_v=96), 8193) == default(
        replace(call, head_dim=96, head_dim_v=96), 8192
    )


def test_what_may_be_chosen_is_compiled_ahead() -> None:
    for call in (CAUSAL, FULL, make_call(Causal(), dim=96), make_call(dim=192, dim_v=128), make_call(dim=80)):
        assert set(choice.speeds(call)) == set(defaults(call))


@pytest.mark.parametrize(
    ("sizes", "dim", "side"),
    [
        (shapes(1, 9600, 14, dim=256), 256, 7),  # 3 fit; 2 would leave blocks without work at the end
        (shapes(1, 27001, 7), 128, 7),
        (shapes(1, 16500, 12), 128, 4),
        (shapes(2, 777, 20, 12000), 128, 5),  # tiles that cost nearly the same end together
    ],
    ids=str,
)
def test_enough_heads_run_side_by_side_for_an_even_end(
    sizes: tuple[torch.Size, torch.Size], dim: int, side: int
) -> None:
    call = make_call(Causal(), dim=dim)
    assert launch._heads_side_by_side(call, sizes[0], sizes[1][1], sizes[1][2]) == side


@pytest.mark.parametrize(
    ("mask", "seqlen", "side"),
    [
        (Causal(), 16384, 16),  # four kv heads fit
        (Causal(), 32768, 8),
        (Causal(), 131072, 4),  # none fits: the four heads of one group
        (SlidingWindow(99, 0), 131072, 16),  # a row sees few of them
    ],
    ids=str,
)
def test_under_a_causal_mask_only_heads_whose_keys_fit_run_side_by_side(mask: Mask, seqlen: int, side: int) -> None:
    assert launch._heads_side_by_side(make_call(mask), torch.Size((1, seqlen, 32, 128)), seqlen, 8) == side
