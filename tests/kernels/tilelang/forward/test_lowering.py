"""The code that TileLang generates, on a machine without a GPU: it lowers, has the right instructions, assembles."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import (
    ARCHITECTURES,
    BIAS,
    CALLS,
    IDS,
    MAX_SPILLED,
    SLOPES,
    SLOW_CALLS,
    TILES,
    assemble,
    disassemble,
    find_disassembler,
    find_nvcc,
    lower,
    make_call,
    numbers,
    on,
)
from tileattn import ALiBi, Bias, Causal, FunctionMask, SlidingWindow, SoftCap
from tileattn.call.facts import AttentionCall
from tileattn.kernels.tilelang import architecture
from tileattn.kernels.tilelang.forward import config, defaults
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.amd import config as amd_config
from tileattn.kernels.tilelang.forward.amd.config import AmdConfig
from tileattn.kernels.tilelang.forward.config import ForwardConfig, HopperConfig
from tileattn.kernels.tilelang.forward.defaults import LONG, Config
from tileattn.kernels.tilelang.forward.hopper.plan import HopperPlan
from tileattn.variant.program import program

ASSEMBLED = ("sm_80", "sm_90a")
# Lowering takes 5 to 18 seconds of a core for each, so `make test` has of each architecture what its schedule makes of
# it in another way: of Hopper's what other tests here look at as well, of the generic schedule with TMA one of sm_120a
# (sm_100a has the same function). test_emulated.py has the generic one of sm_80, test_amd.py AMD's. `make test-all` has
# the others.
QUICK = {
    "sm_80": (),
    "sm_89": (),
    "sm_90a": ("plain-16", "causal-64"),
    "sm_100a": (),
    "sm_120a": ("plain-16",),
    "gfx942": (),
}

# ptxas: wgmma instructions run one after the other, or setmaxnreg is ignored. Each costs half the speed.
SERIALIZED = re.compile(r"C75(?:08|10|12|14)|serializ|setmaxnreg ignored", re.IGNORECASE)


def _kernels() -> list[object]:
    """(call, configuration) of every kernel that a call gets at one length or another, unless two of them coincide."""
    parameters = []
    for arch in ARCHITECTURES:
        for name, call in (CALLS | SLOW_CALLS).items():
            quick, call = name in QUICK[arch], on(arch, call)
            for number, tile in enumerate(defaults.defaults(call)):
                # Of several kernels the one that `lower` makes for the tests below: it is not lowered again.
                marks = [] if quick and tile == defaults.default(call) else [pytest.mark.slow]
                suffix = f"-{number}" if number else ""
                parameters.append(pytest.param(call, tile, id=f"{arch}-{name}{suffix}", marks=marks))
    return parameters


@pytest.mark.parametrize(("call", "tile"), _kernels())
def test_kernel(call: AttentionCall, tile: Config, tmp_path: Path) -> None:
    """One test for all that is asked of a kernel, since lowering it takes seconds."""
    source = lower(call, tile)
    _check_instructions(call, tile, source)
    _check_barriers(tile, source)
    _check_producer(call, tile, source)
    _check_queue(call, tile, source)
    _check_nothing_is_static(call, source)
    if call.arch in ASSEMBLED:
        nvcc = find_nvcc()
        if nvcc is None:
            pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
        _check_assembly(assemble(nvcc, source, call.arch, tmp_path))


def _check_instructions(call: AttentionCall, tile: Config, source: str) -> None:
    """The matrix units are used, and memory is read in the widest way that the alignment allows."""
    wide_copies = set(numbers(r"cp_async_gs\w*<(\d+)>", source))
    if call.arch == "gfx942":
        assert "mfma" in source
        assert "tanh" not in source  # there is no instruction for it: SoftCap is computed by exponentials
    elif call.arch == "sm_90a":
        q_in_registers = isinstance(tile, HopperConfig) and tile.q_in_registers
        weights_in_shared = isinstance(tile, HopperConfig) and tile.weights_in_shared
        assert ("wgmma_ss" in source) == (not q_in_registers)
        assert ("wgmma_rs" in source) == (not weights_in_shared)
        assert ("tma_load(" in source) == call.aligned
        assert not wide_copies or call.aligned
    else:
        assert "mma_sync<" in source
        if "tma_load(" not in source:
            # Rows that may begin anywhere cannot be copied by cp.async, which needs 4 bytes at least.
            # 16 bytes, or 8 where a small tile has no more for each thread.
            assert bool(wide_copies) == call.aligned
            assert wide_copies <= {8, 16}
        assert call.aligned or "tma_load(" not in source


def _check_barriers(tile: Config, source: str) -> None:
    """A partial barrier that waits for part of a warpgroup never opens."""
    partial = numbers(r"__sync_thread_partial\(.*, (\d+)\);", source)
    assert len(partial) == source.count("__sync_thread_partial")
    assert not [count for count in partial if count % 128]
    if isinstance(tile, HopperConfig):
        # The schedule's own: within a warpgroup, and between the two that hand over a turn. TileLang adds none but that
        # behind the initialisation of the mbarriers.
        assert set(partial) == ({128, 256} if tile.ping_pong else {128})
        clustered = tile.cluster > 1
        assert source.count("__syncthreads();") == (not clustered)
        assert source.count("tl::cluster_sync();") == 2 * clustered  # the other at the end
        opening = "tl::cluster_sync();" if clustered else "__syncthreads();"
        assert source.index(opening) < source.index("warpgroup_reg_dealloc<")
        # Rows are reduced within four threads of a warp: no barrier.
        assert set(numbers(r"AllReduce<[\w:]+, (\d+),", source)) == {4}


def _check_producer(call: AttentionCall, tile: Config, source: str) -> None:
    """Only the warp that copies waits for free stages: any other could miss a turn and wait for ever."""
    producers = source.split("warpgroup_reg_dealloc<")[1:]
    assert len(producers) == (call.arch == "sm_90a" and call.aligned) or call.arch in ("sm_100a", "sm_120a")
    consumers = tile.consumer_threads() if isinstance(tile, HopperConfig) else 0
    for producer in producers:
        assert re.match(rf"\d+>\(\);\s*if \(\(\(int\)threadIdx\.x\) < {consumers + 32}\) \{{", producer)
        if consumers:
            alone, _, _ = producer.partition("warpgroup_reg_alloc<")
            assert not re.search(r"__sync_thread_partial|__syncthreads|named_barrier", alone)


def _check_queue(call: AttentionCall, tile: Config, source: str) -> None:
    """The Hopper schedule draws one ticket per tile; there is no other atomic operation."""
    draws = isinstance(tile, HopperConfig)
    assert len(re.findall(r"[Aa]tomic", source.partition("__global__")[2])) == draws
    assert source.count("AtomicAddRet((&(tickets[0])), 1)") == draws


def _check_nothing_is_static(call: AttentionCall, source: str) -> None:
    """Sizes and strides are parameters of the kernel."""
    signature = re.search(r"__global__ void __launch_bounds__\(\d+(?:, \d+)?\) \w+\(([^)]*)\)", source)
    assert signature is not None
    parameters = {part.split()[-1] for part in signature[1].split(",")}
    assert {"batch", "seqlen_q", "heads"} <= parameters
    # TMA reads through descriptors, which the launch makes from the strides.
    described = {f"{name}_desc" for name in "qkv"} <= parameters
    assert described or {f"{name}_stride{axis}" for name in "qkv" for axis in range(3)} <= parameters


def _check_assembly(report: str) -> None:
    assert not SERIALIZED.search(report), report
    spills = numbers(r"(\d+) bytes stack frame", report) + numbers(r"(\d+) bytes spill stores", report)
    assert len(spills) >= 2, report
    assert max(spills) <= MAX_SPILLED, report
    assert max(numbers(r"Used (\d+) registers", report)) <= 255


# --- What is skipped ---


def _ranges(source: str) -> tuple[str, str]:
    """What the producer of a Hopper kernel computes as the first key and the number of tiles of keys."""
    (first,), (count,) = (re.findall(rf"^ +{name} = (.*);$", source, re.MULTILINE) for name in ("first", "count"))
    return first, count


@pytest.mark.slow_cases("plain", "window-96", reason="10 s each, and more")
@pytest.mark.parametrize("name", ["plain-16", "causal-64", "plain", "window-96"])
def test_fully_masked_tiles_are_skipped(name: str) -> None:
    first, count = _ranges(lower(CALLS[name]))
    if name.startswith("plain"):
        # `row` is the tile's first query, and q_lo its position: without a mask the range does not depend on it.
        assert not re.search(r"\brow\b|q_lo|blockIdx", first + count)
        return
    assert re.search(r"\bq_lo\b", count)
    # The window's left edge moves the first key that is loaded.
    assert re.search(r"q_lo - i0\b", first) if name == "window-96" else first == "0"


def test_tiles_of_keys_begin_where_a_pattern_or_a_copy_can() -> None:
    """Dropout's pattern has groups of 16 keys; TMA copies a bias, and V in fp8, from multiples of 16 bytes."""

    def step(*variant: Any, **options: Any) -> tuple[int, int]:
        call = on("sm_90a", make_call(*variant, **options))
        plan = HopperPlan(call, defaults.default(call, LONG), program(call.variant))
        return plan.key_step, plan.block_N

    window = SlidingWindow(5, 0)
    assert step(window)[0] == step(IDS & Causal())[0] == 1
    bias = step(window, Bias(TILES))
    fp8 = step(window, dtype=torch.float8_e4m3fn)
    dropout = step(window, dropout=True)
    assert all(first == tile for first, tile in (bias, fp8, dropout))
    assert dropout[1] % 16 == 0


