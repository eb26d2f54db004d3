"""Compares the twins' decoding token by token with the published decoders, each in its own code."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from twinax import flax_transformer, torch_reference
from twinax.backend.errors import ConfigError
from twinax.configs.decoding import DecodingConfig
from twinax.configs.schema import TransformerConfig
from twinax.formulas.decoding import Decoded
from twinax.parity.oracles.published import PAD, SIZE, checkpoint_of, random_model
from twinax.parity.search.decoding import ROUNDING
from twinax.published.registry import ORACLES, RECIPES, as_decoded

BOS, EOS, LONGEST, SENTENCES = 2, 3, 8, 40


@dataclass(frozen=True)
class DecodingComparison:
    """Results of the published decoding and of both twins on the same sentences."""

    published: str  # "none", "ran", or the message that it raised
    rejected: bool  # whether the twins reject the model
    equal: int = 0  # sentences with equal tokens in both twins, and in the published decoding if it ran
    ties: int = 0  # those that differ by no more than rounding explains
    lengths: tuple[int, ...] = ()  # of PyTorch's translations, EOS included

    @property
    def ok(self) -> bool:
        """Whether everything is equal, or the twins reject a model for which the published decoding raises."""
        return self.published not in ("none", "ran") if self.rejected else self.equal + self.ties == len(self.lengths)


def search(name: str, as_published: bool, sentences: int = SENTENCES) -> DecodingComparison:
    """Decode with the system's module, if it has a decoder, and with both twins. Needs `jax_enable_x64`."""
    model = _model(name, as_published)
    checkpoint = checkpoint_of(name, model, as_published, LONGEST)
    config = checkpoint.config.replace(bos_id=BOS, eos_id=EOS, decoder_start_id=BOS)
    config, decoding = _published_settings(name, config, as_published)
    src = _sources(sentences, fixed=not ORACLES[name].lengths_are_free(as_published))
    published = "none"
    published_tokens = []
    if (decode := ORACLES[name].decode) is not None:
        assert decoding.max_length is not None
        try:
            published_tokens = [
                _cut(decode(model, torch.from_numpy(row[row != PAD])[None], PAD, BOS, EOS, decoding.max_length))
                for row in src
            ]
            published = "ran"
        except RuntimeError as error:
            published = str(error).splitlines()[0]
    twin = replace(checkpoint, config=config)
    flax_result = _decode_or_none(lambda: flax_transformer.generate(twin.to_flax(), src, decoding))
    torch_result = _decode_or_none(
        lambda: torch_reference.generate(twin.to_torch().eval(), torch.from_numpy(src), decoding)
    )
    if flax_result is None and torch_result is None:
        return DecodingComparison(published, rejected=True)
    assert flax_result is not None
    assert torch_result is not None
    assert torch_result.margins is not None
    tokens = [[row[0] for row in side.sentences()] for side in (flax_result, torch_result)] + (
        [published_tokens] if published_tokens else []
    )
    same = [all(other == row[0] for other in row) for row in zip(*tokens, strict=True)]
    ties = int((~np.array(same) & (torch_result.margins <= ROUNDING["float64"])).sum())
    return DecodingComparison(published, False, sum(same), ties, tuple(torch_result.lengths[:, 0].tolist()))


def _decode_or_none(search: Callable[[], Decoded]) -> Decoded | None:
    """The result of a search; None if it rejects the model."""
    try:
        return search()
    except ConfigError:
        return None


def _published_settings(
    name: str, config: TransformerConfig, as_published: bool
) -> tuple[TransformerConfig, DecodingConfig]:
    """The config and decoding config of the published decoding; a beam search if none was published."""
    if RECIPES[name].decoding is None:
        return config, DecodingConfig(beam_size=5, max_length=LONGEST)
    config, decoding = as_decoded(name, config, as_published=as_published)
    assert decoding.max_length is not None
    return config, replace(decoding, max_length=min(decoding.max_length, LONGEST))


def _model(name: str, as_published: bool) -> nn.Module:
    """A random model with translations of many lengths: EOS is the most likely token at about half of all positions."""
    model = random_model(name, as_published, length=LONGEST, layers=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                parameter.add_(ORACLES[name].spread * torch.randn_like(parameter))
        src, tgt = torch.randint(4, SIZE, (2, SENTENCES, LONGEST))
        logits = ORACLES[name].call(model, src, tgt, PAD)
        margin = (logits.amax(-1) - logits[..., EOS]).quantile(0.5)
        ORACLES[name].raise_logit(model, EOS, margin)
    return model


def _sources(sentences: int, fixed: bool) -> np.ndarray:
    """Sentences of 3 to LONGEST tokens, or all of LONGEST, padded."""
    rng = np.random.default_rng(0)
    src = rng.integers(4, SIZE, (sentences, LONGEST))
    lengths = np.full((sentences, 1), LONGEST) if fixed else rng.integers(3, LONGEST + 1, (sentences, 1))
    return np.where(np.arange(LONGEST) < lengths, src, PAD)


def _cut(tokens: list[int]) -> list[int]:
    """The tokens before the first EOS."""
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens
