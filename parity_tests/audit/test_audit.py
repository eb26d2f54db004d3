"""The audit finds planted and published mistakes, and none in healthy models."""

import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from parity_tests.support.defects import DEFECTS, examine
from parity_tests.support.toy_transformer import Attention, ToyTransformer, mean_loss, step_by_step
from twinax.audit import AuditError, assert_healthy, audit, audit_config
from twinax.audit.subject import make_subject
from twinax.configs import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.published.annotated_transformer import module as annotated_transformer
from twinax.published.jadore801120 import module as jadore801120
from twinax.published.leftover import module as leftover
from twinax.published.lucky_glass import module as lucky_glass
from twinax.published.registry import ORACLES, RECIPES

SIZES = {"vocab_size": ToyTransformer.VOCABULARY, "pad_id": ToyTransformer.PAD, "max_length": ToyTransformer.LONGEST}
SMALL = {"d_model": 16, "d_ff": 12, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
CAUSAL, CAUSAL_TRAINING = "Is it causal, in evaluation?", "Is it causal, in training?"
APART, APART_TRAINING = (f"Are the sentences of a batch independent, in {mode}?" for mode in ("evaluation", "training"))
SOURCE, PADDING, TARGET_PADDING, WEIGHTS, GRADIENTS, LENGTHS, FREE, DROPOUT, SAME = (
    "Does the output depend on the source?",
    "Is source padding ignored?",
    "Is target padding ignored?",
    "Are attention weights of masked keys zero?",
    "Does every parameter receive a gradient?",
    "May a target be longer or shorter than its source?",
    "Can cross entropy fall to zero?",
    "Does dropout use its configured rates?",
    "Do training and evaluation compute the same without dropout?",
)
# Questions that each published system fails; the repaired systems pass all.
FAILED_QUESTIONS = {
    "lucky_glass": {CAUSAL, CAUSAL_TRAINING, SOURCE, TARGET_PADDING, GRADIENTS},
    "jadore801120": set(),
    "leftover": {CAUSAL, CAUSAL_TRAINING, PADDING, TARGET_PADDING, WEIGHTS, LENGTHS, FREE},
    "d2l_note": {CAUSAL, TARGET_PADDING, WEIGHTS, SAME},
    "annotated_transformer": set(),
}


def questions(report):
    return {answer.question for answer in report.findings}


def test_nothing_in_a_healthy_model():
    module = ToyTransformer()
    initial_values = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    assert_healthy(module, **SIZES, cached=step_by_step, loss=mean_loss, dropout=ToyTransformer.DROPOUT)
    assert all(torch.equal(value, initial_values[name]) for name, value in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert module.training


@pytest.mark.parametrize("length", [7, 8, 9, 12])
def test_a_short_model_is_asked_with_two_lengths(length):
    """A short position table must not be mistaken for a module that requires equal lengths."""
    assert not make_subject(ToyTransformer(), None, (23, 23), 0, max_length=length).one_length


def test_every_answer_of_a_healthy_model_is_measured():
    assert [answer.question for answer in examine(None).answers if answer.ok is not True] == []


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_mistake_is_found(defect):
    report = examine(defect)
    assert defect.question in questions(report), str(report)
    assert not report.ok


@pytest.mark.parametrize("row", [0, 1])
def test_a_weight_that_is_nan_is_not_zero(row, monkeypatch):
    """The softmax of a row without any key is NaN; here its average over all keys, future ones too, replaces it."""

    def normalize(self, scores):
        forbidden = torch.zeros_like(scores, dtype=torch.bool)
        forbidden[..., row, :] = True
        return scores.masked_fill(forbidden, -torch.inf).softmax(-1).nan_to_num(1 / scores.shape[-1])

    monkeypatch.setattr(Attention, "normalize", normalize)
    assert WEIGHTS in questions(examine(None))


def published_config(name, as_published):
    target_sizes = {"tgt_vocab_size": 31} if name == "jadore801120" else {"tgt_vocab_size": 29}
    return TransformerConfig.published(name, as_published=as_published, src_vocab_size=31, **target_sizes, **SMALL)


@pytest.mark.parametrize("name", FAILED_QUESTIONS)
def test_a_published_system_as_published(name):
    training = TrainingConfig.published(name, as_published=True)
    report = audit_config(published_config(name, True), name=name, training=training, cache=False)
    assert questions(report) == FAILED_QUESTIONS[name], str(report)
    counts = f"failed checks: {len(report.findings)}, known mistakes: {len(report.mistakes)}\n"
    assert report.mistakes
    assert counts in str(report)
    mistaken_settings = {mistake.setting.partition("=")[0] for mistake in report.mistakes}
    assert mistaken_settings == set(RECIPES[name].breaks)
    assert set(RECIPES[name].breaks) <= {*RECIPES[name].repairs, *RECIPES[name].training_repairs}


@pytest.mark.parametrize("name", FAILED_QUESTIONS)
def test_a_published_system_repaired(name):
    training = TrainingConfig.published(name, as_published=False)
    report = audit_config(published_config(name, False), name=name, training=training, cache=False)
    assert report.ok, str(report)


def modules(as_published):
    """Small modules of the published systems, each with its pad id."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 12, "layers": 2, "dropout": 0.0, "as_published": as_published}
    jadore801120_sizes = {"d_model": 16, "d_inner": 12, "n_layers": 2, "n_head": 2, "d_k": 8, "d_v": 8, "dropout": 0.0}
    yield lucky_glass.Transformer(31, 31, heads=4, **sizes), 1
    yield leftover.Transformer(31, 31, heads=2, seq_len=30, pad=1, **sizes), 1
    yield jadore801120.Transformer(31, 31, 1, 1, **jadore801120_sizes, as_published=as_published), 1
    yield annotated_transformer.Transformer(31, 31, h=2, **sizes), 2


def audit_system(module, pad_id):
    def forward(module, src, tgt):
        system = type(module).__module__.split(".")[-2]
        return ORACLES[system].call(module, src, tgt, pad_id)

    return audit(module, vocab_size=31, pad_id=pad_id, dropout=0.0, forward=forward)


def test_their_own_modules():
    """The original PyTorch modules; two of them hard-code a dropout rate, which fails the dropout question."""
    reports = [audit_system(*module) for module in modules(True)]
    expected = [FAILED_QUESTIONS["lucky_glass"], FAILED_QUESTIONS["leftover"] | {GRADIENTS}, {DROPOUT}, {DROPOUT}]
    assert [questions(a) for a in reports] == expected
    measurements = [answer.measured for a in reports for answer in a.findings if answer.question == GRADIENTS]
    assert measurements[0].startswith("61 of 98 tensors get no gradient")
    assert measurements[1] == "2 of 90 tensors get no gradient: decoder.proj.weight, decoder.proj.bias"
    for module in modules(False):
        assert (report := audit_system(*module)).ok, str(report)


def healthy_config(seed):
    """A random config of settings without mistakes."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    heads, shared = one_of(1, 2, 7), one_of(True, False)
    return TransformerConfig(
        src_vocab_size=31,
        tgt_vocab_size=31 if shared else 29,
        shared_embeddings=shared,
        d_model=14,
        num_heads=heads,
        decoder_num_heads=one_of(None, 1, 2),
        head_dim=one_of(None, 5),
        v_head_dim=one_of(None, 3),
        d_ff=one_of(9, 23),
        decoder_d_ff=one_of(None, 17),
        num_encoder_layers=one_of(1, 2, 3),
        num_decoder_layers=one_of(1, 2, 3),
        max_length=one_of(7, 16, 40),
        norm_placement=one_of("pre", "post"),
        norm=one_of("layer_norm", "rms_norm", "sample_std_norm"),
        norm_scale=one_of(True, False),
        norm_bias=one_of(True, False),
        final_norm=one_of(True, False),
        embedding_norm=one_of("none", "before_dropout"),
        embedding_scale=one_of("none", "sqrt_d_model"),
        embedding_padding=one_of("trained", "frozen"),
        positions=one_of("sinusoidal_interleaved", "sinusoidal_half", "sinusoidal_half_t2t", "learned", "none"),
        position_counting=one_of("all", "non_padding"),
        position_offset=one_of(0, 2),
        tied_output=one_of(True, False),
        output_bias=one_of("none", "learned"),
        output_activation=one_of("none", "log_softmax"),
        score_scaling=one_of("product", "query", "none"),
        relative_positions=one_of("none", "shared", "per_layer"),
        relative_position_buckets=one_of(32, 6),
        ffn_gate=one_of(True, False),
        mask_value=one_of("exact", -1e9),
        decoder_mask=one_of("causal", "causal_and_padding"),
        activation=one_of("relu", "gelu", "gelu_tanh", "silu"),
        ffn_bias=one_of(True, False),
        **{f"{site}_proj_bias": one_of(True, False) for site in "qkv"},
        **{f"{site}_dropout": one_of(0.0, 0.3) for site in ("embedding", "attention", "ffn", "residual", "final")},
        encoder_layerdrop=one_of(0.0, 0.3),
        pad_id=one_of(0, 3),
    )


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 100), marks=pytest.mark.slow)])
def test_nothing_in_healthy_configs(seeds):
    for seed in seeds:
        report = audit_config(healthy_config(seed), name=f"seed {seed}", seed=seed, cache=False)
        assert report.ok, str(report)


