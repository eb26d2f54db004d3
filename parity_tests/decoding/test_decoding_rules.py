"""Decoding rules shared by both twins, against the papers' formulas and a `transformers` model with distinct ids."""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.configs.decoding import DecodingConfig
from twinax.formulas.decoding import plan
from twinax.parity.functions import random_arrays
from twinax.parity.search.decoding import ROUNDING, compare_decoded, transformers_generate

START, PAD, EOS, BOS, FORCED_END, LONGEST = 5, 1, 2, 0, 9, 10


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(BART of `transformers` with distinct special ids and likely padding, converted checkpoint)."""
    sizes: dict[str, Any] = {"vocab_size": 41, "d_model": 16, "max_position_embeddings": 16, "init_std": 0.6}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS, "decoder_start_token_id": START}
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, **ids, forced_eos_token_id=FORCED_END)
    ).eval()
    model.final_logits_bias[0, EOS] = 5.0
    model.final_logits_bias[0, PAD] = 8.0
    folder = tmp_path_factory.mktemp("rules") / "bart"
    model.save_pretrained(folder)
    return model, convert.load(folder)


def sources(pad_id: int = PAD, sentences: int = 60) -> np.ndarray:
    rng = np.random.default_rng(0)
    src = rng.integers(10, 41, (sentences, 8))
    return np.where(np.arange(8) < rng.integers(2, 9, (sentences, 1)), src, pad_id)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_forced_end_start_and_padding_are_those_of_transformers(bart: Any, beam_size: int) -> None:
    oracle_model, checkpoint = bart
    assert (checkpoint.config.forced_eos_id, checkpoint.config.decoder_start_id) == (FORCED_END, START)
    src, config = sources(), DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=LONGEST)
    oracle = transformers_generate(oracle_model, checkpoint.config, src, config)
    expected = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), config)
    flax_output = flax_transformer.generate(checkpoint.to_flax(), src, config)
    for candidate in (oracle, flax_output):
        agreement = compare_decoded(candidate, expected, config, ROUNDING["float32"])
        assert not agreement.different, str(agreement)
        assert len(agreement.ties) <= 1, str(agreement)
    inside = np.arange(expected.tokens.shape[-1]) < expected.lengths[..., None]
    longest = ~expected.ended & (expected.lengths == LONGEST)
    assert longest.any()
    assert (expected.tokens[longest][:, -1] == FORCED_END).all()
    assert not (expected.tokens == PAD)[inside].any()
    logits = checkpoint.to_torch()(torch.from_numpy(src), torch.full((len(src), 1), START))
    assert (logits[:, 0].argmax(-1) == PAD).float().mean() > 0.3  # otherwise the test has no power


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_first_token_can_be_forced(bart: Any, beam_size: int) -> None:
    """Passed to `generate`, because the configs of `transformers` 5 drop it."""
    oracle_model, checkpoint = bart
    config = checkpoint.config.replace(forced_bos_id=11)
    src, model = sources(), replace(checkpoint, config=config).to_torch()
    decoding = DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=LONGEST)
    expected = torch_reference.generate(model, torch.from_numpy(src), decoding)
    assert (expected.tokens[:, :, 0] == 11).all()
    assert not compare_decoded(
        transformers_generate(oracle_model, config, src, decoding), expected, decoding, 1e-5
    ).different
    unforced_output = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), decoding)
    assert (unforced_output.tokens[:, 0, 0] != 11).mean() > 0.8


RULES: dict[str, dict[str, Any]] = {
    "n-grams": {"no_repeat_ngram_size": 2},
    "tokens": {"no_repeat_ngram_size": 1},
    "n-grams of the source": {"encoder_no_repeat_ngram_size": 2},
    "tokens of the source": {"encoder_no_repeat_ngram_size": 1},
    "early": {"early_stopping": True},
    "renormalized": {"renormalize": True, "forbidden_ids": (11, 12, 13)},
    "all": {"no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 3, "early_stopping": True, "renormalize": True},
}


@pytest.mark.parametrize("name", RULES)
def test_other_rules_are_those_of_transformers(bart: Any, name: str) -> None:
    """Sources and models repeat few tokens, so that every rule changes a translation."""
    oracle_model, checkpoint = bart
    src = np.where(sources() == PAD, PAD, 10 + sources() % 4)
    differences = 0
    for beam_size in (1, 4):
        config = DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=LONGEST, **RULES[name])
        oracle = transformers_generate(oracle_model, checkpoint.config, src, config)
        output = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), config)
        agreement = compare_decoded(output, oracle._replace(margins=output.margins), config, ROUNDING["float32"])
        assert not agreement.different, str(agreement)
        plain = replace(config, **{field: type(value)() for field, value in RULES[name].items()})
        without = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), plain)
        differences += without.sentences() != output.sentences() or not np.allclose(without.scores, output.scores)
    assert differences


def test_the_start_token_counts_as_a_token_of_the_hypothesis(bart: Any) -> None:
    oracle_model, checkpoint = copy.deepcopy(bart)
    oracle_model.final_logits_bias[0, START] = 30.0
    bias = checkpoint.arrays["output.bias"].copy()
    bias[START] = 30.0
    model = replace(checkpoint, arrays={**checkpoint.arrays, "output.bias": bias}).to_torch()
    first_tokens = {}
    for size in (0, 1):
        config = DecodingConfig(max_length=LONGEST, no_repeat_ngram_size=size)
        output = torch_reference.generate(model, torch.from_numpy(sources()), config)
        oracle = transformers_generate(oracle_model, checkpoint.config, sources(), config)
        assert output.sentences() == oracle.sentences()
        first_tokens[size] = {*output.tokens[:, 0, 0].tolist()}
    assert first_tokens[0] == {START}
    assert START not in first_tokens[1]


def test_forbidden_n_grams_are_counted_by_hand() -> None:
    """The hypothesis 5 7 8 7 ends with 7, which 8 followed; the source 7 9 7 has 7 before 9."""
    from twinax.flax_transformer.decoding import ngrams
    from twinax.torch_reference.decoding import ngrams as torch_ngrams

    tokens, src = np.array([[[5, 7, 8, 7, 0, 0]], [[7, 9, 7, 0, 0, 0]]])[
        :, None
    ]  # one shape, because JAX compiles each
    for sequence, valid, size, expected in (
        (tokens, 4, 2, {8}),
        (tokens, 4, 1, {5, 7, 8}),
        (src, 3, 2, {9}),
        (src, 3, 4, set()),
        (src, 3, 9, set()),
    ):
        flax_output = ngrams.forbid(
            ngrams.repeats(jnp.asarray(tokens), jnp.int32(4), jnp.asarray(sequence), valid, size), 10
        )
        arrays = torch.from_numpy(tokens), 4, torch.from_numpy(sequence), valid, size
        torch_output = torch_ngrams.forbid(torch_ngrams.repeats(*arrays), 10)
        for output in (np.asarray(flax_output), torch_output.numpy()):
            assert {*np.flatnonzero(output[0, 0]).tolist()} == expected


def test_the_commonest_token_can_be_forbidden(bart: Any) -> None:
    oracle_model, checkpoint = bart
    src, model = sources(), checkpoint.to_torch()
    unconstrained_output = torch_reference.generate(
        model, torch.from_numpy(src), DecodingConfig(beam_size=2, max_length=LONGEST)
    )
    ordinary_tokens = unconstrained_output.tokens[unconstrained_output.tokens > FORCED_END]
    commonest_token = int(np.bincount(ordinary_tokens).argmax())
    config = DecodingConfig(beam_size=2, max_length=LONGEST, forbidden_ids=(commonest_token,))
    expected = torch_reference.generate(model, torch.from_numpy(src), config)
    assert (unconstrained_output.tokens == commonest_token).sum() > 10
    assert not (expected.tokens == commonest_token).any()
    oracle = transformers_generate(oracle_model, checkpoint.config, src, config)
    assert not compare_decoded(oracle, expected, config, ROUNDING["float32"]).different


def test_scores_are_the_loss_of_transformers(bart: Any) -> None:
    """`transformers` puts the decoder start token, not BOS, before the labels."""
    oracle_model, checkpoint = bart
    src, rng = sources(sentences=5), np.random.default_rng(1)
    tgt = np.where(np.arange(6) < np.array([6, 5, 4, 3, 2])[:, None] - 1, rng.integers(10, 41, (5, 6)), PAD)
    tgt[np.arange(5), [5, 4, 3, 2, 1]] = EOS
    for i in range(5):
        labels = torch.from_numpy(np.where(tgt[i : i + 1] == PAD, -100, tgt[i : i + 1]))
        with torch.no_grad():
            loss = oracle_model(
                input_ids=torch.from_numpy(src[i : i + 1]),
                attention_mask=torch.from_numpy(src[i : i + 1] != PAD).long(),
                labels=labels,
            ).loss
        expected = -float(loss) * int((labels != -100).sum())
        pair = src[i : i + 1], tgt[i : i + 1]
        results = (
            flax_transformer.score(checkpoint.to_flax(), *pair),
            torch_reference.score(checkpoint.to_torch(), *map(torch.from_numpy, pair)),
        )
        assert [result.totals[0] for result in results] == pytest.approx([expected] * 2, rel=1e-5)


# (rule, exponent) -> penalties of 1, 4 and 7 tokens.
PENALTIES = {
    ("gnmt", 0.6): (1.0, 1.5**0.6, 2.0**0.6),  # Wu et al. 2016, eq. 14: (5 + n)^a / (5 + 1)^a
    ("gnmt", 2.0): (1.0, 2.25, 4.0),
    ("power", 0.5): (1.0, 2.0, math.sqrt(7)),
    ("power_with_start", 0.5): (math.sqrt(2), math.sqrt(5), math.sqrt(8)),  # jadore801120: the start token counts
}


@pytest.mark.parametrize(("rule", "exponent"), PENALTIES)
def test_penalties_are_those_of_the_papers(rule: Any, exponent: float) -> None:
    config = TransformerConfig.preset("tiny")
    steps = plan(config, DecodingConfig(length_penalty=rule, length_exponent=exponent, max_length=7))
    assert steps.penalty[[1, 4, 7]] == pytest.approx(PENALTIES[rule, exponent], rel=1e-12)


SMALL = TransformerConfig.preset(
    "tiny",
    d_model=16,
    d_ff=24,
    num_heads=2,
    head_dim=None,
    v_head_dim=None,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=5,
    src_vocab_size=13,
    tgt_vocab_size=6,
    pad_id=0,
    bos_id=1,
    eos_id=2,
    decoder_start_id=3,
    param_dtype="float64",
    compute_dtype="float64",
)
LITERAL = {
    "power": lambda n: n**1.5,
    "power_with_start": lambda n: (n + 1) ** 1.5,
    "gnmt": lambda n: (5 + n) ** 1.5 / 6**1.5,
}


def all_sums(model: Any, src: np.ndarray) -> list[dict[tuple[int, ...], float]]:
    """Summed log-probabilities of all hypotheses per sentence; EOS is forced at the fourth token."""
    ordinary = [1, 3, 4, 5]
    hypotheses = [(*body, EOS) for n in range(4) for body in itertools.product(ordinary, repeat=n)]
    inputs = torch.tensor([[3, *row[:-1], *[PAD] * (4 - len(row))] for row in hypotheses])
    sums = []
    for sentence in src:
        with torch.no_grad():
            log_probs = model(torch.from_numpy(sentence).expand(len(inputs), -1), inputs).log_softmax(-1)
        token_log_probs = [
            [float(log_probs[i, j, token]) for j, token in enumerate(row)] for i, row in enumerate(hypotheses)
        ]
        # a forced token has log-probability 0
        sums.append(
            {
                row: sum(values[:-1] if len(row) == 4 else values)
                for row, values in zip(hypotheses, token_log_probs, strict=True)
            }
        )
    return sums


def test_the_penalty_chooses_the_winner() -> None:
    """Exhaustive search with the `LITERAL` penalties; the winners must differ between rules."""
    with jax.enable_x64(True):
        arrays = random_arrays(SMALL, 0)
        arrays["output.bias"][EOS] += 0.5
        model = flax_transformer.Transformer.from_arrays(SMALL, {name: jnp.asarray(a) for name, a in arrays.items()})
        twin, src = convert.to_torch(model), np.random.default_rng(0).integers(3, 13, (12, 5))
        sums, winners = all_sums(twin, src), {}
        for rule, penalty in LITERAL.items():
            config = DecodingConfig(beam_size=6, length_penalty=rule, length_exponent=1.5, max_length=4)  # pyright: ignore
            winners[rule] = [max(row, key=lambda h, row=row, p=penalty: row[h] / p(len(h))) for row in sums]
            outputs = [torch_reference.generate(twin, torch.from_numpy(src), config)]
            if rule == "gnmt":  # once, because the penalty table is shared and each config compiles
                outputs.append(flax_transformer.generate(model, src, config))
            for output in outputs:
                assert [(*row[0], EOS) for row in output.sentences()] == winners[rule]
    for rule, other_rule in itertools.combinations(winners, 2):
        assert winners[rule] != winners[other_rule]
