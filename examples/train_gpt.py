"""Trains a small GPT (gpt.py) on Shakespeare's sonnets, character by character, with tileattn's attention.

    python examples/train_gpt.py                       # about a minute; draws train_gpt.png
    python examples/train_gpt.py --compare             # also trains with PyTorch's attention, for one picture
    python examples/train_gpt.py --device cuda --compile
    torchrun --nproc-per-node 2 examples/train_gpt.py --context-parallel 2 --compare   # two ranks share each sequence
    python examples/train_gpt.py --device cuda --benchmark --seqlen 8192 --dim 1024 --heads 8

The picture needs matplotlib: `pip install ".[plot]"`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
import typer
from checks import check_device, check_picture, check_rate, check_writable
from context import Context, own_gpu
from gpt import ATTEND, GPT, Backend
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from tileattn.bench import results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
PROMPT = "Shall I compare thee to"
COLOURS = {Backend.tileattn: "#D55E00", Backend.sdpa: "#332288"}  # safe for colour-blind readers
console = Console()


class Dtype(str, Enum):
    """The dtype of matrix products; parameters and optimizer updates are float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True)
class Settings:
    """The settings of a run, except the attention."""

    steps: int = 600
    seqlen: int = 128
    batch: int = 8
    layers: int = 4
    heads: int = 4
    dim: int = 128
    rate: float = 4e-3
    device: str = "cpu"
    dtype: Dtype = Dtype.float32
    compile: bool = False
    seed: int = 0


# --- Data ---


class Text:
    """A text as token ids, one per distinct character; the last tenth is held out for validation."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        tokens = self.encode(text)
        self.train, self.held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]

    def encode(self, text: str) -> Tensor:
        ids = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([ids[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())

    def batch(self, settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random pieces of the text, (batch, seqlen), and their targets: the same pieces, shifted by one character."""
        starts = torch.randint(len(self.train) - settings.seqlen, (settings.batch, 1), generator=generator)
        pieces = self.train[starts + torch.arange(settings.seqlen + 1)].to(settings.device)
        return pieces[:, :-1], pieces[:, 1:]


# --- Training ---