def test_the_cache_of_ours():
    (answer,) = (a for a in audit_config(published_config("d2l_note", False), name="").answers if "cache" in a.question)
    assert answer.ok
    assert answer.measured.startswith("the same tokens")


def test_what_cannot_be_audited():
    with pytest.raises(AuditError, match="Linear: give vocab_size and pad_id"):
        audit(nn.Linear(3, 3))
    with pytest.raises(AuditError, match="Linear: cannot be called with sources and targets: TypeError"):
        audit(nn.Linear(3, 3), vocab_size=9, pad_id=0)
    with pytest.raises(AuditError, match=r"ToyTransformer: returns \(2, 23\) and should return .* \(2, 7, 23\)"):
        audit(ToyTransformer(), **SIZES, forward=lambda m, src, tgt: m(src, tgt)[:, -1])
    with pytest.raises(AuditError, match="an audit needs at least 7 positions"):
        audit(ToyTransformer(), vocab_size=23, pad_id=0, max_length=6)
    outer = ToyTransformer()
    with pytest.raises(AuditError, match="`forward` must call the module that it receives"):
        audit(ToyTransformer(), **SIZES, forward=lambda m, src, tgt: outer(src, tgt))
    with pytest.raises(AuditError, match=r"ToyTransformer: returns \(7, 23\)"):
        audit(ToyTransformer(), **SIZES, forward=lambda m, src, tgt: m(src, tgt).squeeze())
    module = ToyTransformer()
    module.hook = (_ for _ in ())
    with pytest.raises(AuditError, match="ToyTransformer: cannot be copied: TypeError"):
        audit(module, **SIZES)


