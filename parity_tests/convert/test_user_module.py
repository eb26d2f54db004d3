"""A translation model of one's own around `torch.nn.Transformer`, as PyTorch's tutorial writes it, and its twin.

Weights and Adam's state go to Flax and back; three further updates in both frameworks give the same weights.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from twinax import convert
from twinax.compare.repair.diagnosis import diagnose
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.checkpoint import Training
from twinax.train.step.step import Batch, init_state, make_train_step

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

PAD, BOS, EOS = 1, 2, 3
FIELDS = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS, "decoder_start_id": BOS, "decoder_mask": "causal_and_padding"}
ADAM = {"lr": 3e-3, "betas": (0.9, 0.97), "eps": 1e-7}


class Positions(nn.Module):
    """The tutorial's, with a fixed table that has a dimension of size 1."""

    def __init__(self, width, batch_first, learned=False):
        super().__init__()
        angles = torch.arange(20)[:, None] * torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1).unsqueeze(0 if batch_first else 1)
        self.dropout, self.axis = nn.Dropout(0.0), 1 if batch_first else 0
        if learned:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, x):
        return self.dropout(x + self.table.narrow(self.axis, 0, x.shape[self.axis]))


class TokenEmbedding(nn.Module):
    def __init__(self, size, width):
        super().__init__()
        self.embedding, self.scale = nn.Embedding(size, width), width**0.5

    def forward(self, tokens):
        return self.embedding(tokens) * self.scale


class Translator(nn.Module):
    """The masks are those that the tutorial passes; `order` is the order of registration."""

    def __init__(self, src_vocab=13, tgt_vocab=17, *, tied=False, shared=False, learned=False, **options):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": False} | options
        self.batch_first = options["batch_first"]
        self.generator = nn.Linear(8, tgt_vocab, bias=not tied)
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, **options)
        self.src_tok_emb = TokenEmbedding(src_vocab, 8)
        self.tgt_tok_emb = self.src_tok_emb if shared else TokenEmbedding(tgt_vocab, 8)
        self.src_positions = Positions(8, self.batch_first, learned)
        self.tgt_positions = Positions(8, self.batch_first, learned) if learned else self.src_positions
        self.register_buffer("mask", self.transformer.generate_square_subsequent_mask(8))
        if tied:
            self.generator.weight = self.tgt_tok_emb.embedding.weight

    def forward(self, src, tgt):
        """Logits (B, T, V) of tokens (B, S) and (B, T)."""
        src_padding, tgt_padding = src == PAD, tgt == PAD
        if not self.batch_first:
            src, tgt = src.T, tgt.T
        x = self.src_positions(self.src_tok_emb(src))
        y = self.tgt_positions(self.tgt_tok_emb(tgt))
        length, source = tgt_padding.shape[1], src_padding.shape[1]
        tgt_mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        src_mask = torch.zeros(source, source, dtype=torch.bool)
        output = self.transformer(x, y, src_mask, tgt_mask, None, src_padding, tgt_padding, src_padding)
        logits = self.generator(output)
        return logits if self.batch_first else logits.transpose(0, 1)


