"""Serves a tiny Llama-like model (tiny_llama.py, random weights): continuous batching on a paged cache.

    python examples/serve_tiny.py                              # some seconds on a CPU
    python examples/serve_tiny.py --check                      # also computes every request alone, and compares
    python examples/serve_tiny.py --through vllm               # by the classes that vLLM gets; or sglang
    python examples/serve_tiny.py --device cuda --graph --slots 64 --chunk 512 --requests 256 --layers 8 --dim 1024

Requests arrive over time. In each step every running request gets its next token, and what is left of the step's tokens
goes to prompts: a long prompt takes several steps. Prompts and single tokens are one packed call of attention. If all
running requests generate, the step has one row per slot; with --graph these steps are one CUDA graph. A request whose
prompt begins as that of a running one shares its pages instead of computing them again.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

import torch
import typer
from checks import check_device
from rich.console import Console
from rich.table import Table
from serving_caches import Cache, Packing, Sglang, Sizes, Tileattn, Vllm
from tiny_llama import TinyLlama
from torch import Tensor

import tileattn

VOCABULARY = 1000
console = Console()


class Through(str, Enum):
    """The way to tileattn's kernels."""

    tileattn = "tileattn"  # append_kv and decode
    vllm = "vllm"  # the classes that vLLM gets
    sglang = "sglang"  # the class that SGLang gets


CACHES: dict[Through, type[Cache]] = {Through.tileattn: Tileattn, Through.vllm: Vllm, Through.sglang: Sglang}


