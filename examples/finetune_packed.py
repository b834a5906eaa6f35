"""Fine-tunes a causal language model of transformers on packed passages of Shakespeare's sonnets, without padding.

    python examples/finetune_packed.py                          # a tiny Llama with random weights; half a CPU minute
    python examples/finetune_packed.py --compare                # also trains on padded batches with PyTorch's attention
    python examples/finetune_packed.py --model ~/models/llama --device cuda --steps 200

Passages have one to fourteen lines. A step puts several passages into one row, one after another, and passes their
boundaries to the model (`cu_seq_lens`): each passage attends only to itself. Losses and gradients equal those of a
padded batch. Two things make the model use tileattn: `register()` and `attn_implementation="tileattn"`.

On a GPU the model computes in bfloat16 (autocast). The first step of the first run may take a minute: it compiles five
kernels, one after another, and caches them on disk.

It needs transformers and matplotlib: `pip install ".[transformers,plot]"`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from checks import check_device, check_picture, check_rate
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import tileattn.compat.transformers

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
PROMPT = "Shall I compare thee to"
console = Console()


@dataclass(frozen=True)
class Settings:
    """The settings of a run, except how sequences are batched."""

    steps: int = 60
    batch: int = 8
    longest: int = 1024
    rate: float = 3e-3
    device: str = "cpu"
    seed: int = 0


# --- Model and text ---


@dataclass(frozen=True)
class Language:
    """The conversion of text to tokens and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def tiny(text: str) -> tuple[nn.Module, Language]:
    """A Llama with 0.6 million random parameters. Its tokens are the characters of the text."""
    characters = sorted(set(text))
    ids = {character: i for i, character in enumerate(characters)}
    config = transformers.LlamaConfig(
        vocab_size=len(characters), hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    language = Language(lambda s: [ids[c] for c in s], lambda tokens: "".join(characters[i] for i in tokens))
    return transformers.LlamaForCausalLM(config), language


def pretrained(folder: Path) -> tuple[nn.Module, Language]:
    """A model and its tokenizer from a folder; nothing is downloaded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    return model, Language(lambda s: tokenizer(s)["input_ids"], lambda tokens: tokenizer.decode(tokens))


def passages(text: str, language: Language, settings: Settings) -> list[list[int]]:
    """The tokens of each passage: the sonnets, split at random between lines."""
    generator = torch.Generator().manual_seed(settings.seed)
    sequences = []
    for sonnet in re.split(r"^[IVXLC]+$", text, flags=re.M)[1:]:
        lines = sonnet.strip().splitlines(keepends=True)
        while lines:
            count = int(torch.randint(1, 15, (), generator=generator))
            sequences.append(language.encode("".join(lines[:count]))[: settings.longest])
            lines = lines[count:]
    return sequences


def chosen(sequences: list[list[int]], settings: Settings) -> Iterator[list[list[int]]]:
    """Yields the sequences of each step, endlessly."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        order = torch.randperm(len(sequences), generator=generator).tolist()
        for start in range(0, len(order) - settings.batch + 1, settings.batch):
            yield [sequences[i] for i in order[start : start + settings.batch]]


# --- Batches ---


def packed(sequences: list[list[int]]) -> dict[str, Any]:
    """A packed batch: one row of all tokens, (1, total), cu_seq_lens and the longest length."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return dict(collate([{"input_ids": sequence} for sequence in sequences]))


def padded(sequences: list[list[int]]) -> dict[str, Any]:
    """A padded batch: one row per sequence, (batch, longest), and a mask that is 0 for padding."""
    longest = max(map(len, sequences))
    ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


WAYS: dict[str, tuple[Callable[[list[list[int]]], dict[str, Any]], str]] = {
    "packed": (packed, "tileattn"),
    "padded": (padded, "sdpa"),
}


# --- Training ---


def precision(device: torch.device) -> torch.autocast:
    """The dtype of the computation: bfloat16 on a GPU, since tileattn's GPU kernels need 16 bits; float32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def train(model: Any, sequences: list[list[int]], settings: Settings, way: str) -> list[float]:
    """Trains the model; returns the loss of every step, in nats per token."""
    collate, attention = WAYS[way]
    model.set_attn_implementation(attention)
    model.train()
    device = torch.device(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95))
    losses, computed, real, timed = [], 0, 0, 0
    # A file or a pipe has no room for a bar that is drawn again and again: it gets some ten lines instead.
    on_terminal = console.is_terminal
    columns = (*Progress.get_default_columns(), "{task.fields[note]}")
    with Progress(*columns, console=console, disable=not on_terminal) as progress:
        bar = progress.add_task(
            way, total=settings.steps, note="may compile kernels first" if device.type == "cuda" else ""
        )
        start = time.perf_counter()
        for step, some in enumerate(islice(chosen(sequences, settings), settings.steps)):
            if step == 1 and device.type == "cuda":  # the first step, which may compile kernels, does not count
                start, timed = time.perf_counter(), 0
            batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in collate(some).items()}
            with precision(device):
                loss = model(**batch, use_cache=False).loss
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * min(1.0, 10 * (step + 1) / settings.steps)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            tokens = sum(map(len, some))
            computed, real, timed = computed + batch["input_ids"].numel(), real + tokens, timed + tokens
            speed = timed / (time.perf_counter() - start)
            note = f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s"
            progress.update(bar, advance=1, note=note)
            if not on_terminal and step % max(1, settings.steps // 10) == 0:
                console.print(f"{way}: step {step + 1} of {settings.steps}, {note}", highlight=False)
    console.print(
        f"{way}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; {computed:,} tokens computed for {real:,} in the text, "
        f"{speed:,.0f} of these per second"
    )
    return losses


@torch.no_grad()
def written(model: Any, language: Language, settings: Settings, count: int) -> str:
    """The prompt and `count` tokens that the model generates after it, with a KV cache."""
    model.eval()
    model.set_attn_implementation("tileattn")
    torch.manual_seed(settings.seed)
    prompt = torch.tensor([language.encode(PROMPT)], device=settings.device)
    options = {"max_new_tokens": count, "do_sample": True, "temperature": 0.8, "pad_token_id": 0}
    with precision(prompt.device):
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return language.decode(tokens[0].tolist())


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draws the losses over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    colours, styles = ("#D55E00", "#332288"), ("-", "--")  # safe for colour-blind readers
    for (way, losses), colour, style in zip(curves.items(), colours, styles):
        axes.plot(losses, style, color=colour, linewidth=1.4, label=f"{way}, {WAYS[way][1]}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Fine-tuning on Shakespeare's sonnets", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


# --- Command line ---


def main(
    model: Annotated[
        Path | None,
        typer.Option(help="A folder with a causal model. Default: a tiny one.", show_default=False),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Train again on padded batches through SDPA.")] = False,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = Settings.device,
    steps: Annotated[int, typer.Option(min=1)] = Settings.steps,
    batch: Annotated[int, typer.Option(min=1, max=154, help="Passages in a step.")] = Settings.batch,
    longest: Annotated[int, typer.Option(min=2, help="Tokens of a passage; more are cut off.")] = Settings.longest,
    rate: Annotated[
        float | None, typer.Option(help="Learning rate. Default: 3e-3, with --model 2e-5.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option()] = Settings.seed,
    write: Annotated[int, typer.Option(min=1, help="Tokens that the model writes at the end.")] = 150,
    out: Annotated[Path, typer.Option(help="Where the picture goes: .png, .svg or .pdf.")] = Path(
        "finetune_packed.png"
    ),
) -> None:
    """Fine-tune a language model on packed sonnets, and print what it writes."""
    if model is not None and not model.is_dir():
        raise typer.BadParameter(f"--model {model} is not a folder")
    if rate is None:
        rate = Settings.rate if model is None else 2e-5
    check_rate(rate)
    check_picture(out)
    check_device(device)
    tileattn.compat.transformers.register()
    settings, text = Settings(steps, batch, longest, rate, device, seed), TEXT.read_text()
    curves = {}
    for way in ("packed", "padded") if compare else ("packed",):
        torch.manual_seed(seed)
        trained, language = tiny(text) if model is None else pretrained(model)
        trained = trained.to(device)
        curves[way] = train(trained, passages(text, language, settings), settings, way)
    if compare:
        apart = max(abs(x - y) for x, y in zip(*curves.values()))
        console.print(f"losses differ by at most {apart:.2g}")
    console.print(written(trained, language, settings, write), markup=False, highlight=False)
    draw(curves, out)
    console.print(f"The losses are drawn in {out}.")


if __name__ == "__main__":
    typer.run(main)