def test_what_raises_is_not_healthy():
    report = audit(ToyTransformer(), **SIZES, forward=lambda m, src, tgt: m(src, tgt) if len(src) != 3 else 1 / 0)
    assert not report.ok
    assert "it raises ZeroDivisionError" in str(report)
    heading = f"ToyTransformer: failed checks: {len(report.findings)}, known mistakes: 0\n"
    assert str(report).startswith(heading)


def test_nan_everywhere_gets_one_answer_that_names_where_it_begins():
    module = ToyTransformer()
    with torch.no_grad():
        module.decoder[1].norms[1].weight[3] = torch.nan
    (answer,) = audit(module, **SIZES).answers
    assert not answer.ok
    assert answer.question == "Are the outputs finite?"
    assert answer.measured == "100% of the outputs are NaN or infinite in float32"
    assert answer.where == "decoder.1.norms.1"


def test_a_computation_between_parts_that_gives_nan_is_named_by_the_part_around_it():
    module = ToyTransformer()
    module.encoder[1].self_attention.normalize = lambda scores: (scores * torch.inf).softmax(-1)
    (answer,) = audit(module, **SIZES).answers
    assert answer.where == "encoder.1.self_attention"


def only_float32(module, src, tgt):
    """Calls a module; returns NaN logits in float64."""
    logits = module(src, tgt)
    return logits * torch.nan if logits.dtype == torch.float64 else logits


