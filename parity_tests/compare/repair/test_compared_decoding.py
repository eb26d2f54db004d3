"""Greedy decoding with a cache, against `generate` of transformers, a cache written in place, and a whole forward."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from twinax.compare.comparison import compare

HEADS, WIDTH, VOCAB, PROMPT, NEW = 2, 8, 17, 4, 3
LENGTH = PROMPT + NEW
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, PROMPT))


class Generate(nn.Module):
    """Greedy decoding of a small random GPT-2."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 1, "n_head": HEADS}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.6, bos_token_id=0, eos_token_id=None))
        self.options = options

    def forward(self, tokens):
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **self.options}
        settings |= {"return_dict_in_generate": True, "output_logits": True}
        result = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        return {"tokens": result.sequences[:, PROMPT:], "logits": torch.stack(result.logits, 1)}


def norm(p, name, x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def forward(p, cache, tokens, start, mistakes):
    """(cache, logits of all tokens, which stand at start, start + 1, …)."""
    wrong = mistakes if tokens.shape[1] == 1 else ()  # the prompt is right
    places = start + jnp.arange(tokens.shape[1])
    positions = places + 1 if "position" in wrong else places  # position
    x = p["wte.weight"][tokens] + p["wpe.weight"][positions]
    packed = norm(p, "h.0.ln_1", x) @ p["h.0.attn.c_attn.weight"] + p["h.0.attn.c_attn.bias"]
    q, k, v = (a.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3) for a in jnp.split(packed, 3, -1))
    at = start + 1 if "cache" in wrong else start  # cache
    keys = jax.lax.dynamic_update_slice(cache[0], k, (0, 0, at, 0))
    values = jax.lax.dynamic_update_slice(cache[1], v, (0, 0, start, 0))
    scores = q @ keys.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5
    keep = jnp.arange(LENGTH) <= places[:, None]
    keep = jnp.arange(LENGTH) < places[:, None] if "last place" in wrong else keep  # last place
    scores = scores if "mask" in wrong else jnp.where(keep, scores, -1e30)
    mixed = (jax.nn.softmax(scores) @ values).transpose(0, 2, 1, 3).reshape(x.shape)  # mask
    x = x + mixed @ p["h.0.attn.c_proj.weight"] + p["h.0.attn.c_proj.bias"]
    inner = norm(p, "h.0.ln_2", x) @ p["h.0.mlp.c_fc.weight"] + p["h.0.mlp.c_fc.bias"]
    inner = jax.nn.gelu(inner, approximate="gelu" not in mistakes)  # gelu
    x = x + inner @ p["h.0.mlp.c_proj.weight"] + p["h.0.mlp.c_proj.bias"]
    return (keys, values), norm(p, "ln_f", x) @ p["wte.weight"].T