class Dtype(str, Enum):
    """The dtype of weights, keys and values."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(eq=False)
class Request:
    """A prompt, and how many tokens are to follow it.

    Attributes:
        prompt: token ids.
        new: the number of tokens to generate.
        arrival: the step in which it arrives.
        computed: tokens of which the cache has keys and values.
        generated: tokens that were generated; they are on the device until the request ends.
        output: the generated tokens (new,), at the end.
    """

    prompt: list[int]
    new: int
    arrival: int
    computed: int = 0
    generated: int = 0
    output: Tensor | None = field(default=None, repr=False)


# --- The engine ---


class Engine:
    """Runs requests in slots, each with a row of the page table.

    The host knows how many tokens each request has, and never which: it needs no value of the device before a request
    ends.
    """

    def __init__(
        self, model: TinyLlama, sizes: Sizes, through: Through, chunk: int, most_new: int, graph: bool
    ) -> None:
        self.model, self.sizes, self.chunk = model, sizes, chunk
        self.cache = CACHES[through](model, sizes)
        self.device = model.head.weight.device
        self.slots: list[Request | None] = [None] * sizes.slots
        self.running = [0] * sizes.slots  # as the device knows it
        self.counts: Counter[str] = Counter()
        # One entry for each slot: the last token, 1 if it runs, the generated tokens and their number.
        self.token = torch.zeros(sizes.slots, dtype=torch.int64, device=self.device)
        self.active = torch.zeros(sizes.slots, dtype=torch.int32, device=self.device)
        self.outputs = torch.zeros(sizes.slots, most_new, dtype=torch.int64, device=self.device)
        self.generated = torch.zeros(sizes.slots, dtype=torch.int64, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_up(graph)

    @torch.inference_mode()
    def warm_up(self, graph: bool) -> None:
        """Runs a step of each kind, which compiles the kernels, and captures the graph."""
        self.slots[0] = Request([0, 0], 2, 0)
        self.step()
        self.step()
        self.finish()
        if graph:
            # No slot is active: what the capture runs changes nothing.
            self.activate()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.decode()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.decode()
        self.counts.clear()

    def admit(self, request: Request) -> bool:
        """Gives a request a slot, and what a running request has computed of its prompt; False if no slot is free."""
        if None not in self.slots:
            return False
        slot = self.slots.index(None)
        shared, source = max((self.common(request, other), i) for i, other in enumerate(self.slots))
        if shared:
            self.cache.pages.fork(source, [slot], shared)
        self.slots[slot], request.computed = request, shared
        self.counts["shared"] += shared
        return True

    def common(self, request: Request, other: Request | None) -> int:
        """How many tokens of the prompt another request's slot has, all but the last."""
        if other is None:
            return 0
        most = min(len(request.prompt) - 1, len(other.prompt), other.computed)
        same = (a == b for a, b in zip(request.prompt[:most], other.prompt))
        return self.cache.shareable(next((i for i, equal in enumerate(same) if not equal), most))

    def step(self) -> None:
        """The next tokens of all running requests."""
        running = [request for request in self.slots if request is not None]
        if all(request.generated for request in running):
            self.activate()
            if self.graph is None:
                self.decode()
            else:
                self.graph.replay()
            self.counts["decoding steps"] += 1
            for request in running:
                request.generated += 1
        else:
            self.mixed()
            self.counts["mixed steps"] += 1

    def activate(self) -> None:
        """Tells the device which slots run, if that has changed."""
        running = [int(request is not None) for request in self.slots]
        if running != self.running:
            self.running = running
            self.active.copy_(torch.tensor(running, dtype=torch.int32))

    def decode(self) -> None:
        """A step with one row for each slot. It is the same work on the device for any lengths."""
        self.cache.begin(self.active, None)
        self.record(self.model(self.token, self.cache), self.active.bool())

    def mixed(self) -> None:
        """A step of packed rows: the next token of those that generate, and parts of prompts."""
        left = self.chunk
        counts, rows, ends = [0] * self.sizes.slots, [], []
        for slot, request in enumerate(self.slots):
            if request is not None and request.generated:
                counts[slot], left = 1, left - 1
        for slot, request in enumerate(self.slots):
            if request is not None and not request.generated:
                counts[slot] = max(0, min(left, len(request.prompt) - request.computed))
                left -= counts[slot]
        prompts = []
        for slot, (request, count) in enumerate(zip(self.slots, counts)):
            rows += [slot] * count
            if request is None or not count:
                continue
            if request.generated:
                prompts.append(-1)  # the token is on the device
            else:
                prompts += request.prompt[request.computed : request.computed + count]
                request.computed += count
                self.counts["prompt tokens"] += count
            if request.generated or request.computed == len(request.prompt):
                ends.append((slot, len(rows) - 1))
                request.generated += 1
        slot_of_row, given = (torch.tensor(x, device=self.device) for x in (rows, prompts))
        tokens = torch.where(given < 0, self.token[slot_of_row], given)
        number = torch.tensor(counts, dtype=torch.int32, device=self.device)
        cu_seqlens = torch.nn.functional.pad(number.cumsum(0, dtype=torch.int32), (1, 0))
        self.cache.begin(number, Packing(cu_seqlens, slot_of_row, counts))
        hidden = self.model(tokens, self.cache)
        # The last row of each slot that goes on to generate; others get a row that is not recorded.
        last, done = [0] * self.sizes.slots, [False] * self.sizes.slots
        for slot, row in ends:
            last[slot], done[slot] = row, True
        self.record(hidden[torch.tensor(last, device=self.device)], torch.tensor(done, device=self.device))

    def record(self, hidden: Tensor, slots: Tensor) -> None:
        """Chooses the best next token from hidden states (slots, dim), where `slots` is True."""
        chosen = self.model.head(hidden).argmax(-1)
        self.token.copy_(torch.where(slots, chosen, self.token))
        at = self.generated.clamp(max=self.outputs.shape[1] - 1)[:, None]
        self.outputs.scatter_(1, at, torch.where(slots[:, None], chosen[:, None], self.outputs.gather(1, at)))
        self.generated += slots

    def finish(self) -> None:
        """Takes the output of requests that have all their tokens, and frees their slots."""
        for slot, request in enumerate(self.slots):
            if request is not None and request.generated >= request.new:
                request.output = self.outputs[slot, : request.new].clone()
                self.counts["generated"] += request.new
                self.cache.pages.free(slot)
                self.generated[slot] = 0
                self.slots[slot] = None

    @torch.inference_mode()
    def serve(self, requests: list[Request]) -> float:
        """Serves requests in the order of their arrival; the seconds that it took."""
        waiting, now = sorted(requests, key=lambda request: request.arrival), 0
        self.synchronize()
        start = time.perf_counter()
        while waiting or any(self.slots):
            while waiting and waiting[0].arrival <= now and self.admit(waiting[0]):
                waiting.pop(0)
            if any(self.slots):
                self.step()
                self.finish()
            now += 1
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# --- Requests ---


