"""Times prefill and a training step of Llama-8B's layers in transformers: tileattn, FlashAttention-2 and cuDNN.

    python benchmarks/transformers_llama.py --json llama.json      # 4 layers, 8192 tokens, bfloat16; a GPU
    python benchmarks/transformers_llama.py --seqlen 32768 --layers 2 --attentions tileattn,fa2
    python benchmarks/transformers_llama.py --hidden 64 --intermediate 96 --heads 4 --kv-heads 2 --layers 1 --seqlen 64

Whole layers are timed, with projections, norms and MLPs, because that is the time that a user of transformers sees.
There is one model, with random weights; the attentions take turns, in one process. `fa2` and `cudnn` are transformers'
"sdpa" with PyTorch's kernel of that name forced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileattn.bench import results
from tileattn.cli.group import run_script
from tileattn.measure import timing
from tileattn.measure.rounds import order

# Names of attentions: of transformers' implementation, and PyTorch's kernel for it.
ATTENTIONS: dict[str, tuple[str, SDPBackend | None]] = {
    "tileattn": ("tileattn", None),
    "fa2": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "cudnn": ("sdpa", SDPBackend.CUDNN_ATTENTION),
    "sdpa": ("sdpa", None),  # PyTorch's choice
    "eager": ("eager", None),
}
console = Console()


@dataclass(frozen=True)
class Settings:
    """All that a run depends on, but for the attention. The sizes of a layer are Llama-3's of 8 billion parameters."""

    layers: int = 4
    batch: int = 1
    seqlen: int = 8192
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    device: str = "cuda"
    dtype: str = "bfloat16"
    rounds: int = 6
    calls: int = 5


@dataclass(frozen=True)
class Row:
    """One attention in one pass: the median over all rounds.

    difference: of the last layer's output from the first attention's, relative, in the Euclidean norm.
    """

    work: str
    attention: str
    ms: float
    tokens_per_s: float
    difference: float


# --- The model ---