@pytest.mark.slow_cases("plain", reason="10 s")
@pytest.mark.parametrize("name", ["plain-16", "plain"])
def test_a_plain_kernel_masks_the_last_tile_only(name: str) -> None:
    """It comes first, before the loop, and under a condition that is the same for all threads."""
    _, _, consumers = lower(CALLS[name]).partition("warpgroup_reg_alloc<")
    (condition,) = re.findall(r"if \((.*)\) \{\n(?=(?:.*\n){1,3}.* < \(?(?:seqlen_k|full_hi)\b)", consumers)
    assert re.fullmatch(r"0 < \(right\w* \+ left\w*\)", condition)
    before, after = consumers.split(condition)
    assert not re.search(r"seqlen_k|full_hi", before)
    first, *loops = re.split(r"\bfor \(int j_\d+ = 0; j_\d+ < (?=\()", after)
    assert len(loops) == 1
    assert len(re.findall(r"seqlen_k|full_hi", first)) == 1
    assert not re.search(r"seqlen_k|full_hi", loops[0])


def test_masked_tiles_have_a_loop_of_their_own() -> None:
    """A mask under a condition within the loop would be turned into selects that cost as much in every tile."""
    _, _, consumers = lower(CALLS["causal-64"]).partition("warpgroup_reg_alloc<")
    masked, rest = re.split(r"\bfor \(int j_\d+ = 0; j_\d+ < (?=max|\()", consumers)[1:]
    assert "seqlen_k" in masked
    assert "seqlen_k" not in rest


