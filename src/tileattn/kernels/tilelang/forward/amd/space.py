"""What is searched on an MI300X: the published spaces, and the candidates that the tuner measures.

Published. AMD's article is "Quickly Developing Powerful Flash Attention Using TileLang on AMD Instinct MI300X GPU"
(20 January 2026, https://rocm.blogs.amd.com/ecosystems-and-partners/rocm-tilelang-kernel/README.html; its source is
`blogs/ecosystems-and-partners/rocm-tilelang-kernel/README.md` of ROCm/rocm-blogs). It names the parameters and, in its
table 1, the fastest configuration: block_M 128, block_N 32, 512 threads, enable_rasterization. It lists no other value,
but names its code, TileLang 0.1.7. The values are therefore those of `get_configs` in
`examples/amd/example_amd_flash_attn_fwd.py` of tile-ai/tilelang at tag v0.1.7: 576 combinations.

The article counts 108 candidates. No committed version of that list has 108. The list since commit 110ef308a (16
February 2026) has 108 for each of two panel sizes, but no block_N of 32 and no 512 threads: the article's fastest
configuration is not in it. It is kept here as `example_space`.

Ours: which of them are valid (`is_valid_amd`), and the smaller tiles and wider copies of `amd_candidates`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from .....call.facts import AttentionCall
from ...architecture import padded
from .config import AmdConfig, amd_preferences, is_valid_amd

# get_configs of TileLang's example, by the name of the parameter. Both lists have one value for enable_rasterization
# (True), k_pack (2), qk_coalesced_width (8) and v_coalesced_width (4).
ARTICLE: dict[str, tuple[int, ...]] = {
    "block_M": (32, 64, 128, 256),
    "block_N": (32, 64, 128, 256),
    "num_split_q": (64, 128, 256),
    "threads": (128, 256, 512),
    "num_stages": (0, 1),
    "panel_size": (7, 8),
}
EXAMPLE: dict[str, tuple[int, ...]] = {
    "block_M": (64, 128, 256),
    "block_N": (64, 128, 256),
    "num_split_q": (64, 128, 256),
    "threads": (128, 256),
    "num_stages": (0, 1),
    "panel_size": (8,),  # and 7
}
# The fastest configuration in table 1 of the article; what it does not say is not here.
ARTICLE_BEST = {"block_M": 128, "block_N": 32, "threads": 512, "enable_rasterization": True}


def article_space() -> Iterator[AmdConfig]:
    """The 576 configurations that TileLang 0.1.7, which AMD's article ran, searches. Most fit no call."""
    return _combinations(ARTICLE)


def example_space() -> Iterator[AmdConfig]:
    """The 108 configurations, with one panel size, that TileLang's example searches since February 2026."""
    return _combinations(EXAMPLE)


def _combinations(values: dict[str, tuple[int, ...]]) -> Iterator[AmdConfig]:
    for combination in itertools.product(*values.values()):
        yield AmdConfig(**dict(zip(values, combination)), k_pack=2, qk_coalesced_width=8, v_coalesced_width=4)


def is_article_best(config: AmdConfig) -> bool:
    """Whether a configuration has the values that the article gives for its fastest."""
    return all(getattr(config, name) == value for name, value in ARTICLE_BEST.items())


def valid_article_space(call: AttentionCall) -> list[AmdConfig]:
    """The article's space without what does not fit the call; `k_pack` 1 where the head dim has no steps of 32."""
    return _valid(call, article_space())


def amd_candidates(call: AttentionCall) -> list[AmdConfig]:
    """The valid configurations for the tuner.

    The published ones come first: the article's space. Ours follow: smaller tiles, which wide heads need, and the
    preferences without renumbered blocks or with wider copies of V.
    """
    smaller = (
        AmdConfig(block_M, block_N, threads=threads, num_stages=num_stages)
        for block_M, block_N, threads, num_stages in itertools.product((32, 64, 128), (16, 32), (128, 256), (0, 1))
    )
    others = [dataclasses.replace(config, enable_rasterization=False) for config in amd_preferences(call)]
    others += [dataclasses.replace(config, v_coalesced_width=8) for config in amd_preferences(call)]
    return _valid(call, itertools.chain(article_space(), smaller, others))


def distinct(configs: Iterable[AmdConfig], seqlen_q: int) -> list[AmdConfig]:
    """Without those that launch what an earlier one does: the same kernel, with as many blocks for these queries."""
    first: dict[tuple[str, int], AmdConfig] = {}
    for config in configs:
        first.setdefault((config.kernel_text, config.splits(seqlen_q)), config)
    return list(first.values())


def _valid(call: AttentionCall, configs: Iterable[AmdConfig]) -> list[AmdConfig]:
    """The valid ones, each once, with the `k_pack` that the head dim allows."""
    k_pack = 2 if padded(call.head_dim) % 32 == 0 else 1
    packed = dict.fromkeys(dataclasses.replace(config, k_pack=k_pack) for config in configs)
    return [config for config in packed if is_valid_amd(call, config)]