def check_attention(backend: Backend, settings: Settings) -> None:
    """Raises unless this attention supports the model's shape, dtype and device."""
    shape = (settings.batch, settings.seqlen, settings.heads, settings.dim // settings.heads)
    dtype = getattr(torch, settings.dtype.value)
    q = torch.zeros(shape, dtype=dtype, device=settings.device, requires_grad=True)
    try:
        ATTEND[backend](q, q, q)
    except RuntimeError as error:  # also NotImplementedError, which tileattn raises
        raise typer.BadParameter(f"--backend {backend.value} does not run here: {error}") from None


class Training:
    """A model and its optimizer. With equal settings all backends begin with the same parameters."""

    def __init__(self, vocabulary: int, settings: Settings, backend: Backend, context: Context | None = None) -> None:
        self.settings, self.context = settings, context
        torch.manual_seed(settings.seed)
        shape = (settings.seqlen, settings.layers, settings.heads, settings.dim)
        attend = ATTEND[backend] if context is None else context.attend(backend)
        self.model = GPT(vocabulary, *shape, attend).to(settings.device)
        if context is not None:
            context.prepare(self.model)
        self.compiled = torch.compile(self.model) if settings.compile else self.model
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]  # biases and norms: without weight decay
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95))

    def autocast(self) -> torch.autocast:
        """The context in which matrix products have the chosen dtype."""
        dtype = getattr(torch, self.settings.dtype.value)
        return torch.autocast(torch.device(self.settings.device).type, dtype=dtype, enabled=dtype != torch.float32)

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, in nats per character: log(vocabulary) for a model that knows nothing.

        With several ranks, this rank's share of it: that of its characters, over the number of all.
        """
        if self.context is not None:
            count = targets.numel()
            tokens, targets = self.context.plan.shard(tokens, targets)
            with self.autocast():
                logits = model(tokens)
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / count
        with self.autocast():
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, tokens: Tensor, targets: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(self.compiled, tokens, targets)
        (loss if self.context is None else self.context.scale(loss)).backward()
        if self.context is not None:
            self.context.sum_gradients(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.total(loss)

    def total(self, loss: Tensor) -> Tensor:
        """The loss of all ranks."""
        return loss.detach() if self.context is None else self.context.total(loss)


def learning_rate(step: int, settings: Settings) -> float:
    """The learning rate: linear warm-up over the first tenth of the steps, then cosine decay to a tenth."""
    warmup = max(1, settings.steps // 10)
    if step < warmup:
        return settings.rate * (step + 1) / warmup
    return settings.rate * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (settings.steps - warmup)))


@dataclass(frozen=True)
class Losses:
    """The losses of one training: after every step on the training batch, and at the end on the held-out text."""

    attention: str
    losses: list[float]
    held_out: float


def train(text: Text, settings: Settings, backend: Backend, context: Context | None = None) -> tuple[Training, Losses]:
    """Trains a model; returns it and its losses."""
    training, losses = Training(len(text.characters), settings, backend, context), []
    name = backend.value if context is None else f"{backend.value} on {context.ranks} ranks"
    generator = torch.Generator().manual_seed(settings.seed)  # all backends see the same pieces of the text
    # A file or a pipe has no room for a bar that is drawn again and again: it gets some twenty lines instead.
    on_terminal = console.is_terminal
    columns = (*Progress.get_default_columns(), "{task.fields[note]}")
    with Progress(*columns, console=console, disable=not on_terminal) as progress:
        bar = progress.add_task(f"{name:8}", total=settings.steps, note="")
        start = time.perf_counter()
        for step in range(settings.steps):
            losses.append(training.step(*text.batch(settings, generator), learning_rate(step, settings)).item())
            speed = (step + 1) * settings.batch * settings.seqlen / (time.perf_counter() - start)
            note = f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s"
            progress.update(bar, advance=1, note=note)
            if not on_terminal and step % max(1, settings.steps // 20) == 0:
                console.print(f"{name}: step {step + 1} of {settings.steps}, {note}", highlight=False)
    with torch.no_grad():
        pieces = text.held_out.unfold(0, settings.seqlen + 1, settings.seqlen).to(settings.device)
        held_out = training.total(training.loss(training.model, pieces[:, :-1], pieces[:, 1:])).item()
    console.print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, on held-out text {held_out:.3f}")
    return training, Losses(name, losses, held_out)


# --- What a run shows ---


def draw(curves: list[Losses], path: Path) -> None:
    """Writes a picture of the losses; the path's suffix chooses the format."""
    figure(curves).savefig(path, dpi=150)


