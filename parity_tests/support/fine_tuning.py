"""Training of the families: the twins' train step against `transformers`' model with `torch.optim`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.support.conversion import random_model
from twinax import convert
from twinax.configs.schema import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.model import Transformer
from twinax.parity.functions import random_batch
from twinax.parity.oracles.transformers import with_float64_norms
from twinax.train.step.step import Batch, init_state, make_train_step

UPDATES, RATE = 5, 1e-3
_WITHOUT_DROPOUT = dict.fromkeys(
    (
        *("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout", "final_dropout"),
        *("encoder_layerdrop", "decoder_layerdrop"),
    ),
    0.0,
)


def training_difference(name: str, folder: Path) -> float:
    """The largest difference of a parameter after five updates without dropout, in float64.

    One side is the jitted train step on the converted model, the other `transformers`' model with `torch.optim.Adam`.
    """
    model = with_float64_norms(random_model(name).double())
    model.save_pretrained(folder / "first")
    with jax.enable_x64(True):
        checkpoint = convert.load(folder / "first")
        config = checkpoint.config.replace(**_WITHOUT_DROPOUT, compute_dtype="float64")
        training = TrainingConfig(schedule="constant", learning_rate=RATE, warmup_updates=0)
        state = init_state(Transformer.from_arrays(config, _as_jax(checkpoint.arrays)), training)
        step = make_train_step(config, training)
        for number in range(UPDATES):
            state, _ = step(state, _batch(config, number))
        params = {name: np.asarray(array) for name, array in state.params.items()}
    _train(model, config, training)
    model.save_pretrained(folder / "last")
    expected = convert.load(folder / "last").arrays
    return max(float(np.abs(params[name] - expected[name]).max()) for name in params)


def _as_jax(arrays: Any) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def _batch(config: TransformerConfig, number: int) -> Batch:
    """Random sentences of different lengths; each update has others."""
    batch = random_batch(config, np.random.default_rng(number), 5, 7, 6)
    rows: Any = np.arange(5) + 5 * number
    arrays: Any = (batch.src_tokens, batch.tgt_tokens, batch.labels, rows)
    return Batch(*arrays)


def _train(model: Any, config: TransformerConfig, training: TrainingConfig) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(training.beta1, training.beta2), eps=training.eps)
    for number in range(UPDATES):
        src, tgt, labels = (torch.from_numpy(np.asarray(array)) for array in _batch(config, number)[:3])
        keep = (src != config.pad_id).long()
        logits = model(input_ids=src, attention_mask=keep, decoder_input_ids=tgt, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=config.pad_id)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