def _hopper_tiles() -> list[object]:
    """Of some calls every tile; `make test` has one that is lowered above."""
    parameters = []
    for name in ("causal-64", "plain-256", "bias-tiles"):
        tiles = [tile for tile in defaults.defaults(CALLS[name]) if isinstance(tile, HopperConfig)]
        assert tiles
        for number, tile in enumerate(tiles):
            quick = name == "causal-64" and tile == defaults.default(CALLS[name])
            marks = [] if quick else [pytest.mark.slow(reason="lowers a kernel, 10 s and more")]
            parameters.append(pytest.param(name, tile, id=f"{name}-{number}", marks=marks))
    return parameters


@pytest.mark.parametrize(("name", "tile"), _hopper_tiles())
def test_the_search_for_the_maximum_runs_under_the_products(name: str, tile: HopperConfig, tmp_path: Path) -> None:
    """ptxas must not move the wait for P V up in front of it."""
    nvcc, disassembler = find_nvcc(), find_disassembler()
    if nvcc is None or disassembler is None:
        pytest.skip("needs nvcc and nvdisasm or cuobjdump")
    call = CALLS[name]
    assemble(nvcc, lower(call, tile), call.arch, tmp_path)
    sass = disassemble(disassembler, tmp_path / "kernel.cubin")
    # Each iteration waits for Q K^T (all products but the last), takes the maximum, and waits for P V.
    under = [part.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0] for part in sass.split("DEPBAR.LE gsb0, 0x1")[1:]]
    loops = 1 if program(call.variant).allows is None else 2
    assert len(under) == loops
    for part in under:
        assert part.count("FMNMX") >= tile.block_M * tile.block_N // tile.consumer_threads()


