"""The published decoders, each as its own code has it: what the twins' searches are compared with, token for token."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from .. import flax_transformer, torch_reference
from ..configs.decoding import Decoded, DecodingConfig
from ..configs.published import as_decoded
from ..configs.schema import TransformerConfig
from ..configs.validation import ConfigError
from ..torch_reference.published import annotated_transformer, d2l_note, jadore801120, leftover
from .decoding import ROUNDING
from .published import PAD, SIZE, call, checkpoint_of, random_model

BOS, EOS, LONGEST, SENTENCES = 2, 3, 8, 40
_SPREAD = {"jadore801120": 0.0}  # all of a beam end only where tokens are not far apart
_HEADS = {
    "lucky_glass": "linear.bias",
    "leftover": "projection.proj.bias",
    "d2l_note": "decoder.f.bias",
    "annotated_transformer": "generator.proj.bias",
}


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
    src = _sources(sentences, fixed=name == "d2l_note" and as_published)
    published, theirs = "none", []
    if name != "lucky_glass":
        try:
            theirs = [_decode(model, torch.from_numpy(row[row != PAD])[None], how) for row in src]
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
    if name == "lucky_glass":
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
                parameter.add_(_SPREAD.get(name, 0.4) * torch.randn_like(parameter))
        src, tgt = torch.randint(4, SIZE, (2, SENTENCES, LONGEST))
        logits = call(model, src, tgt)
        more = (logits.amax(-1) - logits[..., EOS]).quantile(0.5)
        if isinstance(model, jadore801120.Transformer):  # its head has no bias, so the last norm's
            row = model.trg_word_prj.weight[EOS]
            last = model.decoder.layer_stack[-1].get_submodule("pos_ffn.layer_norm")
            last.get_parameter("bias").add_(more / model.logit_scale * row / row.square().sum())
        else:
            model.get_parameter(_HEADS[name])[EOS] += more
    return model


def _sources(sentences: int, fixed: bool) -> np.ndarray:
    """Sentences of 3 to LONGEST tokens, or all of that many, with padding after them."""
    rng = np.random.default_rng(0)
    src = rng.integers(4, SIZE, (sentences, LONGEST))
    lengths = np.full((sentences, 1), LONGEST) if fixed else rng.integers(3, LONGEST + 1, (sentences, 1))
    return np.where(np.arange(LONGEST) < lengths, src, PAD)


def _decode(model: nn.Module, src: Tensor, how: DecodingConfig) -> list[int]:
    """What the system's own decoding makes of one sentence; without the start, up to the end.

    leftover's limit is the length of its positions, and includes the start token. The limits of the others are chosen
    here: jadore801120's and annotated_transformer's include it too, d2l_note's does not.
    """
    assert how.max_length is not None
    longest = how.max_length + 1
    keep = torch.ones(1, 1, src.shape[1], dtype=torch.bool)
    if isinstance(model, jadore801120.Transformer):
        found = jadore801120.translate_sentence(model, src, BOS, EOS, max_seq_len=longest)[1:]
    elif isinstance(model, leftover.Transformer):
        positions = model.get_buffer("decoder.pos_embedding.pe").shape[1]
        found = leftover.greedy_decode(model, src, PAD, BOS, EOS, positions)[1:]
    elif isinstance(model, d2l_note.Transformer):
        found = d2l_note.predict(model, src, ~keep, BOS, EOS, how.max_length)
    else:
        assert isinstance(model, annotated_transformer.Transformer)
        found = annotated_transformer.greedy_decode(model, src, keep, longest, BOS)[0, 1:].tolist()
    return found[: found.index(EOS)] if EOS in found else found