def draw(count: int, longest: int, shared: int, new: int, seed: int) -> list[Request]:
    """Requests with prompts of 1 to `longest` tokens; the first `shared` of the longer ones are the same."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def tokens(length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    prefix, arrival, requests = tokens(shared), 0, []
    for _ in range(count):
        length = number(1, longest)
        prompt = prefix + tokens(length - shared) if length > shared else tokens(length)
        requests.append(Request(prompt, number(1, new), arrival))
        arrival += number(0, 3)
    return requests


@torch.inference_mode()
def compare(model: TinyLlama, requests: list[Request]) -> tuple[int, int, int]:
    """Computes each request alone, by PyTorch's attention without a cache.

    Returns:
        How many tokens are the best ones there, how many are as good within eight roundings of the largest logit, and
        how many are neither.
    """
    same, close, wrong = 0, 0, 0
    for request in requests:
        assert request.output is not None
        tokens = torch.cat((torch.tensor(request.prompt, device=request.output.device), request.output[:-1]))
        logits = model.alone(tokens)[len(request.prompt) - 1 :].float()
        short = logits.amax(-1) - logits.gather(1, request.output[:, None])[:, 0]
        slack = 8 * torch.finfo(model.head.weight.dtype).eps * logits.abs().amax(-1)
        same += int((short == 0).sum())
        close += int(((short > 0) & (short <= slack)).sum())
        wrong += int((~(short <= slack)).sum())
    return same, close, wrong


# --- Command line ---


def report(engine: Engine, requests: list[Request], seconds: float) -> Table:
    """What was served, and how fast."""
    counts = engine.counts
    table = Table(show_header=False)
    table.add_row("requests", f"{len(requests):,} in {engine.sizes.slots} slots")
    steps = f"{counts['mixed steps']:,} with prompts, {counts['decoding steps']:,} decoding"
    table.add_row("steps", steps + (" (CUDA graph)" if engine.graph is not None else ""))
    table.add_row("prompt tokens", f"{counts['prompt tokens']:,} computed, {counts['shared']:,} shared")
    table.add_row("generated tokens", f"{counts['generated']:,}")
    table.add_row("generated tokens/s", f"{counts['generated'] / seconds:,.0f} over {seconds:.2f} s")
    return table


def main(
    through: Annotated[Through, typer.Option(help="The way to tileattn's kernels.")] = Through.tileattn,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Default: bfloat16 on a GPU, else float32.", show_default=False)
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Decoding steps as one CUDA graph.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare each request with computing it alone.")] = False,
    requests: Annotated[int, typer.Option(min=1)] = 24,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 6,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 200,
    shared: Annotated[int, typer.Option(min=0, help="Tokens in front that longer prompts share.")] = 90,
    new: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 40,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step with prompts; at least --slots.")] = 64,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    dim: Annotated[int, typer.Option(min=2)] = 256,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Serve a tiny Llama-like model with random weights, and print how many tokens per second it generates."""
    if dim % (2 * heads) or heads % kv_heads:
        raise typer.BadParameter(
            f"--dim must be a multiple of twice --heads, and --heads of --kv-heads, got {dim}, {heads} and {kv_heads}"
        )
    if chunk < slots:
        raise typer.BadParameter(f"--chunk must be at least --slots, got {chunk} and {slots}")
    if shared >= prompt:
        raise typer.BadParameter(f"--shared must be less than --prompt, got {shared} and {prompt}")
    if graph and not device.startswith("cuda"):
        raise typer.BadParameter(f"--graph needs a GPU, got --device {device}")
    check_device(device)
    number = getattr(torch, (dtype or (Dtype.bfloat16 if device.startswith("cuda") else Dtype.float32)).value)
    torch.manual_seed(seed)
    longest = prompt + new
    model = TinyLlama(VOCABULARY, layers, dim, heads, kv_heads, longest, number, device)
    engine = Engine(model, Sizes(slots, longest, page_size), through, chunk, max(new, 2), graph)
    drawn = draw(requests, prompt, shared, new, seed)
    seconds = engine.serve(drawn)
    tileattn.check_caches()
    engine.cache.pages.check()
    console.print(report(engine, drawn, seconds))
    if check:
        same, close, wrong = compare(model, drawn)
        console.print(f"{same:,} of {same + close + wrong:,} tokens are those of the requests alone")
        if close:
            console.print(f"{close:,} others are as good within rounding")
        if wrong:
            console.print(f"{wrong:,} are wrong")
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