# --- Biases ---


@pytest.mark.slow(reason="10 s each")
@pytest.mark.parametrize("name", ["bias-tiles", "bias-wide-tiles-64"])
def test_an_aligned_bias_is_copied_and_not_fetched_by_elements(name: str) -> None:
    source = lower(CALLS[name])
    assert len(re.findall(r"tma_load(?:<[\w:]+>)?\(t0_desc", source)) == 1
    assert not re.search(r"\bt0\[", source)
    # The consumers read behind the first product and in front of the wait for it: 16 bits by ldmatrix, others in pairs.
    by_pairs = r"\*\(float2\*\)\(tile_registers.* = \*\(float2\*\)\(.*tile_shared.*;([^;]*;){,9}"
    reads = re.findall({"bias-tiles": r"ptx_ldmatrix_x4\(.*tile_shared", "bias-wide-tiles-64": by_pairs}[name], source)
    assert len(reads) == source.count("wait_wgmma<1>") + 1
    for part in source.split("wait_wgmma<1>")[:-1]:
        assert "tile_shared" in part.rpartition("wgmma_ss")[2]


OTHER_BIASES = (BIAS, BIAS[..., :8], torch.ones(2, 4, 16, 16)[..., 1:], TILES.mT)


@pytest.mark.slow(reason="5 s each")
@pytest.mark.parametrize("bias", [TILES[:, :, :1], *OTHER_BIASES])
def test_any_other_bias_is_fetched(bias: torch.Tensor) -> None:
    source = lower(make_call(None, Bias(bias), dim=64))
    assert "t0_desc" not in source
    assert re.search(r"\bt0\[", source)


@pytest.mark.parametrize(
    ("bias", "shared"),
    [pytest.param(*x, marks=pytest.mark.slow) for x in ((TILES[:1], True), (TILES, False), (TILES[:, :1], True))],
)
def test_tiles_of_a_bias_that_are_read_once_leave_the_cache_first(bias: torch.Tensor, shared: bool) -> None:
    _check_hint(lower(make_call(None, Bias(bias), dim=64)), bias, shared)


@pytest.mark.slow(reason="lowers a kernel, 15 s")
def test_tiles_of_a_causal_bias_that_are_read_once_leave_the_cache_first() -> None:
    _check_hint(lower(CALLS["bias-tiles"]), TILES, shared=False)


def _check_hint(source: str, bias: torch.Tensor, shared: bool) -> None:
    assert ("EVICT_FIRST>(t0_desc" in source) != shared
    # Neighbours in the queue are batch elements of one head if those share its tiles.
    assert ("(pair % batch)" in source) == (bias.shape[:2] == (1, 4))


