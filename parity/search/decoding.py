"""Beam search compared token by token: Flax, PyTorch, and `transformers`' `generate`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import torch

from ... import convert, flax_transformer, torch_reference
from ...configs.decoding import DecodingConfig, SamplingConfig
from ...configs.schema import TransformerConfig
from ...convert.checkpoint import Checkpoint
from ...convert.formats.hugging_face import family
from ...formulas.decoding import LENGTH_PENALTIES, Decoded, collect
from ...torch_reference.decoding import beam

# Effect of rounding on a sentence's sum of log-probabilities, in nats, of models with logits of usual size.
# transformers casts the logits to float32 for every dtype of the model.
ROUNDING = {"float32": 1e-5, "float64": 1e-12}
LONGEST = 24


@dataclass(frozen=True)
class Agreement:
    """Agreement of two searches; a sentence is equal if all its hypotheses are, in order."""

    equal: int  # sentences
    ties: dict[int, float]  # differing sentence -> margin of its closest decision, small enough for rounding to flip it
    different: dict[int, float]  # differing sentence -> margin that rounding cannot explain
    score_error: float  # largest difference of the sums of log-probabilities of equal sentences, in nats

    def __str__(self) -> str:
        """One line."""
        text = f"{self.equal} sentences equal, sums within {self.score_error:.1e}"
        for name, margins in (("within rounding", self.ties), ("different", self.different)):
            details = ", ".join(f"{sentence} (margin {margin:.1e})" for sentence, margin in margins.items())
            text += f"; {len(margins)} {name}" + (f": {details}" if margins else "")
        return text


def compare_decoded(candidate: Decoded, reference: Decoded, config: DecodingConfig, rounding: float) -> Agreement:
    """Compare two searches; `reference` is PyTorch's, which records the margins of its decisions.

    `rounding` is the largest difference that rounding makes in a sum of log-probabilities, in nats.
    """
    assert reference.margins is not None
    longest = max(candidate.tokens.shape[-1], reference.tokens.shape[-1])
    tokens, reference_tokens = (
        np.pad(d.tokens, ((0, 0), (0, 0), (0, longest - d.tokens.shape[-1]))) for d in (candidate, reference)
    )
    inside = np.arange(longest) < reference.lengths[..., None]
    same = (candidate.lengths == reference.lengths).all(1) & ((tokens == reference_tokens) | ~inside).all((1, 2))
    margins = [(int(i), float(reference.margins[i])) for i in np.flatnonzero(~same)]
    both = same[:, None] & (reference.lengths > 0)
    penalties = LENGTH_PENALTIES[config.length_penalty](reference.lengths[both].astype(float), config.length_exponent)
    errors = np.abs(candidate.scores[both] - reference.scores[both]) * penalties
    return Agreement(
        int(same.sum()),
        {i: margin for i, margin in margins if margin <= rounding},
        {i: margin for i, margin in margins if margin > rounding},
        float(errors.max(initial=0)),
    )


def as_generate(settings: TransformerConfig, **fields: Any) -> DecodingConfig:
    """The decoding settings with which `generate` ends hypotheses: only a model's `forced_eos_id` is forced."""
    return DecodingConfig(force_end=settings.forced_eos_id is not None, **fields)


