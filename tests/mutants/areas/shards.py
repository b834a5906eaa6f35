"""Parts of attention on several devices: single passes, DTensors, and layers on shards."""

from __future__ import annotations

from ..mutant import Mutant, mutants

PASSES = ("compat/flash_attn/test_passes.py",)
LAYERS = ("compat/transformers/test_context_parallel.py",)
DTENSORS = ("runtime/test_sharding.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "compat/flash_attn/_passes.py",
        PASSES,
        {
            "passes: another seed in the state": ("torch.cat([seed, state[:1]])", "torch.cat([state[:1], seed])"),
            "passes: written into a copy": ("given.copy_(rows", "given.clone().copy_(rows"),
            "passes: lse of other rows passes": (
                "(q.shape[0], q.shape[2], q.shape[1]) if packed",
                "(q.shape[0], q.shape[1], q.shape[2]) if packed",
            ),
            "passes: gradients of o alone": ("lse, pad(dout), None)", "lse + 1, pad(dout), None)"),
        },
    ),
    *mutants(
        "compat/transformers/context_parallel.py",
        LAYERS,
        {
            "shards: a window has one key more": ("SlidingWindow(window - 1, 0)", "SlidingWindow(window, 0)"),
            "shards: a plan gets no sink": ("sink=layer.sink, scale", "sink=None, scale"),
            "shards: the ring takes sinks": ("if layer.sink is not None:", "if False:"),
            "shards: the module's window is not seen": (
                'getattr(layer.module, "sliding_window", None) if window is None else window',
                "window",
            ),
            "shards: padding is left out": ("if mask.padding is not None or mask.sequences", "if mask.sequences"),
        },
    ),
    *mutants(
        "compat/transformers/mask.py",
        LAYERS,
        {"shards: a window as wide as the shard is none": ("if not of_shard:", "if True:")},
    ),
    *mutants(
        "runtime/sharding.py",
        DTENSORS,
        {
            "dtensors: a sum of ranks is replicated": (
                "sharding.placements(where, Partial())",
                "sharding.placements(where)",
            ),
            "dtensors: lse has o's placements": ("BATCH: 0, HEADS: 1}", "BATCH: 0, HEADS: 2}"),
            "dtensors: a sink is whole": ("return 0 if dim == HEADS else None", "return None"),
            "dtensors: sequences are taken": ("placement.dim == SEQUENCE:", "placement.dim == -1:"),
        },
    ),
    *mutants(
        "variant/sharding.py",
        DTENSORS,
        {"dtensors: a function of the head is cut": ("if uses or len", "if len")},
    ),
]