def test_heads_that_share_a_large_bias_run_side_by_side() -> None:
    def side_by_side(bias: torch.Tensor, seqlen: int) -> int:
        call = make_call(None, Bias(bias))
        return forward_launch._heads_side_by_side(call, torch.Size((2, seqlen, 4, 128)), seqlen, 4)

    assert side_by_side(TILES, 8192) == 1
    assert side_by_side(TILES[:, :1], 8192) == 8
    assert side_by_side(TILES[:, :1], 2048) == 1  # the bias stays in the cache as it is


# --- Which calls share a kernel ---


def _key(call: AttentionCall) -> str:
    return launch.cache_key(call, defaults.default(call))


def test_numbers_and_sizes_of_operands_share_a_kernel() -> None:
    other_bias = torch.ones(5, 8, 100, 30).transpose(2, 3)
    pairs = [
        (make_call(SlidingWindow(5, 0)), make_call(SlidingWindow(1000, 7))),
        (make_call(None, SoftCap(30.0)), make_call(None, SoftCap(5.0))),
        (make_call(None, Bias(BIAS)), make_call(None, Bias(other_bias))),
        (make_call(None, ALiBi(SLOPES)), make_call(None, ALiBi(torch.ones(32)))),
        (make_call(), make_call(needs_grad=True)),
    ]
    for x, y in pairs:
        assert _key(x) == _key(y)


def test_functions_that_compute_the_same_share_a_kernel() -> None:
    def near(b, h, q, k):  # type: ignore[no-untyped-def]
        return q - k < 7

    limit = 7
    same, other = (FunctionMask(lambda b, h, query, key, n=n: query - key < n) for n in (limit, 8))
    assert _key(make_call(FunctionMask(near))) == _key(make_call(same))
    assert _key(make_call(FunctionMask(near))) != _key(make_call(other))


def test_other_facts_are_other_kernels() -> None:
    calls = [
        make_call(),
        make_call(Causal()),
        make_call(SlidingWindow(5, None)),
        make_call(SlidingWindow(5, 0)),
        make_call(SlidingWindow(5, 0) & IDS),
        make_call(SlidingWindow(5, 0) | IDS),
        make_call(None, ALiBi(SLOPES), SoftCap(3.0)),
        make_call(None, SoftCap(3.0), ALiBi(SLOPES)),
        make_call(None, Bias(BIAS)),
        make_call(None, Bias(BIAS[:1])),
        make_call(None, Bias(torch.ones(2, 4, 16, 16))),
        make_call(None, Bias(BIAS.half())),
        make_call(dtype=torch.float16),
        make_call(dim=64),
        make_call(dim=120),
        make_call(dim=64, dim_v=128),
        make_call(dim=128, dim_v=64),
        make_call(sink=True),
        make_call(aligned=False),
        make_call(return_lse=False),
        make_call(arch="sm_80"),
        make_call(arch="sm_89"),
    ]
    assert len(set(map(_key, calls))) == len(calls)


def test_another_tile_is_another_kernel() -> None:
    call = make_call()
    keys = {launch.cache_key(call, ForwardConfig(128, 64, stages, 256)) for stages in (1, 2)}
    assert len(keys) == 2


# --- Tiles ---

HEAD_DIMS = range(16, 257, 8)
VARIANTS = {"plain": make_call(), "causal": make_call(Causal()), "softcap": make_call(None, SoftCap(3.0))}


