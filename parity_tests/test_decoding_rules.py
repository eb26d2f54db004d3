"""Rules of decoding that both twins share, against the papers' numbers and `transformers`, where all ids differ."""

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
from twinax.parity.decoding import ROUNDING, compare_decoded, transformers_generate
from twinax.parity.functions import random_arrays

START, PAD, EOS, BOS, FORCED_END, LONGEST = 5, 1, 2, 0, 9, 10


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(BART of `transformers` in which every special id is another, and padding is likely; what it is here)."""
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
    theirs, checkpoint = bart
    assert (checkpoint.config.forced_eos_id, checkpoint.config.decoder_start_id) == (FORCED_END, START)
    src, how = sources(), DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=LONGEST)
    oracle = transformers_generate(theirs, checkpoint.config, src, how)
    expected = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), how)
    found = flax_transformer.generate(checkpoint.to_flax(), src, how)
    for other in (oracle, found):
        agreement = compare_decoded(other, expected, how, ROUNDING["float32"])
        assert not agreement.different, str(agreement)
        assert len(agreement.ties) <= 1, str(agreement)
    inside = np.arange(expected.tokens.shape[-1]) < expected.lengths[..., None]
    longest = ~expected.ended & (expected.lengths == LONGEST)
    assert longest.any()
    assert (expected.tokens[longest][:, -1] == FORCED_END).all()
    assert not (expected.tokens == PAD)[inside].any()
    logits = checkpoint.to_torch()(torch.from_numpy(src), torch.full((len(src), 1), START))
    assert (logits[:, 0].argmax(-1) == PAD).float().mean() > 0.3  # or nothing was forbidden


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_first_token_can_be_forced(bart: Any, beam_size: int) -> None:
    """By an argument of `generate`: the configs of `transformers` 5 drop it."""
    theirs, checkpoint = bart
    config = checkpoint.config.replace(forced_bos_id=11)
    src, model = sources(), replace(checkpoint, config=config).to_torch()
    how = DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=LONGEST)
    expected = torch_reference.generate(model, torch.from_numpy(src), how)
    assert (expected.tokens[:, :, 0] == 11).all()
    assert not compare_decoded(transformers_generate(theirs, config, src, how), expected, how, 1e-5).different
    free = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), how)
    assert (free.tokens[:, 0, 0] != 11).mean() > 0.8


def test_the_commonest_token_can_be_forbidden(bart: Any) -> None:
    theirs, checkpoint = bart
    src, model = sources(), checkpoint.to_torch()
    free = torch_reference.generate(model, torch.from_numpy(src), DecodingConfig(beam_size=2, max_length=LONGEST))
    ordinary = free.tokens[free.tokens > FORCED_END]
    commonest = int(np.bincount(ordinary).argmax())
    how = DecodingConfig(beam_size=2, max_length=LONGEST, forbidden_ids=(commonest,))
    expected = torch_reference.generate(model, torch.from_numpy(src), how)
    assert (free.tokens == commonest).sum() > 10
    assert not (expected.tokens == commonest).any()
    oracle = transformers_generate(theirs, checkpoint.config, src, how)
    assert not compare_decoded(oracle, expected, how, ROUNDING["float32"]).different


def test_scores_are_the_loss_of_transformers(bart: Any) -> None:
    """Which puts its decoder's start token, not BOS, before the labels."""
    theirs, checkpoint = bart
    src, rng = sources(sentences=5), np.random.default_rng(1)
    tgt = np.where(np.arange(6) < np.array([6, 5, 4, 3, 2])[:, None] - 1, rng.integers(10, 41, (5, 6)), PAD)
    tgt[np.arange(5), [5, 4, 3, 2, 1]] = EOS
    for i in range(5):
        labels = torch.from_numpy(np.where(tgt[i : i + 1] == PAD, -100, tgt[i : i + 1]))
        with torch.no_grad():
            loss = theirs(
                input_ids=torch.from_numpy(src[i : i + 1]),
                attention_mask=torch.from_numpy(src[i : i + 1] != PAD).long(),
                labels=labels,
            ).loss
        expected = -float(loss) * int((labels != -100).sum())
        pair = src[i : i + 1], tgt[i : i + 1]
        found = (
            flax_transformer.score(checkpoint.to_flax(), *pair),
            torch_reference.score(checkpoint.to_torch(), *map(torch.from_numpy, pair)),
        )
        assert [scored.totals[0] for scored in found] == pytest.approx([expected] * 2, rel=1e-5)


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
    """Sums of log-probabilities of every hypothesis there is, by sentence; the end is forced at the fourth token."""
    ordinary = [1, 3, 4, 5]
    hypotheses = [(*body, EOS) for n in range(4) for body in itertools.product(ordinary, repeat=n)]
    inputs = torch.tensor([[3, *row[:-1], *[PAD] * (4 - len(row))] for row in hypotheses])
    sums = []
    for sentence in src:
        with torch.no_grad():
            log_probs = model(torch.from_numpy(sentence).expand(len(inputs), -1), inputs).log_softmax(-1)
        said = [[float(log_probs[i, j, token]) for j, token in enumerate(row)] for i, row in enumerate(hypotheses)]
        # a forced token costs nothing
        sums.append(
            {row: sum(each[:-1] if len(row) == 4 else each) for row, each in zip(hypotheses, said, strict=True)}
        )
    return sums


def test_the_penalty_chooses_the_winner() -> None:
    """By exhaustive search with penalties written out here; each rule has other winners, or the test is blind."""
    with jax.enable_x64(True):
        arrays = random_arrays(SMALL, 0)
        arrays["output.bias"][EOS] += 0.5
        model = flax_transformer.Transformer.from_arrays(SMALL, {name: jnp.asarray(a) for name, a in arrays.items()})
        twin, src = convert.to_torch(model), np.random.default_rng(0).integers(3, 13, (12, 5))
        sums, winners = all_sums(twin, src), {}
        for rule, penalty in LITERAL.items():
            how = DecodingConfig(beam_size=6, length_penalty=rule, length_exponent=1.5, max_length=4)  # pyright: ignore
            winners[rule] = [max(row, key=lambda h, row=row, p=penalty: row[h] / p(len(h))) for row in sums]
            searches = [torch_reference.generate(twin, torch.from_numpy(src), how)]
            if rule == "gnmt":  # the table of penalties is shared, and each is compiled
                searches.append(flax_transformer.generate(model, src, how))
            for found in searches:
                assert [(*row[0], EOS) for row in found.sentences()] == winners[rule]
    for one, other in itertools.combinations(winners, 2):
        assert winners[one] != winners[other]