class Stack:
    """The layers, and the two things that are timed."""

    def __init__(self, settings: Settings) -> None:
        import transformers

        import tileattn.compat.transformers

        tileattn.compat.transformers.register()
        self.transformers, self.device = transformers, torch.device(settings.device)
        config = transformers.LlamaConfig(
            vocab_size=8,  # tokens are not embedded, and nothing is predicted
            hidden_size=settings.hidden,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=settings.seqlen,
        )
        torch.manual_seed(0)
        dtype = getattr(torch, settings.dtype)
        with self.device:
            self.model = transformers.LlamaModel(config).to(dtype)
            self.x = torch.randn(settings.batch, settings.seqlen, settings.hidden, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    @contextmanager
    def attending(self, attention: str) -> Iterator[None]:
        """Inside, the model computes with this attention."""
        implementation, kernel = ATTENTIONS[attention]
        self.model.set_attn_implementation(implementation)
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            yield

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """The whole prompt at once, into an empty cache."""
        past = self.transformers.DynamicCache(config=self.model.config)
        return self.output(past_key_values=past, use_cache=True)

    def train(self) -> None:
        """Forward, backward and the optimizer's step."""
        self.output(use_cache=False).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def output(self, **options: Any) -> Tensor:
        hidden = self.model(inputs_embeds=self.x, **options).last_hidden_state
        assert isinstance(hidden, Tensor)
        return hidden


# --- Measurement ---


def measure(settings: Settings, attentions: list[str]) -> list[Row]:
    """Every attention in both passes, in turns."""
    stack = Stack(settings)
    outputs = {}
    for attention in attentions:
        with stack.attending(attention):
            outputs[attention] = stack.prefill().double()
    for attention in attentions:
        with stack.attending(attention):
            stack.train()  # compiles what is compiled, and changes the weights
    reference = outputs[attentions[0]]
    differences = {name: float((o - reference).norm() / reference.norm()) for name, o in outputs.items()}
    del outputs, reference
    work = {"prefill": stack.prefill, "training": stack.train}
    samples: dict[tuple[str, str], list[float]] = {(name, a): [] for name in work for a in attentions}
    with Progress(console=console) as progress:
        bar = progress.add_task("rounds", total=settings.rounds * len(samples))
        for number in range(settings.rounds):
            for name, call in work.items():
                for index in order(len(attentions), number):
                    samples[name, attentions[index]] += _sample(stack, attentions[index], call, settings.calls)
                    progress.advance(bar)
    tokens = settings.batch * settings.seqlen
    medians = {key: median(samples_ms) for key, samples_ms in samples.items()}
    return [Row(name, a, ms, tokens / ms * 1e3, differences[a]) for (name, a), ms in medians.items()]


def _sample(stack: Stack, attention: str, call: Callable[[], object], calls: int) -> list[float]:
    with stack.attending(attention):
        call()  # at this attention's clock and memory
        return timing.time_calls(call, stack.device, calls)


# --- What a run shows ---


def table(rows: list[Row]) -> Table:
    """A table for the terminal: each attention's speed, and the speed of the first relative to it."""
    shown = Table("", "attention", "ms", "tokens/s", f"{rows[0].attention}'s speed over it", "difference")
    first = {row.work: row for row in reversed(rows)}
    for row in rows:
        ratio = f"{row.ms / first[row.work].ms:.2f}x"
        shown.add_row(
            row.work, row.attention, f"{row.ms:.2f}", f"{row.tokens_per_s:,.0f}", ratio, f"{row.difference:.1e}"
        )
    return shown


def save(script: str, rows: Sequence[Any], settings: Any, commit: str | None, path: Path) -> None:
    """Writes a script's rows with device, versions, commit and date, as in files of `tileattn bench`.

    `transformers_generate.py` calls it, too: rows and settings are dataclasses, and settings have a device.
    """
    import transformers

    run = results.begin(torch.device(settings.device), commit, " ".join([script, *sys.argv[1:]]))
    origin = results.origin(run)
    origin["versions"] = {**run.versions, "transformers": transformers.__version__}
    content = {**origin, "settings": asdict(settings), "rows": [asdict(row) for row in rows]}
    results.write(content, path)


def main(
    layers: Annotated[int, typer.Option(min=1)] = Settings.layers,
    batch: Annotated[int, typer.Option(min=1)] = Settings.batch,
    seqlen: Annotated[int, typer.Option(min=1)] = Settings.seqlen,
    hidden: Annotated[int, typer.Option(min=1)] = Settings.hidden,
    intermediate: Annotated[int, typer.Option(min=1)] = Settings.intermediate,
    heads: Annotated[int, typer.Option(min=1)] = Settings.heads,
    kv_heads: Annotated[int, typer.Option(min=1)] = Settings.kv_heads,
    attentions: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(ATTENTIONS)}.", show_default="tileattn,fa2,cudnn; on a CPU sdpa")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda.", show_default="a GPU, if there is one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = Settings.dtype,
    rounds: Annotated[int, typer.Option(min=1)] = Settings.rounds,
    calls: Annotated[int, typer.Option(min=1, help="Of each attention in each round.")] = Settings.calls,
    json: Annotated[Path | None, typer.Option(help="Where the rows go, too.", show_default=False)] = None,
    commit: Annotated[
        str | None, typer.Option(help="To record in --json, instead of what git says of the code.", show_default=False)
    ] = None,
) -> None:
    """Measure the layers of a Llama with several attentions."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = (attentions or ("tileattn,fa2,cudnn" if device.startswith("cuda") else "tileattn,sdpa")).split(",")
    unknown = [name for name in names if name not in ATTENTIONS]
    if unknown:
        raise typer.BadParameter(f"--attentions: {unknown[0]!r} is not known; accepted: {', '.join(ATTENTIONS)}")
    if hidden % (2 * heads) or heads % kv_heads:
        raise typer.BadParameter(
            f"--hidden must be a multiple of twice --heads, and that of --kv-heads, got {hidden}, {heads}, {kv_heads}"
        )
    if json is not None and json.exists():
        raise typer.BadParameter(f"--json {json} exists")
    settings = Settings(layers, batch, seqlen, hidden, intermediate, heads, kv_heads, device, dtype, rounds, calls)
    rows = measure(settings, names)
    console.print(table(rows))
    if json is not None:
        save("transformers_llama.py", rows, settings, commit, json)
        console.print(f"The rows are in {json}.")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_script(app)
