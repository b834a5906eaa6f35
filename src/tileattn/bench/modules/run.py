"""Measures the modules at a length, in rounds in which all of them take part."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from tileattn.bench.cases import DTYPES
from tileattn.bench.modules.results import Missing, Results, Row, Shape
from tileattn.measure import timing
from tileattn.measure.memory import peak_bytes
from tileattn.measure.rounds import order
from tileattn.measure.timing import Effort
from tileattn.nn import NaiveAttention, SelfAttention, get_attention

# "masked" without a mask is multi-head attention by `tileattn.attention`, in the backend that it chooses.
MODULES = ("naive", "flash_v1", "flash_v2", "triton", "masked", "gqa")
SEED = 0


def measure(results: Results, seqlen: int, device: torch.device, effort: Effort, say: Callable[[str], None]) -> None:
    """Adds the rows of all modules at a length, and what is missing, to `results`."""
    shape = results.shape
    x = _random(shape, seqlen, device)
    calls: dict[str, Callable[[], object]] = {}
    found: dict[str, tuple[int, float]] = {}
    for name in MODULES:
        try:
            module = make(name, shape, device)
            call = _call(module, x, shape.direction)
            say(f"{name} at {seqlen}")
            call()  # whatever is compiled or allocated once
            found[name] = peak_bytes(call, device), _error(module, x, shape)
            calls[name] = call
        except (NotImplementedError, torch.OutOfMemoryError) as error:
            results.missing.append(Missing(name, seqlen, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(effort.rounds):
        for index in order(len(names), number):
            times[names[index]] += timing.sample_ms(calls[names[index]], device, effort)
    results.rows += [Row(name, seqlen, median(times[name]), *found[name]) for name in names]


def make(name: str, shape: Shape, device: torch.device) -> SelfAttention:
    """The module, with weights that are the same for all modules with as many key/value heads."""
    torch.manual_seed(SEED)
    options = {"causal": shape.causal, "dtype": DTYPES[shape.dtype], "device": device}
    kv_heads = shape.kv_heads if name == "gqa" else None
    source = NaiveAttention(shape.embed_dim, shape.heads, num_kv_heads=kv_heads, **options)  # type: ignore[arg-type]
    if name == "naive":
        return source.eval()
    module = get_attention(name, shape.embed_dim, shape.heads, num_kv_heads=kv_heads, **options)  # type: ignore[arg-type]
    module.load_state_dict(source.state_dict())
    return module.eval()


def _random(shape: Shape, seqlen: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(shape.batch, seqlen, shape.embed_dim, generator=generator)
    return x.to(device, DTYPES[shape.dtype])


def _call(module: SelfAttention, x: Tensor, direction: str) -> Callable[[], object]:
    def forward() -> object:
        with torch.no_grad():
            return module(x)[0]

    def both() -> object:
        given = x.detach().requires_grad_()
        output = module(given)[0]
        return torch.autograd.grad(output, [given, *module.parameters()], torch.ones_like(output))

    return forward if direction == "fwd" else both


def _error(module: SelfAttention, x: Tensor, shape: Shape) -> float:
    """The difference from the output of NaiveAttention in float64, on the first 512 positions of the first sequence."""
    x = x[:1, :512]
    naive = NaiveAttention(
        shape.embed_dim, shape.heads, num_kv_heads=module.num_kv_heads, causal=shape.causal, device=x.device
    )
    naive.load_state_dict(module.state_dict())
    with torch.no_grad():
        expected = naive.double()(x.double())[0]
        return float((module(x)[0].double() - expected).abs().max() / expected.abs().max())
