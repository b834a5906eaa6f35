"""Times generation by a Llama-8B with random weights in transformers: tileattn, "sdpa" and "flash_attention_2".

    python benchmarks/transformers_generate.py --json generate.json      # 8192 tokens, bfloat16; a GPU
    python benchmarks/transformers_generate.py --caches static --compile --layers 8
    python benchmarks/transformers_generate.py --hidden 64 --intermediate 96 --heads 4 --kv-heads 2 --layers 2 \\
        --context 600 --new 8 --vocabulary 100

`model.generate` is timed as a user calls it, with a mask of ones, token by token: from the first token to the last. The
time to the first token, with the prompt, is given beside it. The host's part of a step ends when the model has returned
its logits: all kernels of its layers are launched then, and nothing has waited for them unless a layer did. If it is
about as long as the step, Python is what takes the time; if it is much shorter, the GPU is.

There is one model; the attentions take turns, in one process, after a call of each that is not timed.
`flash_attention_2` is transformers' implementation of that name on tileattn's flash-attn functions
(`tileattn.compat.flash_attn.install`); `fa2` is "sdpa" with PyTorch's FlashAttention-2 forced, and `cudnn` with cuDNN.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import transformers_llama
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.attention import sdpa_kernel

import tileattn.compat.flash_attn
import tileattn.compat.transformers
from tileattn.cli.group import run_script
from tileattn.measure.rounds import order

# Names of attentions: of transformers' implementation, and PyTorch's kernel for it.
ATTENTIONS = {**transformers_llama.ATTENTIONS, "flash_attention_2": ("flash_attention_2", None)}
CACHES = ("dynamic", "static")
console = Console()


@dataclass(frozen=True)
class Settings:
    """All that a run depends on, but for the attention. The sizes of a layer are Llama-3's of 8 billion parameters."""

    layers: int = 32
    batch: int = 1
    context: int = 8192
    new: int = 48
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    device: str = "cuda"
    dtype: str = "bfloat16"
    rounds: int = 2
    compile: bool = False


@dataclass(frozen=True)
class Row:
    """One attention with one cache: medians over all rounds.

    tokens_per_s: of all sequences of the batch. host_ms_per_step: until the model's last launch. first_ms: the time to
    the first token. same: how many of the tokens are those of the first attention, of the first sequence, before one
    differs; with random weights, tokens are about as likely as each other.
    """

    cache: str
    attention: str
    tokens_per_s: float
    ms_per_step: float
    host_ms_per_step: float
    first_ms: float
    same: int


class Clock:
    """A streamer that records when each token arrives, and a logits processor that records when the model returns.

    times: of the prompt, then of each token. launched: of each token's logits.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.launched: list[float] = []
        self.tokens: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are; on a GPU their kernels may still run."""
        self.launched.append(time.perf_counter())
        return scores

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then the tokens of a step; they are on the host."""
        self.times.append(time.perf_counter())
        self.tokens.append(int(value.reshape(-1)[0]))

    def end(self) -> None:
        """Nothing is left to do."""


# --- The model ---


class Generation:
    """The model, and what is timed."""

    def __init__(self, settings: Settings, attentions: list[str]) -> None:
        if "flash_attention_2" in attentions:
            tileattn.compat.flash_attn.install()  # transformers asks for it when it is imported
        import transformers

        tileattn.compat.transformers.register()
        self.settings = settings
        config = transformers.LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.hidden,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=settings.context + settings.new,
            eos_token_id=None,
        )
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, settings.dtype))
        with torch.device(settings.device):
            self.model = transformers.LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
            self.ids = torch.randint(1, settings.vocabulary, (settings.batch, settings.context))
        self.mask = torch.ones_like(self.ids)

    def run(self, cache: str, attention: str) -> Clock:
        """Generates once."""
        implementation, kernel = ATTENTIONS[attention]
        self.model.set_attn_implementation(implementation)
        settings, clock = self.settings, Clock()
        options: dict[str, Any] = {"max_new_tokens": settings.new, "do_sample": False, "pad_token_id": 0}
        options |= {"disable_compile": not settings.compile, "cache_implementation": cache}
        options |= {"streamer": clock, "logits_processor": [clock]}
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            self.model.generate(self.ids, attention_mask=self.mask, **options)
        return clock


# --- Measurement ---


def measure(settings: Settings, attentions: list[str], caches: list[str]) -> list[Row]:
    """Every attention with every cache, in turns."""
    generation = Generation(settings, attentions)
    # transformers has no static cache for flash_attention_2.
    pairs = [(c, a) for c in caches for a in attentions if (c, a) != ("static", "flash_attention_2")]
    clocks: dict[tuple[str, str], list[Clock]] = {pair: [] for pair in pairs}
    with Progress(console=console) as progress:
        bar = progress.add_task("generating", total=(1 + settings.rounds) * len(pairs))
        for number in range(-1, settings.rounds):
            for index in order(len(pairs), max(number, 0)):
                clock = generation.run(*pairs[index])
                if number >= 0:  # the first call compiles what is compiled
                    clocks[pairs[index]].append(clock)
                progress.advance(bar)
    expected = clocks[pairs[0]][0].tokens
    return [_row(pair, found, settings, expected) for pair, found in clocks.items()]


def _row(pair: tuple[str, str], clocks: list[Clock], settings: Settings, expected: list[int]) -> Row:
    # The first time is the prompt's, the second the first token's.
    step = median((clock.times[-1] - clock.times[1]) / (len(clock.times) - 2) for clock in clocks)
    host = median(mean(map(sub, clock.launched[1:], clock.times[1:-1])) for clock in clocks)
    first = median(clock.times[1] - clock.times[0] for clock in clocks)
    tokens = clocks[0].tokens[1:]
    same = next((i for i, (one, other) in enumerate(zip(tokens, expected[1:])) if one != other), len(tokens))
    return Row(*pair, settings.batch / step, step * 1e3, host * 1e3, first * 1e3, same)


# --- What a run shows ---


def table(rows: list[Row]) -> Table:
    """A table for the terminal: each attention's speed, and the speed of the first relative to it."""
    speed = f"{rows[0].attention}'s speed"
    shown = Table("cache", "attention", "tokens/s", "ms/step", "of the host", speed, "first token, ms", "same")
    first = {row.cache: row for row in reversed(rows)}
    for row in rows:
        ratio = f"{first[row.cache].tokens_per_s / row.tokens_per_s:.2f}x"
        steps = (f"{row.tokens_per_s:,.1f}", f"{row.ms_per_step:.2f}", f"{row.host_ms_per_step:.2f}")
        shown.add_row(row.cache, row.attention, *steps, ratio, f"{row.first_ms:.0f}", str(row.same))
    return shown