def make(seed=0, **options):
    torch.manual_seed(seed)
    module = Translator(**options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def batches(count, seed=0):
    """(src, tgt, labels) with ragged padding."""
    rng, result = np.random.default_rng(seed), []
    for _ in range(count):
        src, tgt, labels = (np.full((3, length), PAD) for length in (6, 5, 5))
        for row in range(3):
            source, target = (rng.integers(4, 13, rng.integers(1, 5)) for _ in range(2))
            src[row, : len(source) + 1] = [*source, EOS]
            tgt[row, : len(target) + 1] = [BOS, *target]
            labels[row, : len(target) + 1] = [*target, EOS]
        result.append((src, tgt, labels))
    return result


def train_torch(module, optimizer, data):
    for src, tgt, labels in data:
        logits = module(torch.tensor(src), torch.tensor(tgt))
        loss = functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_flax(state, train_step, data):
    for src, tgt, labels in data:
        state, _ = train_step(state, Batch(jnp.asarray(src), jnp.asarray(tgt), jnp.asarray(labels), jnp.arange(3)))
    return state


def adamw_in_two_groups(module):
    groups = [[p for p in module.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
    return torch.optim.AdamW(
        [{"params": p, "weight_decay": d} for p, d in zip(groups, (0.1, 0.0), strict=True)], **ADAM
    )


MODULES = {
    "tutorial": {},
    "tied": {"tied": True, "learned": True, "batch_first": True, "bias": False, "activation": "gelu"},
    "shared": {"shared": True, "norm_first": True, "src_vocab": 17},
}


@pytest.mark.parametrize(
    ("name", "optimizer_of"),
    [("tutorial", adamw_in_two_groups), ("tied", lambda module: torch.optim.Adam(module.named_parameters(), **ADAM))],
)
def test_training_goes_on_in_both_frameworks(name, optimizer_of):
    """Three updates in torch; then three in Flax are three in torch; and from there three in torch are six."""
    module, data = make(**MODULES[name]), batches(9)
    own = optimizer_of(module)
    train_torch(module, own, data[:3])
    checkpoint = convert.from_module(module, embedding_scale="sqrt_d_model", **FIELDS)
    training = TrainingConfig.like_torch(own)
    state = init_state(checkpoint.to_flax(), training)
    state = state._replace(optimizer=convert.to_optax_state(own, module, state.optimizer), update=jnp.asarray(3))
    state = train_flax(state, make_train_step(checkpoint.config, training), data[3:6])

    other = make(1, **MODULES[name])
    other.load_state_dict(convert.module_state_dict({**state.buffers, **state.params}, other))
    again = optimizer_of(other)
    again.load_state_dict(convert.to_optimizer_state(state.optimizer, other, again))
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), model=checkpoint.config, training=training)
    adam = convert.optimizers.adam.find_adam(state.optimizer)
    saved = Training(run, 6, 0, (0, 6), 6, adam.mu, adam.nu)  # of a checkpoint
    entries = convert.to_optimizer_state(saved, other, again)["state"]
    torch.testing.assert_close(entries, again.state_dict()["state"], rtol=0, atol=0)
    train_torch(module, own, data[3:6])
    assert_same_parameters(other, module)
    for each, its_optimizer in ((module, own), (other, again)):
        train_torch(each, its_optimizer, data[6:])
    assert_same_parameters(other, module)


def assert_same_parameters(actual, expected):
    for (name, parameter), other in zip(expected.named_parameters(), actual.parameters(), strict=True):
        torch.testing.assert_close(other, parameter, rtol=0, atol=1e-11, msg=name)


@settings(max_examples=6)
@given(st.integers(0, 99), st.sampled_from([*MODULES]))
def test_the_twin_is_the_same_function(seed, name):
    module = make(seed, **MODULES[name]).eval()
    twin = convert.from_module(module, embedding_scale="sqrt_d_model", **FIELDS)
    for src, tgt, labels in batches(1, seed):
        keep = labels != PAD
        expected = module(torch.tensor(src), torch.tensor(tgt)).detach().numpy()[keep]
        actual = twin.to_torch()(torch.tensor(src), torch.tensor(tgt)).detach().numpy()[keep]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_names_say_what_is_ambiguous():
    """Tables of the same size whose names are those of languages."""

    class Languages(nn.Module):
        def __init__(self):
            super().__init__()
            self.german, self.english = nn.Embedding(9, 8), nn.Embedding(9, 8)
            self.core, self.vocabulary = nn.Transformer(8, 2, 1, 1, 12), nn.Linear(8, 9)

    module, settings = Languages(), {"pad_id": 0, "embedding_scale": "none", "positions": "sinusoidal_half"}
    with pytest.raises(
        convert.ConversionError, match=r"which of german.weight, english.weight is src_embedding.weight"
    ):
        convert.from_module(module, **settings)
    names = {"src_embedding.weight": "english.weight", "tgt_embedding.weight": "german.weight"}
    checkpoint = convert.from_module(module, names=names, **settings)
    assert np.array_equal(checkpoint.arrays["src_embedding.embedding"], module.english.weight.detach().numpy())
    state_dict = convert.module_state_dict(checkpoint.arrays, module, names=names)
    torch.testing.assert_close(state_dict, {**module.state_dict()}, rtol=0, atol=0)


def _with(name, part):
    module = make()
    setattr(module, name, part)
    return module


REFUSED = {
    r"has 0 torch.nn.Transformer; one is needed": lambda: nn.Linear(2, 2),
    r"the module's extra.bias, extra.weight: twinax has no such part": lambda: _with("extra", nn.LayerNorm(8)),
    r"the module's third.weight: twinax has no such part": lambda: _with("third", nn.Embedding(13, 8)),
    r"dropout rates \[0.0, 0.5\]": lambda: _with("dropout", nn.Dropout(0.5)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_identified_is_refused(message):
    with pytest.raises(convert.ConversionError, match=message):
        convert.from_module(REFUSED[message](), embedding_scale="none", **FIELDS)


def test_contradictions_are_refused():
    with pytest.raises(convert.ConversionError, match=r"num_heads=4: the module has 2"):
        convert.from_module(make(), embedding_scale="none", num_heads=4, **FIELDS)
    with pytest.raises(convert.ConversionError, match=r"names: the module has no src_embedding.weight='x'"):
        convert.from_module(make(), embedding_scale="none", names={"src_embedding.weight": "x"}, **FIELDS)
    module = make()
    module.src_positions, module.tgt_positions = [Positions(8, False, learned=True).double()] * 2
    checkpoint = convert.from_module(module, embedding_scale="none", **FIELDS)
    optimizer = torch.optim.Adam(module.parameters())
    like = init_state(checkpoint.to_flax(), TrainingConfig.like_torch(optimizer)).optimizer
    with pytest.raises(convert.ConversionError, match=r"src_positions.table: is one parameter in the module, and one"):
        convert.to_optax_state(optimizer, module, like)


@pytest.mark.parametrize("mask", ["causal_and_padding", "causal"])
def test_the_comparison_says_that_a_mask_differs(mask):
    """Masks are arguments in torch: a checkpoint cannot tell them."""
    module = make(batch_first=True).eval()
    twin = convert.from_module(module, embedding_scale="sqrt_d_model", **FIELDS | {"decoder_mask": mask}).to_flax()
    (src, tgt, _), *_ = batches(1)
    diagnosis = diagnose(module, twin, (src, tgt))
    if mask == "causal_and_padding":
        assert diagnosis.ok
    else:
        (defect,) = diagnosis.defects
        assert "flax_transformer/attention.py" in defect.lines[0]
        assert "the mask differs" in str(defect.repair)
        assert str(defect.repair).endswith(", 0 False instead of True")
