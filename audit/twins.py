"""Our own models as an audit sees them: the PyTorch twin, the Flax twin's cache, and settings that are mistakes."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn

from .. import convert, flax_transformer, torch_reference
from ..configs.decoding import DecodingConfig
from ..configs.errors import ConfigError
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..convert.file_layouts import PUBLISHED
from ..formulas.decoding import plan, without_cache
from ..parity.functions import random_arrays
from ..published.registry import RECIPES
from .audit_report import Answer, Mistake
from .subject import Forward

_LONGEST = 8  # tokens of a translation
_ROUNDING = 1e-9  # nats


def twin(config: TransformerConfig, arrays: Mapping[str, Any] | None, seed: int) -> tuple[nn.Module, Forward]:
    """(the PyTorch model in float64, how it is called: with dropout in training)."""
    wide = config.replace(param_dtype="float64", compute_dtype="float64")
    given = random_arrays(wide, seed) if arrays is None else {n: np.asarray(a, np.float64) for n, a in arrays.items()}
    module = torch_reference.Transformer.from_state_dict(wide, convert.to_state_dict(given, wide))

    def forward(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        key = torch_reference.DropoutKey(seed, 0, torch.arange(len(src))) if module.training else None
        return module(src, tgt, dropout_key=key)

    return module, forward


def cache_answer(config: TransformerConfig, module: nn.Module, seed: int) -> Answer:
    """Translations of the Flax twin with its cache, and of the PyTorch twin without one."""
    if (why := without_cache(config)) is not None:
        return Answer(None, f"no cache: {why}")
    return _compared(config, module, seed)


def _compared(config: TransformerConfig, module: nn.Module, seed: int) -> Answer:
    rng, length = np.random.default_rng(seed), min(_LONGEST, config.max_length)
    if config.decoder_start_id is None:
        return Answer(None, "the config does not say with which token a target starts")
    try:
        plan(config, DecodingConfig(beam_size=2, max_length=length))
    except ConfigError as error:
        return Answer(None, f"not decoded: {error}")
    src = rng.integers(0, config.src_vocab_size, (2, length))
    src[src == config.pad_id] = (config.pad_id + 1) % config.src_vocab_size
    ours: Any = module.eval()
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        cached = flax_transformer.generate(
            convert.to_flax(ours), src, DecodingConfig(beam_size=2, max_length=length, cache=True)
        )
    # In PyTorch, where a second search has not to be compiled.
    whole = torch_reference.generate(
        ours, torch.from_numpy(src), DecodingConfig(beam_size=2, max_length=length, cache=False)
    )
    tokens, scores = np.asarray(whole.tokens), np.asarray(whole.scores)
    same = cached.tokens.shape == tokens.shape and bool((cached.tokens == tokens).all())
    apart = float(np.abs(cached.scores - scores).max())
    return Answer(
        same and apart <= _ROUNDING,
        f"the same tokens; scores are {apart:.1e} nats apart" if same else "other tokens are found",
        "",
        "What the model writes is not what it was trained to write.",
    )


def known_mistakes(config: TransformerConfig, training: TrainingConfig | None) -> tuple[Mistake, ...]:
    """The settings of a published system that are its mistakes, where a model is that system's as published."""
    system = next((name for name, theirs in PUBLISHED.items() if theirs.variant(name, config) is not None), None)
    if system is None:
        return ()
    recipe = RECIPES[system]
    found = []
    for ours, published, repairs in (
        (config, recipe.model, recipe.repairs),
        (training, recipe.training, recipe.training_repairs),
    ):
        for name in recipe.breaks.keys() & repairs.keys() if ours is not None else ():
            if (value := getattr(ours, name)) == getattr(published, name):
                found.append(Mistake(f"{name}={value!r}", f"{name}={repairs[name]!r}", recipe.breaks[name]))
    return tuple(sorted(found, key=lambda mistake: mistake.setting))