def main(
    layers: Annotated[int, typer.Option(min=1)] = Settings.layers,
    batch: Annotated[int, typer.Option(min=1)] = Settings.batch,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = Settings.context,
    new: Annotated[int, typer.Option(min=3, help="Tokens that are generated.")] = Settings.new,
    hidden: Annotated[int, typer.Option(min=1)] = Settings.hidden,
    intermediate: Annotated[int, typer.Option(min=1)] = Settings.intermediate,
    heads: Annotated[int, typer.Option(min=1)] = Settings.heads,
    kv_heads: Annotated[int, typer.Option(min=1)] = Settings.kv_heads,
    vocabulary: Annotated[int, typer.Option(min=2)] = Settings.vocabulary,
    attentions: Annotated[
        str | None,
        typer.Option(
            help=f"Of {', '.join(ATTENTIONS)}.", show_default="tileattn,sdpa,flash_attention_2; on a CPU the first two"
        ),
    ] = None,
    caches: Annotated[str, typer.Option(help="dynamic, static or both.")] = ",".join(CACHES),
    compile: Annotated[
        bool, typer.Option("--compile", help="Let transformers compile steps on a static cache.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda.", show_default="a GPU, if there is one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = Settings.dtype,
    rounds: Annotated[int, typer.Option(min=1)] = Settings.rounds,
    json: Annotated[Path | None, typer.Option(help="Where the rows go, too.", show_default=False)] = None,
    commit: Annotated[
        str | None, typer.Option(help="To record in --json, instead of what git says of the code.", show_default=False)
    ] = None,
) -> None:
    """Measure generation by a Llama with several attentions."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    names = (attentions or ("tileattn,sdpa,flash_attention_2" if on_gpu else "tileattn,sdpa")).split(",")
    chosen = caches.split(",")
    for option, given, accepted in (("attentions", names, tuple(ATTENTIONS)), ("caches", chosen, CACHES)):
        if unknown := [name for name in given if name not in accepted]:
            raise typer.BadParameter(f"--{option}: {unknown[0]!r} is not known; accepted: {', '.join(accepted)}")
    if "flash_attention_2" in names and not on_gpu:
        raise typer.BadParameter("--attentions: transformers has flash_attention_2 on GPUs only")
    if hidden % (2 * heads) or heads % kv_heads:
        raise typer.BadParameter(
            f"--hidden must be a multiple of twice --heads, and that of --kv-heads, got {hidden}, {heads}, {kv_heads}"
        )
    if json is not None and json.exists():
        raise typer.BadParameter(f"--json {json} exists")
    settings = Settings(
        layers, batch, context, new, hidden, intermediate, heads, kv_heads, vocabulary, device, dtype, rounds, compile
    )
    rows = measure(settings, names, chosen)
    console.print(table(rows))
    if json is not None:
        transformers_llama.save("transformers_generate.py", rows, settings, commit, json)
        console.print(f"The rows are in {json}.")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_script(app)