def transformers_generate(model: Any, settings: TransformerConfig, src: np.ndarray, config: DecodingConfig) -> Decoded:
    """Decode a batch with `model.generate`. Its greedy search (beam size 1) returns no scores; they are 0 here.

    Its lengths count the start token, and it forbids padding only through `bad_words_ids`. `max_new_tokens` and
    `min_new_tokens` are cleared, because it warns if a directory sets one way of counting and the call another.
    """
    assert config.length_penalty == "power"
    tokens = torch.from_numpy(src)
    output = model.generate(
        input_ids=tokens,
        attention_mask=(tokens != settings.pad_id).long(),
        do_sample=False,
        early_stopping=config.early_stopping,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        encoder_no_repeat_ngram_size=config.encoder_no_repeat_ngram_size,
        renormalize_logits=config.renormalize,
        num_beams=config.beam_size,
        num_return_sequences=config.n_best,
        length_penalty=config.length_exponent,
        min_length=config.min_length,
        max_length=config.max_length and config.max_length + 1,
        min_new_tokens=None,
        max_new_tokens=None,
        bad_words_ids=[[token] for token in (settings.pad_id, *config.forbidden_ids)],
        forced_bos_token_id=settings.forced_bos_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    shape = len(src), config.n_best
    scores = np.zeros(shape) if config.beam_size == 1 else output.sequences_scores.numpy().reshape(shape)
    return collect(output.sequences.numpy().reshape(*shape, -1), scores, settings, config)


_BART_SIZES: dict[str, Any] = {"vocab_size": 101, "d_model": 32, "max_position_embeddings": LONGEST}
for _side in ("encoder", "decoder"):
    _BART_SIZES |= {f"{_side}_layers": 2, f"{_side}_attention_heads": 4, f"{_side}_ffn_dim": 64}
_T5_SIZES: dict[str, Any] = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_T5_SIZES |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "n_positions": LONGEST}
# family -> settings. Large weights give logits far apart, and a likely EOS gives sentences of many lengths. If all
# sentences reached the maximum length, most rules could not be distinguished.
FAMILIES: dict[str, dict[str, Any]] = {
    "Marian": {
        "pad_token_id": 100,
        "decoder_start_token_id": 100,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "init_std": 0.8,
    },
    "BART": {"init_std": 0.6},
    "T5": {"initializer_factor": 2.0, "decoder_start_token_id": 0},
    "UMT5": {"initializer_factor": 2.0},
}
END = 5.0  # added to the logit of EOS; without an output bias, the factor of its weights


def random_family(name: str, folder: Path) -> tuple[Any, Checkpoint]:
    """A random model of `transformers`, saved in a folder, and the checkpoint that twinax loads from it."""
    import transformers

    torch.manual_seed(0)
    layout = family(name.lower())
    architecture, sizes = getattr(transformers, layout.architecture), _T5_SIZES if "T5" in name else _BART_SIZES
    model = architecture(architecture.config_class(**sizes, **FAMILIES[name])).eval()
    end = model.config.eos_token_id
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias[0, end] = END
        else:
            model.lm_head.weight[end] *= END
    model.save_pretrained(folder)
    return model, convert.load(folder)


def sentences(pad_id: int, number: int = 200) -> np.ndarray:
    """Random sentences of 2 to 16 tokens."""
    rng = np.random.default_rng(0)
    src = rng.integers(3, 99, (200, 16))
    return np.where(np.arange(16) < rng.integers(2, 17, (200, 1)), src, pad_id)[:number]


@dataclass(frozen=True)
class Row:
    """Agreement of three searches on the same sentences, all hypotheses of each."""

    name: str
    dtype: str
    beam_size: int
    flax: Agreement  # with PyTorch
    transformers: Agreement
    lengths: np.ndarray  # of the best hypotheses

    @property
    def ok(self) -> bool:
        """Whether everything is equal, except for differences that rounding explains."""
        scores_close = self.dtype != "float64" or self.flax.score_error <= 1e-10
        return scores_close and not (self.flax.different or self.transformers.different)


def measure(
    name: str,
    transformers_model: Any,
    checkpoint: Checkpoint,
    dtype: str,
    beam_size: int,
    number: int = 200,
    **rules: Any,
) -> Row:
    """The row of a family, on so many sentences, with further fields of `DecodingConfig`.

    It needs `jax_enable_x64` for float64.
    """
    config = checkpoint.config.replace(param_dtype=dtype, compute_dtype=dtype)
    arrays = {name: jnp.asarray(a.astype(dtype)) for name, a in checkpoint.arrays.items()}
    model = flax_transformer.Transformer.from_arrays(config, arrays)
    src = sentences(config.pad_id, number)
    decoding = as_generate(config, beam_size=beam_size, n_best=beam_size, max_length=LONGEST, **rules)
    reference = torch_reference.generate(convert.to_torch(model), torch.from_numpy(src), decoding)
    rounding = _rounding(dtype, reference, config, arrays, src, decoding)
    candidate = flax_transformer.generate(model, src, decoding)
    oracle = transformers_generate(transformers_model.to(getattr(torch, dtype)), config, src, decoding)
    return Row(
        name,
        dtype,
        beam_size,
        compare_decoded(candidate, reference, decoding, rounding),
        compare_decoded(oracle, reference, decoding, max(rounding, ROUNDING["float32"])),
        reference.lengths[:, 0],
    )


