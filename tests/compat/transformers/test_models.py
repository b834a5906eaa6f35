"""Models of transformers with attn_implementation="tileattn", compared with transformers' own "eager"."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

import transformers

import tileattn.compat.transformers as adapter
from tests.tools.transformers.models import (
    CPU,
    GPU,
    MODELS,
    VOCABULARY,
    InFloat64,
    Model,
    Size,
    padding,
    recorded_steps,
    tokens,
    with_attention,
)
from tileattn.testing import assert_accurate

SEQLEN, NEW = 29, 9
Device = tuple[str, torch.dtype, Size]
DEVICES = [
    pytest.param(("cpu", torch.float32, CPU), id="cpu"),
    pytest.param(("cuda", torch.bfloat16, GPU), id="cuda", marks=pytest.mark.gpu),
]
on_devices = pytest.mark.parametrize("device", DEVICES)
DECODERS = [name for name, model in MODELS.items() if model.decodes]


class Calls(list[dict[str, Any]]):
    """The keyword arguments of each call of the attention function."""


@pytest.fixture(autouse=True)
def calls() -> Iterator[Calls]:
    """tileattn is registered, and calls of its attention are recorded."""
    adapter.register()
    recorded_calls, attend = Calls(), transformers.AttentionInterface._global_mapping[adapter.NAME]

    def recorded(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            recorded_calls.append(named)
        return attend(*arguments, **named)

    transformers.AttentionInterface.register(adapter.NAME, recorded)
    yield recorded_calls
    transformers.AttentionInterface._global_mapping.pop(adapter.NAME)
    transformers.AttentionMaskInterface._global_mapping.pop(adapter.NAME)


@pytest.fixture(autouse=True)
def steps() -> Iterator[list[Tensor]]:
    """The lengths of the steps on a static cache."""
    with recorded_steps() as lengths:
        yield lengths


# --- Logits and gradients ---

Outcome = tuple[Tensor, dict[str, Tensor]]  # logits, 0 where they do not count; gradients of all parameters


class Problem:
    """A model, what it is run on, and which of its logits count; their gradient is random."""

    def __init__(self, kind: Model, device: Device, pad: str = "none") -> None:
        self.where, dtype, size = device
        self.kind, self.model = kind, kind.build(size).to(self.where, dtype)
        ids = tokens(3, SEQLEN, self.where)
        mask = padding(pad, *ids.shape, self.where)
        self.inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        self.counts = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if kind.encoder_decoder:
            self.inputs["decoder_input_ids"] = tokens(3, 7, self.where, seed=1)
            self.counts = torch.ones(3, 7, dtype=torch.bool, device=self.where)
        generator = torch.Generator().manual_seed(2)
        d_logits = torch.randn(*self.counts.shape, VOCABULARY, generator=generator).to(self.where, dtype)
        self.d_logits = d_logits * self.counts[..., None]

    def run(self, implementation: str) -> Outcome:
        """The outcome in the model's dtype."""
        return self.outcome(with_attention(self.model, implementation))

    def exactly(self) -> Outcome:
        """The oracle: transformers' own, in float64."""
        with InFloat64():
            return self.outcome(with_attention(self.model, "eager").double())

    def eager(self) -> list[Outcome]:
        """Runs of transformers' own attention, that sum over the batch in two orders, and of PyTorch's.

        PyTorch's backward pass computes the probabilities anew, as ours does: see `tileattn.testing.eager_gradients`.
        """
        return [self.run("eager"), self.backwards(), *([self.run("sdpa")] if self.kind.sdpa else [])]

    def backwards(self) -> Outcome:
        """Eager on the batch in reverse order."""
        other = copy.copy(self)
        other.inputs = {name: None if x is None else x.flip(0) for name, x in self.inputs.items()}
        other.counts, other.d_logits = self.counts.flip(0), self.d_logits.flip(0)
        logits, gradients = other.run("eager")
        return logits.flip(0), gradients

    def outcome(self, model: nn.Module) -> Outcome:
        logits = model(**self.inputs, use_cache=False).logits
        logits.backward(self.d_logits.to(logits.dtype))
        return logits.detach().masked_fill(~self.counts[..., None], 0.0), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the parameters' names.

    A bias of all keys changes no softmax: in BERT, whose keys are not rotated, its gradient is 0 but for errors.
    """
    named = ((name, p.grad) for name, p in model.named_parameters() if not name.endswith("key.bias"))
    return {name: gradient for name, gradient in named if gradient is not None}


def assert_like_eager(name: str, got: Outcome, problem: Problem) -> None:
    """The rule, for logits and gradients."""
    (exact, exact_gradients), eager = problem.exactly(), problem.eager()
    assert exact.dtype == torch.float64
    assert_accurate(f"logits of {name}", got[0], exact, [logits for logits, _ in eager])
    assert got[1].keys() == exact_gradients.keys()
    for which, gradient in got[1].items():
        of_eager = [gradients[which] for _, gradients in eager]
        assert_accurate(f"d {which} of {name}", gradient, exact_gradients[which], of_eager, gradient=True)


@on_devices
@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize("name", list(MODELS))
def test_logits_and_gradients(name: str, pad: str, device: Device, calls: Calls) -> None:
    problem = Problem(MODELS[name], device, pad)
    got = problem.run("tileattn")
    assert len(calls) == MODELS[name].attentions
    assert_like_eager(f"{name}, padding {pad}", got, problem)
    assert len(calls) == MODELS[name].attentions  # eager is not tileattn


# --- Packed sequences ---


class PackedProblem(Problem):
    """Several sequences: in one row for tileattn, each by itself for the others."""

    lengths = (9, 1, 14, 5)

    def __init__(self, kind: Model, device: Device, how: str) -> None:
        super().__init__(kind, device)
        self.how, self.order = how, range(len(self.lengths))
        self.ids, self.counts, self.d_logits = self.inputs["input_ids"][:1], self.counts[:1], self.d_logits[:1]

    def backwards(self) -> Outcome:
        other = copy.copy(self)
        other.order = self.order[::-1]
        return other.run("eager")

    def outcome(self, model: nn.Module) -> Outcome:
        if model.config._attn_implementation == adapter.NAME:
            self.inputs = self.packed()
            return super().outcome(model)
        ids, d_logits = (x.split(self.lengths, dim=1) for x in (self.ids, self.d_logits))
        logits: dict[int, Tensor] = {}
        for i in self.order:
            logits[i] = model(ids[i], use_cache=False).logits
            logits[i].backward(d_logits[i].to(logits[i].dtype))
        return torch.cat([logits[i].detach() for i in range(len(logits))], dim=1), gradients_of(model)

    def packed(self) -> dict[str, Any]:
        """The row; where its sequences begin is told by their positions alone, or by cu_seq_lens."""
        position_ids = torch.cat([torch.arange(n) for n in self.lengths])[None].to(self.where)
        inputs = {"input_ids": self.ids, "position_ids": position_ids}
        if self.how == "cu_seq_lens":
            starts = torch.tensor([0, *self.lengths]).cumsum(0).to(self.where, torch.int32)
            longest = max(self.lengths)  # as an int, and as the tensor that transformers computes
            inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
            inputs |= {"max_length_q": longest, "max_length_k": torch.tensor(longest, device=self.where)}
        return inputs


PACKED = [
    *((name, "cu_seq_lens") for name in ("llama", "gemma2", "gemma3", "gpt-oss", "modernbert")),
    # Not every model has its mask made with position_ids: gpt-oss and encoders do not.
    *((name, "position_ids") for name in ("llama", "gemma2", "gemma3")),
]


@on_devices
@pytest.mark.parametrize(("name", "how"), PACKED)
def test_packed_sequences(name: str, how: str, device: Device, calls: Calls) -> None:
    problem = PackedProblem(MODELS[name], device, how)
    got = problem.run("tileattn")
    assert [call.get("cu_seq_lens_q") is not None for call in calls] == [how == "cu_seq_lens"] * 2
    assert_like_eager(f"{name}, packed by {how}", got, problem)


# --- Generation ---


class Decoding:
    """A decoder on a batch that is padded on the left, and what its logits should be, token by token."""

    def __init__(self, name: str, device: Device) -> None:
        self.where, self.dtype, size = device
        self.name, self.kind = name, MODELS[name]
        self.model = self.kind.build(size).to(self.where, self.dtype)
        self.ids = tokens(2, SEQLEN, self.where)
        self.mask = padding("left", *self.ids.shape, self.where)

    def generate(self, implementation: str, **options: Any) -> tuple[Tensor, Tensor]:
        """The tokens that follow, greedily, and the logits that chose them."""
        model = with_attention(self.model, implementation)
        options = {"disable_compile": True, "max_new_tokens": NEW, "do_sample": False, **options}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        generated = model.generate(self.ids, attention_mask=self.mask, **options)
        return generated.sequences[:, -NEW:], torch.stack(generated.logits, dim=1).to(self.dtype)

    @torch.no_grad()
    def at_once(self, model: nn.Module, new: Tensor) -> Tensor:
        """The logits of those tokens from one pass over the whole text."""
        if self.kind.encoder_decoder:
            start = torch.full_like(new[:, :1], model.config.decoder_start_token_id)
            decoded = torch.cat([start, new[:, :-1]], dim=1)
            inputs = {"input_ids": self.ids, "attention_mask": self.mask, "decoder_input_ids": decoded}
        else:
            seen = F.pad(self.mask, (0, NEW - 1), value=1)
            places = (seen.cumsum(1) - 1).clamp(min=0)
            text = torch.cat([self.ids, new[:, :-1]], dim=1)
            inputs = {"input_ids": text, "attention_mask": seen, "position_ids": places}
        return model(**inputs, use_cache=False).logits[:, -NEW:]

    def check(self, what: str, new: Tensor, logits: Tensor) -> None:
        """The rule, for the logits of each token given those before it."""
        with InFloat64():
            exact = self.at_once(with_attention(self.model, "eager").double(), new)
        eager = self.at_once(with_attention(self.model, "eager"), new)
        assert_accurate(f"logits of {self.name}, {what}", logits, exact, [eager])


GENERATIONS = [
    (name, cache)
    for name in DECODERS
    for cache in ("dynamic", "static")
    if (name, cache) != ("llama4", "static")  # transformers 5.17 cannot make the mask
]


@on_devices
@pytest.mark.parametrize(("name", "cache"), GENERATIONS)
def test_generation(name: str, cache: str, device: Device, calls: Calls, steps: list[Tensor]) -> None:
    decoding = Decoding(name, device)
    new, logits = decoding.generate("tileattn", cache_implementation=cache)
    assert len(calls) >= NEW * 2  # two layers, or T5's self- and cross-attention
    decoding.check(f"{cache} cache", new, logits)
    # Each step but the first token's, in each layer whose cache has unused slots; T5 has a bias.
    layers = {"llama": 2, "qwen3": 2, "gemma2": 1, "gemma3": 1, "gpt-oss": 1}.get(name, 0) if cache == "static" else 0
    filled = [[SEQLEN + i] * 2 for i in range(1, NEW) for _ in range(layers)]
    assert [lengths.tolist() for lengths in steps] == filled
    if decoding.dtype == torch.float32:  # in 16 bits two tokens may be as likely as each other
        assert torch.equal(new, decoding.generate("eager")[0])


@torch.no_grad()
def prefill(problem: Problem, places: Tensor, cache: str) -> Tensor:
    """The logits of a text that is read in chunks."""
    model = with_attention(problem.model, "tileattn")
    past = (
        transformers.DynamicCache(config=model.config)
        if cache == "dynamic"
        else transformers.StaticCache(config=model.config, max_cache_len=SEQLEN + 6)
    )
    text, mask = problem.inputs["input_ids"], problem.inputs["attention_mask"]
    logits, start = [], 0
    for length in (3, 1, 7, 8, 1, 9):  # fewer than the window, then more
        stop = start + length
        seen = {"attention_mask": None if mask is None else mask[:, :stop], "position_ids": places[:, start:stop]}
        logits.append(model(text[:, start:stop], **seen, past_key_values=past).logits)
        start = stop
    assert start == SEQLEN
    return torch.cat(logits, dim=1)


CHUNKED = ("llama", "mistral", "gpt-oss")


@on_devices
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pad", ["none", "left"])
@pytest.mark.parametrize("name", CHUNKED)
@torch.no_grad()
def test_prefill_in_chunks(name: str, pad: str, cache: str, device: Device, steps: list[Tensor]) -> None:
    """Queries that stand in the middle of a cache, behind keys of earlier chunks and before unused slots.

    Without a padding mask nothing but their places hides those.
    """
    problem = Problem(MODELS[name], device, pad)
    places = (problem.counts.long().cumsum(1) - 1).clamp(min=0)
    got = prefill(problem, places, cache)
    assert bool(steps) == (cache == "static")
    at_once = {**problem.inputs, "position_ids": places, "use_cache": False}
    with InFloat64():
        exact = with_attention(problem.model, "eager").double()(**at_once).logits
    eager = with_attention(problem.model, "eager")(**at_once).logits
    got, exact, eager = (x.masked_fill(~problem.counts[..., None], 0.0) for x in (got, exact, eager))
    assert_accurate(f"logits of {name}, {cache} cache", got, exact, [eager])


# --- What a caller asks of a model, and tileattn does not do ---


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"output_attentions": True}, pytest.raises(NotImplementedError, match='attn_implementation="eager"')),
        ({"novelty": 1}, pytest.raises(TypeError, match=r"register\(ignore=\('novelty',\)\)")),
    ],
    ids=["output_attentions", "novelty"],
)
def test_it_reaches_the_attention_and_is_refused(asked: dict[str, Any], error: Any) -> None:
    model = with_attention(MODELS["llama"].build(CPU), "tileattn")
    with error:
        model(tokens(1, 5, "cpu"), **asked)


@torch.no_grad()
def test_a_decoder_may_be_bidirectional() -> None:
    """An argument makes transformers build another mask."""
    problem = Problem(MODELS["llama"], DEVICES[0].values[0])
    inputs = {**problem.inputs, "is_causal": False, "use_cache": False}
    got = with_attention(problem.model, "tileattn")(**inputs).logits
    with InFloat64():
        exact = with_attention(problem.model, "eager").double()(**inputs).logits
    assert_accurate("logits", got, exact, [with_attention(problem.model, "eager")(**inputs).logits])
    assert not torch.allclose(got, with_attention(problem.model, "tileattn")(**problem.inputs).logits)


# --- torch.compile ---


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "t5"))])
def test_steps_of_a_generation_are_compiled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `generate` does with a static cache on a GPU: where a query stands is a tensor, so that all steps are one."""
    decoding = Decoding(name, DEVICES[0].values[0])
    expected, _ = decoding.generate("tileattn")
    counter = CompileCounterWithBackend("eager")
    kind = type(decoding.model)
    monkeypatch.setattr(kind, "_valid_auto_compile_criteria", lambda *_: True)
    monkeypatch.setattr(kind, "get_compiled_call", lambda self, _: torch.compile(self.__call__, backend=counter))
    torch._dynamo.reset()
    new, _ = decoding.generate("tileattn", cache_implementation="static", disable_compile=False)
    assert torch.equal(new, expected)
    # A sliding cache is told how full it is as an int, which becomes dynamic when it changes.
    assert counter.frame_count <= (2 if name == "mistral" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["padded", "packed"])
def test_a_compiled_model(how: str) -> None:
    kind, device = MODELS["gemma2"], DEVICES[0].values[0]
    problem = Problem(kind, device, "left") if how == "padded" else PackedProblem(kind, device, "cu_seq_lens")
    torch._dynamo.reset()
    model = with_attention(problem.model, "tileattn")
    # Packed, transformers asks at every call whether position_ids begin anew: that is not traced.
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=how == "padded")
    assert_like_eager(f"compiled gemma2, {how}", problem.outcome(model), problem)


@pytest.mark.gpu
@pytest.mark.slow
def test_generation_compiles_by_itself() -> None:
    """transformers compiles the steps with a static cache, for CUDA graphs."""
    decoding = Decoding("llama", DEVICES[1].values[0])
    new, logits = decoding.generate("tileattn", cache_implementation="static", disable_compile=False)
    decoding.check("compiled", new, logits)