@pytest.mark.parametrize("arch", architecture.ARCHITECTURES)
def test_every_default_fits(arch: str) -> None:
    for dim, dim_v, call in itertools.product(HEAD_DIMS, HEAD_DIMS, VARIANTS.values()):
        call = AttentionCall(torch.bfloat16, dim, dim_v, call.variant, arch=arch)
        for tile in defaults.defaults(call):
            assert defaults.fits(call, tile), (call, tile)
            if isinstance(tile, AmdConfig):
                used = amd_config.shared_bytes(call, tile)
            elif isinstance(tile, HopperConfig):
                used = config.hopper_shared_bytes(call, tile)
                head_dim, head_dim_v = config.hopper_dims(call)
                if not tile.output_apart(call):  # O lies where Q was
                    assert head_dim_v <= head_dim
                    assert architecture.panel(head_dim_v) == architecture.panel(head_dim)
            else:
                used = config.shared_bytes(call, tile) * tile.blocks_per_sm
            assert used <= architecture.ARCHITECTURES[arch].shared_bytes


@pytest.mark.parametrize(
    "name", ["causal-64", *(pytest.param(x, marks=pytest.mark.slow) for x in ("plain-256", "causal-192/128"))]
)
def test_warpgroup_numbers_are_uniform(name: str) -> None:
    """The number is taken once, by a shuffle, from which ptxas knows that it is the same in all threads of a warp."""
    source = lower(CALLS[name])
    assert len(re.findall(r"int warpgroup = __shfl_sync\(", source)) == 1
    assert source.count("threadIdx.x) >> 7") == 1


def test_what_does_not_fit_is_not_valid() -> None:
    call = make_call(dim=256)
    assert config.is_valid(call, ForwardConfig(128, 80, 2, 256))
    assert not config.is_valid(call, ForwardConfig(128, 128, 2, 256))  # shared memory
    assert not config.is_valid(call, ForwardConfig(128, 72, 2, 256))  # keys in groups of 16
    assert not config.is_valid(call, ForwardConfig(64, 80, 2, 256))  # a warp without rows
    assert not config.is_valid(on("sm_89", call), ForwardConfig(128, 80, 2, 256))
    assert config.is_valid(call, HopperConfig(128, 80))
    assert not config.is_valid(call, HopperConfig(128, 96))  # shared memory
    assert not config.is_valid(call, HopperConfig(96, 80))  # half a warpgroup
    assert not config.is_valid(on("sm_100a", call), HopperConfig(128, 80))
    assert not config.is_valid(make_call(dim=256, aligned=False), HopperConfig(128, 80))


def test_padding_is_small() -> None:
    """The head dims of real models are not padded."""
    for dim in HEAD_DIMS:
        assert dim <= architecture.padded(dim) < dim + 64
        assert dim <= config.hopper_dims(make_call(dim=dim))[0] < dim + 32
    assert [dim for dim in (16, 32, 64, 96, 128, 192, 256) if architecture.padded(dim) != dim] == []


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("threads", [128, 256, 384])
def test_consumer_registers(threads: int, blocks: int) -> None:
    """What setmaxnreg asks for is there: multiples of 8, within the registers that the launch was given."""
    registers = ForwardConfig(128, 64, 2, threads, blocks_per_sm=blocks).consumer_registers()
    all_threads = threads + architecture.PRODUCER_THREADS
    given = min(65536 // blocks // all_threads // 8 * 8, 255) * all_threads
    assert registers % 8 == 0
    assert 24 <= registers <= 240
    assert registers * threads + architecture.PRODUCER_REGISTERS * architecture.PRODUCER_THREADS <= given


@pytest.mark.parametrize("block_M", [64, 128, 192])
def test_registers_of_the_hopper_schedule(block_M: int) -> None:
    """The launch gives all threads the same number; setmaxnreg moves registers of the producer to the consumers."""
    tile = HopperConfig(block_M, 128)
    registers, threads = tile.consumer_registers(), tile.consumer_threads()
    all_threads = threads + architecture.PRODUCER_THREADS
    given = min(65536 // all_threads // 8 * 8, 255) * all_threads
    assert registers % 8 == 0
    assert 24 <= registers <= 240
    assert registers * threads + tile.producer_registers * architecture.PRODUCER_THREADS <= given
