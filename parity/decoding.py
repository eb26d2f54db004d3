"""Searches compared token for token: Flax, PyTorch, and `transformers`' `generate`, which nobody here wrote."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import torch

from .. import convert, flax_transformer, torch_reference
from ..configs.decoding import DecodingConfig
from ..configs.schema import TransformerConfig
from ..convert.checkpoint import Checkpoint
from ..convert.hugging_face import family
from ..formulas.decoding import LENGTH_PENALTIES, Decoded, collect
from ..torch_reference import beam

# Of the sum of a sentence's log-probabilities, in nats: what rounding may do to it. transformers casts the logits to
# float32 whatever the model's type.
ROUNDING = {"float32": 1e-5, "float64": 1e-12}
LONGEST = 24


@dataclass(frozen=True)
class Agreement:
    """How far two searches agree, a sentence being equal where all its hypotheses are, in their order."""

    equal: int  # sentences
    ties: dict[int, float]  # sentence that differs -> margin of its closest decision, which rounding may turn
    different: dict[int, float]  # the same, where rounding cannot
    score_error: float  # largest difference of the sums of log-probabilities of equal sentences, in nats

    def __str__(self) -> str:
        """One line."""
        text = f"{self.equal} sentences equal, sums within {self.score_error:.1e}"
        for name, found in (("tied", self.ties), ("different", self.different)):
            listed = ", ".join(f"{sentence} (margin {margin:.1e})" for sentence, margin in found.items())
            text += f"; {len(found)} {name}" + (f": {listed}" if found else "")
        return text


def compare_decoded(found: Decoded, expected: Decoded, config: DecodingConfig, rounding: float) -> Agreement:
    """Whether two searches found the same; `expected` is PyTorch's, which says how close its decisions were.

    `rounding` is the largest difference that rounding makes in a sum of log-probabilities, in nats.
    """
    assert expected.margins is not None
    longest = max(found.tokens.shape[-1], expected.tokens.shape[-1])
    mine, other = (np.pad(d.tokens, ((0, 0), (0, 0), (0, longest - d.tokens.shape[-1]))) for d in (found, expected))
    inside = np.arange(longest) < expected.lengths[..., None]
    same = (found.lengths == expected.lengths).all(1) & ((mine == other) | ~inside).all((1, 2))
    apart = [(int(i), float(expected.margins[i])) for i in np.flatnonzero(~same)]
    both = same[:, None] & (expected.lengths > 0)
    penalties = LENGTH_PENALTIES[config.length_penalty](expected.lengths[both].astype(float), config.length_exponent)
    errors = np.abs(found.scores[both] - expected.scores[both]) * penalties
    return Agreement(
        int(same.sum()),
        {i: margin for i, margin in apart if margin <= rounding},
        {i: margin for i, margin in apart if margin > rounding},
        float(errors.max(initial=0)),
    )


def transformers_generate(model: Any, settings: TransformerConfig, src: np.ndarray, config: DecodingConfig) -> Decoded:
    """What `model.generate` makes of a batch. A beam of 1 is its greedy search, which gives no scores: they are 0.

    Its `min_new_tokens` does not count the end, and it forbids padding only when told.
    """
    assert config.length_penalty == "power"
    tokens = torch.from_numpy(src)
    found = model.generate(
        input_ids=tokens,
        attention_mask=(tokens != settings.pad_id).long(),
        do_sample=False,
        early_stopping=False,
        num_beams=config.beam_size,
        num_return_sequences=config.n_best,
        length_penalty=config.length_exponent,
        min_new_tokens=config.min_length - 1,
        max_new_tokens=config.max_length,
        bad_words_ids=[[token] for token in (settings.pad_id, *config.forbidden_ids)],
        forced_bos_token_id=settings.forced_bos_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    shape = len(src), config.n_best
    scores = np.zeros(shape) if config.beam_size == 1 else found.sequences_scores.numpy().reshape(shape)
    return collect(found.sequences.numpy().reshape(*shape, -1), scores, settings, config)


# family -> settings. Tokens are far apart with weights so large, and where the end is likelier, by END in its logit,
# sentences have many lengths: where all run to the longest, most rules cannot be distinguished.
FAMILIES: dict[str, dict[str, Any]] = {
    "Marian": {
        "pad_token_id": 100,
        "decoder_start_token_id": 100,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "init_std": 0.8,
    },
    "BART": {"init_std": 0.6},
}
END = 5.0


def random_family(name: str, folder: Path) -> tuple[Any, Checkpoint]:
    """A random model of `transformers`, saved in a folder, and what it is here."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 101, "d_model": 32, "max_position_embeddings": LONGEST}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    torch.manual_seed(0)
    architecture = getattr(transformers, family(name.lower()).architecture)
    model = architecture(architecture.config_class(**sizes, **FAMILIES[name])).eval()
    model.final_logits_bias[0, model.config.eos_token_id] = END
    model.save_pretrained(folder)
    return model, convert.load(folder)


