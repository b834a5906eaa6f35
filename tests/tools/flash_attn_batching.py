"""Continuous batching by transformers' ``flash_attention_2`` on tileattn's functions, in a process of its own.

    python -m tests.tools.flash_attn_batching cpu|cuda

transformers asks whether flash-attn is there when it is imported, so the functions are installed first. It passes block
tables on GPUs only; on a CPU this module makes it pass them, too. The calls of each kind are printed as JSON.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import tileattn.compat.flash_attn as drop_in
from tileattn.compat.flash_attn import _kv_cache, flash_attn_interface

counts: collections.Counter[str] = collections.Counter()


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        counts[name] += 1
        return function(*arguments, **options)

    return call


def pretend_a_gpu() -> None:
    """On a CPU: transformers finds flash-attn, lets a model have it, and passes block tables."""
    import transformers
    from transformers.generation.continuous_batching import initialization
    from transformers.utils import import_utils

    import_utils.is_torch_cuda_available = lambda: True
    transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *arguments, **options: True
    ensure = initialization.ensure_decode_fast_path_is_available
    initialization.ensure_decode_fast_path_is_available = lambda config, *others: (
        None if "flash" in config._attn_implementation else ensure(config, *others)
    )


def main(device: str) -> None:
    drop_in.install()
    if device == "cpu":
        pretend_a_gpu()
    from tests.tools.transformers.batching import check, generate_batch
    from tests.tools.transformers.models import CPU, GPU, MODELS

    _kv_cache.decode = counted("decode", _kv_cache.decode)
    _kv_cache.append_kv = counted("append_kv", _kv_cache.append_kv)
    flash_attn_interface.attend = counted("varlen", flash_attn_interface.attend)
    for kind in ("llama", "gemma3"):
        counts.clear()
        model: Any = MODELS[kind].build(CPU if device == "cpu" else GPU).to(device, torch.bfloat16)
        generate_batch(model, "paged|eager")
        assert not counts
        with _counted_kernels(device):
            # transformers' asynchronous steps go wrong on a busy GPU, whatever the attention: docs/design/limits.md.
            how = {"block_size": 256, "max_blocks_per_request": 2, "use_async_batching": False}
            requests = generate_batch(model, "flash_attention_2", **how)
            if device == "cuda":
                torch.cuda.synchronize()
        model.set_attn_implementation("eager")
        check(f"{kind} by flash_attention_2", model, requests)
        print(json.dumps({"kind": kind, **counts}))


def _counted_kernels(device: str) -> Any:
    """Counts the calls of the TileLang decode phase on a GPU."""
    if device == "cpu":
        return mock.patch.dict({})
    from tileattn.kernels.tilelang.decode.launch import Decoding

    return mock.patch.object(Decoding, "__call__", counted("kernel", Decoding.__call__))


if __name__ == "__main__":
    main(sys.argv[1])
