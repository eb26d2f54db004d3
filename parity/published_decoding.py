"""The published decoders, each as its own code has it: what the twins' searches are compared with, token for token."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from .. import flax_transformer, torch_reference
from ..configs.decoding import DecodingConfig
from ..configs.errors import ConfigError
from ..configs.schema import TransformerConfig
from ..formulas.decoding import Decoded
from ..published.registry import ORACLES, RECIPES, as_decoded
from .decoding import ROUNDING
from .published import PAD, SIZE, checkpoint_of, random_model

BOS, EOS, LONGEST, SENTENCES = 2, 3, 8, 40


@dataclass(frozen=True)
class Searched:
    """What the published decoding and both twins found on the same sentences."""

    published: str  # "none", "ran", or what it raised
    refused: bool  # whether the twins refuse the model
    equal: int = 0  # sentences of which both twins have the same tokens, and the published ones where it ran
    ties: int = 0  # those that differ by no more than rounding explains
    lengths: tuple[int, ...] = ()  # of PyTorch's translations, ends counted

    @property
    def ok(self) -> bool:
        """All is equal; or the twins refuse what raises there."""
        return self.published not in ("none", "ran") if self.refused else self.equal + self.ties == len(self.lengths)


def search(name: str, as_published: bool, sentences: int = SENTENCES) -> Searched:
    """Decodes with the system's module, where it has a decoding, and with both twins. Needs `jax_enable_x64`."""
    model = _model(name, as_published)
    checkpoint = checkpoint_of(name, model, as_published, LONGEST)
    config = checkpoint.config.replace(bos_id=BOS, eos_id=EOS, decoder_start_id=BOS)
    config, how = _how(name, config, as_published)
    src = _sources(sentences, fixed=not ORACLES[name].lengths_are_free(as_published))
    published, theirs = "none", []
    if (decode := ORACLES[name].decode) is not None:
        assert how.max_length is not None
        try:
            theirs = [
                _cut(decode(model, torch.from_numpy(row[row != PAD])[None], PAD, BOS, EOS, how.max_length))
                for row in src
            ]
            published = "ran"
        except RuntimeError as error:
            published = str(error).splitlines()[0]
    twin = replace(checkpoint, config=config)
    found = _found(lambda: flax_transformer.generate(twin.to_flax(), src, how))
    reference = _found(lambda: torch_reference.generate(twin.to_torch().eval(), torch.from_numpy(src), how))
    if found is None and reference is None:
        return Searched(published, refused=True)
    assert found is not None
    assert reference is not None
    assert reference.margins is not None
    tokens = [[row[0] for row in side.sentences()] for side in (found, reference)] + ([theirs] if theirs else [])
    same = [all(other == row[0] for other in row) for row in zip(*tokens, strict=True)]
    ties = int((~np.array(same) & (reference.margins <= ROUNDING["float64"])).sum())
    return Searched(published, False, sum(same), ties, tuple(reference.lengths[:, 0].tolist()))


def _found(search: Callable[[], Decoded]) -> Decoded | None:
    """What a search gives; None where it refuses the model."""
    try:
        return search()
    except ConfigError:
        return None


def _how(name: str, config: TransformerConfig, as_published: bool) -> tuple[TransformerConfig, DecodingConfig]:
    """The model as it is decoded, and the search; ours where none was published."""
    if RECIPES[name].decoding is None:
        return config, DecodingConfig(beam_size=5, max_length=LONGEST)
    config, how = as_decoded(name, config, as_published=as_published)
    assert how.max_length is not None
    return config, replace(how, max_length=min(how.max_length, LONGEST))


def _model(name: str, as_published: bool) -> nn.Module:
    """Random weights that give translations of many lengths: the end is likeliest at about half of all places."""
    model = random_model(name, as_published, length=LONGEST).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                parameter.add_(ORACLES[name].spread * torch.randn_like(parameter))
        src, tgt = torch.randint(4, SIZE, (2, SENTENCES, LONGEST))
        logits = ORACLES[name].call(model, src, tgt, PAD)
        more = (logits.amax(-1) - logits[..., EOS]).quantile(0.5)
        ORACLES[name].raise_logit(model, EOS, more)
    return model


def _sources(sentences: int, fixed: bool) -> np.ndarray:
    """Sentences of 3 to LONGEST tokens, or all of that many, with padding after them."""
    rng = np.random.default_rng(0)
    src = rng.integers(4, SIZE, (sentences, LONGEST))
    lengths = np.full((sentences, 1), LONGEST) if fixed else rng.integers(3, LONGEST + 1, (sentences, 1))
    return np.where(np.arange(LONGEST) < lengths, src, PAD)


def _cut(tokens: list[int]) -> list[int]:
    """Up to the end."""
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens
