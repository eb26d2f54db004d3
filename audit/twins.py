"""Audits of twinax models: the PyTorch twin, the Flax twin's cache, and settings that are known mistakes."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn

from .. import convert, flax_transformer, torch_reference
from ..backend.errors import ConfigError
from ..configs.decoding import DecodingConfig
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..convert.formats.file_layouts import PUBLISHED
from ..formulas.decoding import plan, without_cache
from ..parity.functions import random_arrays
from ..published.registry import RECIPES
from .audit_report import Answer, Mistake
from .subject import Forward

_LONGEST = 8  # maximum number of tokens of a translation
_ROUNDING = 1e-9  # nats


def twin(config: TransformerConfig, arrays: Mapping[str, Any] | None, seed: int) -> tuple[nn.Module, Forward]:
    """(PyTorch model in float64, function that calls it, with dropout in training)."""
    config64 = config.replace(param_dtype="float64", compute_dtype="float64")
    if arrays is None:
        arrays = random_arrays(config64, seed)
    arrays = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    module = torch_reference.Transformer.from_state_dict(config64, convert.to_state_dict(arrays, config64))

    def forward(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        key = torch_reference.DropoutKey(seed, 0, torch.arange(len(src))) if module.training else None
        return module(src, tgt, dropout_key=key)

    return module, forward


def cache_answer(config: TransformerConfig, module: nn.Module, seed: int) -> Answer:
    """Compare translations of the Flax twin with its cache to those of the PyTorch twin without one."""
    if (reason := without_cache(config)) is not None:
        return Answer(None, f"no cache: {reason}")
    return _compare(config, module, seed)


def _compare(config: TransformerConfig, module: nn.Module, seed: int) -> Answer:
    rng, length = np.random.default_rng(seed), min(_LONGEST, config.max_length)
    if config.decoder_start_id is None:
        return Answer(None, "the config has no decoder start token")
    try:
        plan(config, DecodingConfig(beam_size=2, max_length=length))
    except ConfigError as error:
        return Answer(None, f"not decoded: {error}")
    src = rng.integers(0, config.src_vocab_size, (2, length))
    src[src == config.pad_id] = (config.pad_id + 1) % config.src_vocab_size
    model: Any = module.eval()
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        cached = flax_transformer.generate(
            convert.to_flax(model), src, DecodingConfig(beam_size=2, max_length=length, cache=True)
        )
    # In PyTorch, because the Flax twin would compile a second search.
    whole = torch_reference.generate(
        model, torch.from_numpy(src), DecodingConfig(beam_size=2, max_length=length, cache=False)
    )
    tokens, scores = np.asarray(whole.tokens), np.asarray(whole.scores)
    same = cached.tokens.shape == tokens.shape and bool((cached.tokens == tokens).all())
    error = float(np.abs(cached.scores - scores).max())
    return Answer(
        same and error <= _ROUNDING,
        f"the same tokens; scores differ by {error:.1e} nats" if same else "the tokens differ",
        "",
        "Decoding computes another function than training.",
    )


def known_mistakes(config: TransformerConfig, training: TrainingConfig | None) -> tuple[Mistake, ...]:
    """The mistakes of a published system that a model's settings repeat; empty for models of no such system."""
    system = next((name for name, layout in PUBLISHED.items() if layout.variant(name, config) is not None), None)
    if system is None:
        return ()
    recipe = RECIPES[system]
    mistakes = []
    for settings, published, repairs in (
        (config, recipe.model, recipe.repairs),
        (training, recipe.training, recipe.training_repairs),
    ):
        for name in recipe.breaks.keys() & repairs.keys() if settings is not None else ():
            if (value := getattr(settings, name)) == getattr(published, name):
                mistakes.append(Mistake(f"{name}={value!r}", f"{name}={repairs[name]!r}", recipe.breaks[name]))
    return tuple(sorted(mistakes, key=lambda mistake: mistake.setting))