# One defect per measurement with a tolerance: causality, padding, batch rows, cache, training.
IN_FLOAT32 = (
    "causal mask off by one",
    "no padding mask in the encoder",
    "norm over the batch",
    "a cache of the last two positions only",
    "dropout without 1/(1 - rate)",
    "no padding mask in training",
)


def test_float32_is_the_dtype_to_judge_by_where_float64_is_not_finite():
    report = examine(None, forward=only_float32)
    assert report.ok, str(report)
    line = "audited in float32: the outputs are not finite in float64, first in the whole model"
    assert report.dtype_line == line
    assert line in str(report)
    assert (report.document()["dtype"], examine(None).dtype_line) == ("float32", "")


def test_a_dtype_that_raises_is_named():
    def require_float32(module, src, tgt):
        assert module.head.weight.dtype == torch.float32, "no float64 here"
        return module(src, tgt)

    line = "audited in float32: float64 raises AssertionError: no float64 here"
    assert examine(None, forward=require_float32).dtype_line.startswith(line)


@pytest.mark.parametrize(
    "defect",
    [pytest.param(d, marks=[] if d.name in IN_FLOAT32 else pytest.mark.slow) for d in DEFECTS],
    ids=lambda defect: defect.name,
)
def test_a_planted_mistake_is_found_in_float32(defect):
    report = examine(defect, forward=only_float32)
    assert report.dtype == "float32"
    assert defect.question in questions(report), str(report)


class Healthy(ToyTransformer):
    """Unusual but correct: rate in an object, in-place dropout, forbidden tokens, stored outputs, Python's `random`."""

    def __init__(self):
        super().__init__()
        self.settings = types.SimpleNamespace(dropout=0.2)
        for layer in [*self.encoder, *self.decoder]:
            layer.dropout = nn.Dropout(0.1, inplace=True)

    def forward(self, src, tgt):
        self.last = super().forward(src, tgt)
        if self.training and random.random() < 0.5:
            self.last = self.last + 0
        logits = nn.functional.dropout(self.last, self.settings.dropout, self.training)
        return logits.masked_fill(torch.arange(23) == 0, -torch.inf)


def test_what_is_unusual_and_no_mistake():
    module = Healthy()
    module(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)).nan_to_num(0, 0, 0).sum().backward()
    state = random.getstate()
    with torch.inference_mode():
        assert_healthy(module, **SIZES)
    assert random.getstate() == state
    short_model = ToyTransformer()
    short_model.positions = nn.Embedding(10, 12)
    assert_healthy(short_model, vocab_size=23, pad_id=0)
    nll = nn.functional.nll_loss
    assert_healthy(ToyTransformer(), **SIZES, loss=lambda z, y: nll(z.flatten(0, 1), y.flatten(), ignore_index=0))


