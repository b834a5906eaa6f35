"""Runs existing flash-attn code on tileattn with two extra lines: those under `main`'s first comment.

    python examples/replace_flash_attn.py

`encoder.py` is the existing code. The encoder learns to tell for each token whether it occurs again in its sequence,
which needs attention. Training takes less than ten seconds on one CPU core, half of it imports. `--device cuda` trains
in bfloat16.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor

TOKENS = 12


def batch_of(sequences: int, seqlen: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A random batch: tokens (sequences, seqlen), a mask that is False for padding, and which tokens occur again."""
    tokens = torch.randint(TOKENS, (sequences, seqlen), generator=generator)
    lengths = torch.randint(2, seqlen + 1, (sequences, 1), generator=generator)
    mask = torch.arange(seqlen) < lengths
    same = (tokens[:, :, None] == tokens[:, None]) & mask[:, None]
    return tokens, mask, same.sum(dim=-1) > 1


def main(
    steps: Annotated[int, typer.Option(help="steps of training")] = 150,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    sequences: Annotated[int, typer.Option(help="sequences in a batch")] = 32,
    seqlen: Annotated[int, typer.Option(help="length of the longest")] = 12,
) -> None:
    """Train the encoder on tileattn's attention."""
    # Run these two lines before anything imports flash_attn:
    import tileattn.compat.flash_attn

    tileattn.compat.flash_attn.install()

    from encoder import Encoder  # it does: from flash_attn import ...

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Encoder(TOKENS, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # On a GPU, flash-attn's functions accept only 16-bit dtypes; tileattn's replacements do the same.
    autocast = torch.autocast(device, torch.bfloat16, enabled=device != "cpu")
    for step in range(steps):
        tokens, mask, target = (x.to(device) for x in batch_of(sequences, seqlen, generator))
        with autocast:
            logits = model(tokens, mask)
        loss = torch.nn.functional.cross_entropy(logits[mask].float(), target[mask].long())
        right = (logits[mask].argmax(dim=-1) == target[mask]).float().mean()
        if step % max(steps // 5, 1) == 0 or step == steps - 1:
            print(f"step {step:3}: loss {loss.item():.3f}, right {right.item():.0%}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    flash_attn = tileattn.compat.flash_attn
    print(f"flash_attn was {flash_attn.__name__}, standing in for {flash_attn.__version__}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # these tensors are so small that more threads are slower
    typer.run(main)
