"""The implementations that a benchmark compares, by the names that `--baselines` and the result file use."""

from __future__ import annotations

from tileattn.bench.baselines.base import OWN, Implementation, Prepared
from tileattn.bench.baselines.eager import Eager
from tileattn.bench.baselines.flash_cute import FlashCute
from tileattn.bench.baselines.flash_varlen import FlashVarlen
from tileattn.bench.baselines.flex import Flex
from tileattn.bench.baselines.own import TileAttn, TileAttnBf16, TileAttnDense
from tileattn.bench.baselines.sdpa import Sdpa, restricted_sdpas
from tileattn.bench.baselines.triton_tutorial import TritonTutorial

_ALL: tuple[Implementation, ...] = (
    Eager(),
    Sdpa(),
    *restricted_sdpas(),
    FlashVarlen(),
    FlashCute(),
    Flex(),
    TileAttnBf16(),
    TileAttnDense(),
    TileAttn(name=f"{OWN}-deterministic", deterministic=True),
    TileAttn("triton", name="triton"),
    TritonTutorial(),
)
BASELINES = {baseline.name: baseline for baseline in _ALL}

__all__ = ["BASELINES", "Implementation", "Prepared", "TileAttn"]