def sentences(pad_id: int) -> np.ndarray:
    """200 sentences of 2 to 16 tokens."""
    rng = np.random.default_rng(0)
    src = rng.integers(3, 99, (200, 16))
    return np.where(np.arange(16) < rng.integers(2, 17, (200, 1)), src, pad_id)


@dataclass(frozen=True)
class Row:
    """What three searches found on 200 sentences, all hypotheses of each."""

    name: str
    dtype: str
    beam_size: int
    flax: Agreement  # with PyTorch's
    transformers: Agreement
    lengths: np.ndarray  # of the best hypotheses

    @property
    def ok(self) -> bool:
        """Everything is equal, but for what rounding explains."""
        near = self.dtype != "float64" or self.flax.score_error <= 1e-10
        return near and not (self.flax.different or self.transformers.different)


def measure(name: str, theirs: Any, checkpoint: Checkpoint, dtype: str, beam_size: int) -> Row:
    """A family's row. Needs `jax_enable_x64` for float64."""
    config = checkpoint.config.replace(param_dtype=dtype, compute_dtype=dtype)
    arrays = {name: jnp.asarray(a.astype(dtype)) for name, a in checkpoint.arrays.items()}
    model = flax_transformer.Transformer.from_arrays(config, arrays)
    src, how = sentences(config.pad_id), DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=LONGEST)
    expected = torch_reference.generate(convert.to_torch(model), torch.from_numpy(src), how)
    found = flax_transformer.generate(model, src, how)
    oracle = transformers_generate(theirs.to(getattr(torch, dtype)), config, src, how)
    return Row(
        name,
        dtype,
        beam_size,
        compare_decoded(found, expected, how, ROUNDING[dtype]),
        compare_decoded(oracle, expected, how, ROUNDING["float32"]),
        expected.lengths[:, 0],
    )


# name -> the rule broken in the PyTorch search
WRONG_RULES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": lambda: patch.dict(LENGTH_PENALTIES),
    "an end of any rank finishes": lambda: patch.object(beam, "may_finish", lambda rank, beam_size: rank >= 0),
    "done with K finished": lambda: patch.object(beam, "settled", lambda worst, best: worst > -torch.inf),
    "never done": lambda: patch.object(beam, "settled", lambda worst, best: worst > torch.inf),
    "the start counts": lambda: patch.dict(LENGTH_PENALTIES, power=lambda n, a: (n + 1) ** a),
    "the end does not count": lambda: patch.dict(LENGTH_PENALTIES, power=lambda n, a: np.maximum(n - 1, 1) ** a),
}


def wrongly_decoded(theirs: Any, checkpoint: Checkpoint, rule: str) -> int:
    """Of 200 sentences, beam 4, those that differ from `transformers` by more than rounding explains."""
    src, config = sentences(checkpoint.config.pad_id), DecodingConfig(beam_size=4, n_best=4, max_length=LONGEST)
    oracle = transformers_generate(theirs.float(), checkpoint.config, src, config)
    with WRONG_RULES[rule]():
        found = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), config)
    return len(compare_decoded(oracle, found, config, ROUNDING["float32"]).different)