def port(*mistakes):
    def run(p, tokens):
        p = {name.removeprefix("model.transformer."): array for name, array in p.items()}
        empty = jnp.zeros((len(tokens), HEADS, LENGTH, WIDTH // HEADS))
        cache, logits = forward(p, (empty, empty), tokens, 0, mistakes)

        def step(carry, start):
            cache, logits = carry
            token = jnp.argmax(logits, -1)
            cache, following = forward(p, cache, token[:, None], start, mistakes)
            return (cache, following[:, 0]), (token, logits)

        _, (chosen, logits) = jax.lax.scan(step, (cache, logits[:, -1]), jnp.arange(PROMPT, LENGTH))
        return {"tokens": chosen.T, "logits": logits.swapaxes(0, 1)}

    return run


@pytest.fixture(scope="module")
def reference():
    return Generate().eval()


@pytest.fixture(scope="module")
def weights(reference):
    return {name: tensor.detach().numpy() for name, tensor in reference.named_parameters()}


def lines_of(*comments):
    source, first = inspect.getsourcelines(inspect.getmodule(port))
    numbers = {c: i for i, line in enumerate(source, max(first, 1)) for c in comments if line.endswith(f"# {c}\n")}
    return [f"repair/test_compared_decoding.py:{numbers[comment]}" for comment in comments]


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_a_scan_with_a_cache_is_equal_to_generate(options, reference, weights):
    comparison = compare(Generate(**options).eval(), (port(), weights), (TOKENS,), rounding=False)
    assert comparison.verdict == "equal", str(comparison)
    assert len({*comparison.traces[0].values[comparison.traces[0].outputs["tokens"]].flat}) > 2


@pytest.mark.parametrize("mistake", [pytest.param("position", marks=pytest.mark.slow), "cache", "mask"])
def test_a_mistake_in_a_step_of_decoding_is_named_first(mistake, reference, weights):
    comparison = compare(reference, (port(mistake), weights), (TOKENS,), rounding=False)
    first = comparison.forward.defects[0]
    assert [*first.lines] == lines_of(mistake)
    assert first.repair is not None


def test_a_mistake_in_a_step_and_one_in_all_tokens_are_both_named(reference, weights):
    comparison = compare(reference, (port("last place", "gelu"), weights), (TOKENS,), rounding=False)
    named = {line for defect in comparison.forward.defects for line in defect.lines}
    assert named == {*lines_of("last place", "gelu")}
    assert comparison.forward.verified


def whole(p, tokens):
    """The logits of all tokens at once."""
    empty = jnp.zeros((len(tokens), HEADS, LENGTH, WIDTH // HEADS))
    return forward(p, (empty, empty), tokens, 0, ())[1]


def cached(*mistakes):
    def run(p, tokens):
        empty = jnp.zeros((len(tokens), HEADS, LENGTH, WIDTH // HEADS))

        def step(cache, entry):
            cache, logits = forward(p, cache, entry[0][:, None], entry[1], mistakes)
            return cache, logits[:, 0]

        logits = jax.lax.scan(step, (empty, empty), (tokens.T, jnp.arange(LENGTH)))[1]
        return logits.swapaxes(0, 1)

    return run


def written_in_place(p, tokens):
    """The same in PyTorch, with a cache that each step writes to."""
    keys = torch.zeros(len(tokens), HEADS, LENGTH, WIDTH // HEADS)
    values = torch.zeros_like(keys)
    logits = []
    for i in range(LENGTH):
        x = p["wte.weight"][tokens[:, i]] + p["wpe.weight"][i]
        normed = torch.layer_norm(x, (WIDTH,), p["h.0.ln_1.weight"], p["h.0.ln_1.bias"])
        packed = normed @ p["h.0.attn.c_attn.weight"] + p["h.0.attn.c_attn.bias"]
        q, keys[:, :, i], values[:, :, i] = (a.reshape(len(tokens), HEADS, -1) for a in packed.chunk(3, -1))
        scores = torch.einsum("bhd,bhkd->bhk", q, keys[:, :, : i + 1]) / (WIDTH // HEADS) ** 0.5
        mixed = torch.einsum("bhk,bhkd->bhd", scores.softmax(-1), values[:, :, : i + 1]).reshape(x.shape)
        x = x + mixed @ p["h.0.attn.c_proj.weight"] + p["h.0.attn.c_proj.bias"]
        normed = torch.layer_norm(x, (WIDTH,), p["h.0.ln_2.weight"], p["h.0.ln_2.bias"])
        inner = nn.functional.gelu(normed @ p["h.0.mlp.c_fc.weight"] + p["h.0.mlp.c_fc.bias"], approximate="tanh")
        x = x + inner @ p["h.0.mlp.c_proj.weight"] + p["h.0.mlp.c_proj.bias"]
        normed = torch.layer_norm(x, (WIDTH,), p["ln_f.weight"], p["ln_f.bias"])
        logits.append(normed @ p["wte.weight"].T)
    return torch.stack(logits, 1)


def test_decoding_step_by_step_is_equal_to_a_whole_forward_pass_and_to_a_cache_written_in_place(weights):
    arrays = {name.removeprefix("model.transformer."): array for name, array in weights.items()}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH))
    assert compare((whole, arrays), (cached(), arrays), (tokens,), rounding=False).verdict == "equal"
    in_place = written_in_place, tensors
    assert compare(in_place, (cached(), arrays), (tokens,), rounding=False).verdict == "equal"
    wrong = compare(in_place, (cached("mask"), arrays), (tokens,), rounding=False)
    assert wrong.forward.verified
    assert {line for defect in wrong.forward.defects for line in defect.lines} == {*lines_of("mask")}