class Routed(ToyTransformer):
    """Like a mixture of experts: dropout on some tokens, a weight that few tokens use, and noise in training."""

    def __init__(self, routed_id):
        super().__init__()
        self.routed_id, self.expert, self.drop, self.noise = routed_id, nn.Parameter(torch.ones(23)), 0.3, 0.01

    def forward(self, src, tgt):
        logits = super().forward(src, tgt)
        even = (tgt % 2 == 0)[..., None]
        logits = logits.masked_scatter(even, nn.functional.dropout(logits[even[..., 0]], self.drop, self.training))
        logits = torch.where(tgt[..., None] == self.routed_id, logits * self.expert, logits)
        if self.training and self.noise:
            logits = logits * torch.empty_like(logits).uniform_(1 - self.noise, 1 + self.noise)
        return logits


def test_a_mixture_of_experts_is_healthy():
    first_batch = make_subject(ToyTransformer(), None, (23, 23), 0, max_length=16).tokens(1, 2)
    routed_id = next(i for i in range(1, 23) if i not in first_batch)
    assert_healthy(Routed(routed_id), **SIZES)


class Skipping(ToyTransformer):
    """Like LayerDrop: training draws a number, and a part is skipped if it is below a rate."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, src, tgt):
        logits = super().forward(src, tgt)
        return logits / 2 if self.training and torch.rand([]) < self.share else logits


def test_a_draw_counts_if_outputs_depend_on_it():
    assert_healthy(Skipping(0.0), **SIZES)
    assert DROPOUT in questions(audit(Skipping(0.1), **SIZES))


def test_an_empty_source_that_overflows_in_float64_alone_is_healthy():
    def normalize(scores):
        fill = torch.finfo(scores.dtype).min
        return scores.masked_fill(scores < -1e29, fill).softmax(-1, dtype=torch.float32).to(scores.dtype)

    module = ToyTransformer()
    for part in module.modules():
        if isinstance(part, Attention):
            part.normalize = normalize
    report = audit(module, **SIZES)
    assert report.ok, str(report)
    (answer,) = (a for a in report.answers if a.question == "Are outputs finite for an all-padding source?")
    assert answer.measured == "all outputs are finite in float32; in float64 50% are not"


class Wrapped(nn.Module):
    """A translation model around torch.nn.Transformer; `masks` returns its mask arguments."""

    def __init__(self, masks, *, batch_first=True, scale=1.0):
        super().__init__()
        self.embedding, self.masks, self.scale = nn.Embedding(23, 16, padding_idx=0), masks, scale
        self.transformer = nn.Transformer(16, 2, 2, 2, 16, batch_first=batch_first)
        self.positions, self.head = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 23)

    def forward(self, src, tgt):
        x, y = (self.embedding(ids) + self.positions[: ids.shape[1]] for ids in (src, tgt))
        return self.head(self.transformer(x, y, **self.masks(src, tgt)))


def masks_of_torch(src, tgt, *, causal=True, padding=True, memory=True):
    """Mask arguments of torch.nn.Transformer; True = masked."""
    masks = {}
    if causal:
        masks["tgt_mask"] = torch.ones(tgt.shape[1], tgt.shape[1]).triu(1).bool()
    if padding:
        masks["src_key_padding_mask"] = src == 0
    if memory:
        masks["memory_key_padding_mask"] = src == 0
    return masks


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_nn_transformer_wrapped_rightly_and_wrongly():
    """The mistakes: no memory padding mask; no causal mask; batch and length dimensions swapped."""

    def failed_questions(masks=masks_of_torch, **settings):
        torch.manual_seed(0)
        return questions(audit(Wrapped(masks, **settings), vocab_size=23, pad_id=0, max_length=16))

    assert failed_questions() == set()
    assert failed_questions(lambda src, tgt: masks_of_torch(src, tgt, memory=False)) == {PADDING, WEIGHTS, SAME}
    assert failed_questions(lambda src, tgt: masks_of_torch(src, tgt, causal=False)) == {
        *(CAUSAL, CAUSAL_TRAINING, TARGET_PADDING, WEIGHTS)
    }
    failures = failed_questions(lambda src, tgt: {}, batch_first=False)
    assert {APART, APART_TRAINING} <= failures