def figure(curves: list[Losses]) -> Figure:
    """Draws the losses over the steps and, for two curves, their difference below."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 4.5 if len(curves) == 1 else 6), layout="constrained")
    axes = drawn.subplots(len(curves), sharex=True, squeeze=False, height_ratios=[3, 1.2][: len(curves)])[:, 0]
    for curve, style in zip(curves, ("-", "--"), strict=False):
        colour = next((colour for name, colour in COLOURS.items() if name.value == curve.attention), "#0072B2")
        axes[0].plot(curve.losses, style, color=colour, linewidth=1.2, label=curve.attention)
    axes[0].set_ylabel("loss (nats per character)")
    axes[0].legend(frameon=False)
    if len(curves) == 2:
        apart = differences(*(curve.losses for curve in curves))
        axes[1].plot(apart, ".", color="#222222", markersize=3)
        axes[1].set_yscale("symlog", linthresh=1e-8)  # logarithmic above 1e-8; equal losses are at 0
        axes[1].set_ylim(-3e-9, max(1e-5, 2 * max(apart)))
        axes[1].set_ylabel("difference")
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_title("A small GPT learns Shakespeare's sonnets", loc="left", fontsize=10)
    axes[-1].set_xlabel("step")
    return drawn


def differences(a: list[float], b: list[float]) -> list[float]:
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


@dataclass(frozen=True)
class Speed:
    """The speed of training with one attention: the median of the rounds."""

    attention: str
    ms_per_step: float
    tokens_per_s: float


def benchmark(text: Text, settings: Settings, backends: list[Backend], rounds: int = 5, steps: int = 4) -> list[Speed]:
    """Measures the training speed of several attentions in one process, in alternating rounds."""
    on_gpu = settings.device.startswith("cuda")
    tokens, targets = text.batch(settings, torch.Generator().manual_seed(settings.seed))
    trainings = {backend: Training(len(text.characters), settings, backend) for backend in backends}
    seconds: dict[Backend, list[float]] = {backend: [] for backend in backends}
    for turn in range(rounds + 1):
        for backend, training in trainings.items():
            start = time.perf_counter()
            for _ in range(steps):
                training.step(tokens, targets, settings.rate)
            if on_gpu:
                torch.cuda.synchronize()
            if turn > 0:  # the first compiles and warms up
                seconds[backend].append((time.perf_counter() - start) / steps)
    tokens_per_step = settings.batch * settings.seqlen
    medians = {backend: median(times) for backend, times in seconds.items()}
    return [Speed(backend.value, 1e3 * s, tokens_per_step / s) for backend, s in medians.items()]


def table(speeds: list[Speed]) -> Table:
    """A table of the speeds, each compared with the first."""
    shown = Table("attention", "ms per step", "tokens/s", f"speed against {speeds[0].attention}")
    for each in speeds:
        ratio = each.tokens_per_s / speeds[0].tokens_per_s
        shown.add_row(each.attention, f"{each.ms_per_step:.1f}", f"{each.tokens_per_s:,.0f}", f"{ratio:.2f}x")
    return shown


def save(rows: Sequence[Speed | Losses], settings: Settings, commit: str | None, path: Path) -> None:
    """Writes the rows with their settings, device, versions, commit and date, as in files of `tileattn bench`."""
    run = results.begin(torch.device(settings.device), commit, " ".join(["train_gpt.py", *sys.argv[1:]]))
    content = {**results.origin(run), "settings": asdict(settings), "rows": [asdict(each) for each in rows]}
    results.write(content, path)


# --- Command line ---


def check_context(ranks: int, fsdp: bool, backend: Backend, alone: bool, device: str) -> None:
    """Raises unless the options go with several ranks."""
    if fsdp and ranks == 1:
        raise typer.BadParameter("--fsdp shards over the ranks of --context-parallel: give it 2 or more")
    if ranks > 1 and (alone or backend not in (Backend.tileattn, Backend.tilelang, Backend.torch)):
        raise typer.BadParameter("--context-parallel goes with tileattn's backends, without --benchmark and --compile")
    if ranks > 1 and device not in ("cpu", "cuda"):
        raise typer.BadParameter(
            f"--context-parallel goes with --device cpu or cuda, got {device}: each rank has its GPU"
        )


def main(
    backend: Annotated[Backend, typer.Option(help="Which attention the model computes with.")] = Backend.tileattn,
    compare: Annotated[bool, typer.Option("--compare", help="Train again through PyTorch's attention.")] = False,
    measure: Annotated[bool, typer.Option("--benchmark", help="Only measure speed, beside PyTorch's.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Run the model under torch.compile.")] = False,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = Settings.device,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the matrix products. Default: bfloat16 on a GPU, else float32.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = Settings.steps,
    seqlen: Annotated[int, typer.Option(min=1, help="Characters that the model sees at once.")] = Settings.seqlen,
    batch: Annotated[int, typer.Option(min=1, help="Pieces of text in a step.")] = Settings.batch,
    layers: Annotated[int, typer.Option(min=1)] = Settings.layers,
    heads: Annotated[int, typer.Option(min=1)] = Settings.heads,
    dim: Annotated[int, typer.Option(min=1, help="Width of the model, a multiple of 2 * heads.")] = Settings.dim,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = Settings.rate,
    seed: Annotated[int, typer.Option()] = Settings.seed,
    out: Annotated[Path, typer.Option(help="Where the picture goes: .png, .svg or .pdf.")] = Path("train_gpt.png"),
    json: Annotated[
        Path | None, typer.Option(help="With --benchmark: where the speeds go, too.", show_default=False)
    ] = None,
    losses: Annotated[
        Path | None, typer.Option(help="Where the loss of every step goes, as JSON.", show_default=False)
    ] = None,
    ranks: Annotated[
        int, typer.Option("--context-parallel", min=1, help="Ranks of torchrun that share each sequence.")
    ] = 1,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Also shard parameters over these ranks (FSDP2).")] = False,
    commit: Annotated[
        str | None,
        typer.Option(help="To record in --json or --losses, instead of what git says of the code.", show_default=False),
    ] = None,
) -> None:
    """Train a small GPT on Shakespeare's sonnets and print what it writes."""
    text = Text(TEXT.read_text())
    if dim % (2 * heads):
        raise typer.BadParameter(f"--dim must be a multiple of twice --heads, got {dim} and {heads}")
    if seqlen >= len(text.held_out):
        raise typer.BadParameter(f"--seqlen must be less than {len(text.held_out)}, got {seqlen}")
    if measure and compare:
        raise typer.BadParameter("--compare trains and --benchmark only measures: give one of the two")
    check_context(ranks, fsdp, backend, measure or compile, device)
    if compare and backend == Backend.sdpa:
        raise typer.BadParameter("--compare needs another --backend than sdpa, with which it compares")
    check_rate(rate)
    on_gpu = device.startswith("cuda")
    dtype = dtype or (Dtype.bfloat16 if on_gpu else Dtype.float32)
    if measure and on_gpu and dtype == Dtype.float32:
        raise typer.BadParameter("--benchmark on a GPU needs --dtype bfloat16, as FlashAttention-2 and cuDNN do")
    if json is not None and (not measure or json.exists()):
        raise typer.BadParameter(f"--json {json} exists" if measure else "--json is for the speeds of --benchmark")
    if losses is not None and (measure or losses.exists()):
        raise typer.BadParameter("--losses is for training" if measure else f"--losses {losses} exists")
    out = out if out.suffix else out.with_suffix(".png")
    if not measure:
        check_picture(out)
    if json is not None:
        check_writable("--json", json)
    if losses is not None:
        check_writable("--losses", losses)
    check_device(device)
    if ranks > 1 and on_gpu:
        own_gpu()  # before anything is put on a GPU, or all ranks would use the first
    settings = Settings(steps, seqlen, batch, layers, heads, dim, rate, device, dtype, compile, seed)
    context = Context(ranks, seqlen, device, fsdp) if ranks > 1 else None  # chooses each rank's GPU
    check_attention(backend, settings)
    if measure:
        baselines = [Backend.fa2, Backend.cudnn] if on_gpu else [Backend.sdpa]
        speeds = benchmark(text, settings, list(dict.fromkeys((backend, *baselines))))
        console.print(table(speeds))
        if json is not None:
            save(speeds, settings, commit, json)
            console.print(f"The speeds are in {json}.")
        return
    if context is not None and context.rank:
        console.quiet = True
    training, curve = train(text, settings, backend, context)
    model = training.model if context is None else context.whole(training.model)
    if context is not None and context.rank:  # rank 0 shows the result
        context.close()
        return
    curves = [curve]
    if compare:
        curves.append(train(text, settings, Backend.sdpa if context is None else backend)[1])
        apart = differences(*(each.losses for each in curves))
        console.print(f"losses differ by at most {max(apart):.2g}, by {sum(apart) / len(apart):.2g} on average")
    tokens = text.encode(PROMPT)[None].to(device)
    with training.autocast():
        written = model.continued(tokens, 400, torch.Generator().manual_seed(seed))
    console.print(text.decode(written[0]), markup=False, highlight=False)
    if losses is not None:
        save(curves, settings, commit, losses)
    draw(curves, out)
    console.print(f"The losses are drawn in {out}.")
    if context is not None:
        context.close()


if __name__ == "__main__":
    typer.run(main)
