"""The implementations that a benchmark compares, by the name that `--peers` and the result file use."""

from __future__ import annotations

from tileattn.bench.peers.base import OWN, Implementation, Prepared
from tileattn.bench.peers.eager import Eager
from tileattn.bench.peers.flash_cute import FlashCute
from tileattn.bench.peers.flash_varlen import FlashVarlen
from tileattn.bench.peers.flex import Flex
from tileattn.bench.peers.own import TileAttn, TileAttnBf16, TileAttnDense
from tileattn.bench.peers.sdpa import Sdpa, sdpa_peers
from tileattn.bench.peers.triton_tutorial import TritonTutorial

_ALL: tuple[Implementation, ...] = (
    Eager(),
    Sdpa(),
    *sdpa_peers(),
    FlashVarlen(),
    FlashCute(),
    Flex(),
    TileAttnBf16(),
    TileAttnDense(),
    TileAttn(name=f"{OWN}-deterministic", deterministic=True),
    TileAttn("triton", name="triton"),
    TritonTutorial(),
)
PEERS = {peer.name: peer for peer in _ALL}

__all__ = ["PEERS", "Implementation", "Prepared", "TileAttn"]