# kinds of decoding that `generate` does not have in the same form: fields of `DecodingConfig`
KINDS: dict[str, dict[str, Any]] = {
    "samples": {"sampling": SamplingConfig()},
    "samples, top-k and nucleus": {"sampling": SamplingConfig(seed=1, temperature=0.8, top_k=20, top_p=0.9)},
    "samples, min-p and typical": {"sampling": SamplingConfig(seed=2, min_p=0.02, typical_p=0.9)},
    "diverse beams": {"beam_groups": 2, "diversity_penalty": 0.5},
    "lengths by the source": {"min_length_ratio": 0.5, "max_length_ratio": 1.1},
    "forbidden sequences": {"forbidden_sequences": tuple((i, i + 1) for i in range(10, 60))},
}


def compare_kind(checkpoint: Checkpoint, dtype: str, kind: str, number: int = 200) -> Agreement:
    """Flax and PyTorch on so many sentences, with a kind of decoding and four hypotheses per sentence."""
    config = checkpoint.config.replace(param_dtype=dtype, compute_dtype=dtype)
    arrays = {name: jnp.asarray(a.astype(dtype)) for name, a in checkpoint.arrays.items()}
    model, src = flax_transformer.Transformer.from_arrays(config, arrays), sentences(config.pad_id, number)
    decoding = DecodingConfig(beam_size=4, n_best=4, max_length=LONGEST, **KINDS[kind])
    reference = torch_reference.generate(convert.to_torch(model), torch.from_numpy(src), decoding)
    rounding = _rounding(dtype, reference, config, arrays, src, decoding)
    return compare_decoded(flax_transformer.generate(model, src, decoding), reference, decoding, rounding)


def _rounding(
    dtype: str,
    reference: Decoded,
    config: TransformerConfig,
    arrays: Mapping[str, Any],
    src: np.ndarray,
    decoding: DecodingConfig,
) -> float:
    """`ROUNDING`; below float64, at least the largest difference of PyTorch's own sums from those in float64."""
    if dtype == "float64":
        return ROUNDING[dtype]
    wide = config.replace(param_dtype="float64", compute_dtype="float64")
    model = flax_transformer.Transformer.from_arrays(wide, {n: a.astype("float64") for n, a in arrays.items()})
    exact = torch_reference.generate(convert.to_torch(model), torch.from_numpy(src), decoding)
    return max(ROUNDING["float32"], compare_decoded(exact, reference, decoding, 0.0).score_error)


# name -> context in which the PyTorch search has the mistake
WRONG_RULES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": lambda: patch.dict(LENGTH_PENALTIES),
    "EOS accepted below rank K": lambda: patch.object(beam, "may_finish", lambda rank, beam_size: rank >= 0),
    "stops at K finished hypotheses": lambda: patch.object(beam, "settled", lambda worst, best: worst > -torch.inf),
    "never stops early": lambda: patch.object(beam, "settled", lambda worst, best: worst > torch.inf),
    "length includes BOS": lambda: patch.dict(LENGTH_PENALTIES, power=lambda n, a: (n + 1) ** a),
    "length excludes EOS": lambda: patch.dict(LENGTH_PENALTIES, power=lambda n, a: np.maximum(n - 1, 1) ** a),
}


def _config_of(checkpoint: Checkpoint) -> DecodingConfig:
    return as_generate(checkpoint.config, beam_size=4, n_best=4, max_length=LONGEST)


def reference_decoding(transformers_model: Any, checkpoint: Checkpoint, rows: Sequence[int] = range(200)) -> Decoded:
    """These of the 200 sentences, decoded by `transformers` with beam size 4."""
    src, config = sentences(checkpoint.config.pad_id)[list(rows)], _config_of(checkpoint)
    return transformers_generate(transformers_model.float(), checkpoint.config, src, config)


def count_differences(oracle: Decoded, checkpoint: Checkpoint, rule: str, rows: Sequence[int] = range(200)) -> int:
    """Number of the sentences of `reference_decoding` that differ from it beyond rounding."""
    src, config = sentences(checkpoint.config.pad_id)[list(rows)], _config_of(checkpoint)
    with WRONG_RULES[rule]():
        candidate = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), config)
    return len(compare_decoded(oracle, candidate, config, ROUNDING["float32"]).different)
