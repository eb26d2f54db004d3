"""Compares the families of `transformers` with the twins: values, gradients, attention weights and the round trip."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from safetensors.numpy import load_file

from twinax import convert
from twinax.convert.checkpoint import Checkpoint
from twinax.convert.formats.hugging_face import family
from twinax.convert.weight_files.reading import WEIGHTS
from twinax.parity.coverage import coverage
from twinax.parity.functions import Batch, Outputs, random_batch
from twinax.parity.harness import Criterion, Report
from twinax.parity.ladder import RUNGS, compare_with_oracle, run_twins
from twinax.parity.oracles.transformers import Oracle, load_oracle, randomize, with_causal_decoder

# One bound for all rungs, relative to each array's largest value.
CRITERIA = tuple(Criterion(rung, 1e-12, "array", "the same function; all families reach 1e-13") for rung in RUNGS)

_SIZES = {
    "vocab_size": 31,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 19,
    "max_position_embeddings": 13,
}
_T5_SIZES = {
    "vocab_size": 31,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 17,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 3,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 5,
    "n_positions": 13,
}
_MARIAN = {"pad_token_id": 28, "decoder_start_token_id": 28, "activation_function": "swish", "scale_embedding": True}
# name -> (layout, settings); every option of a family appears at least once
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Marian": ("marian", _MARIAN),
    "Marian, two vocabularies": (
        "marian",
        _MARIAN | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 29},
    ),
    "Marian, untied": ("marian", _MARIAN | {"tie_word_embeddings": False, "activation_function": "relu"}),
    "BART": ("bart", {}),
    "BART, untied, scaled": ("bart", {"tie_word_embeddings": False, "scale_embedding": True}),
    "mBART": ("mbart", {"scale_embedding": True, "activation_function": "gelu_new"}),
    "M2M100": ("m2m100", {}),
    "M2M100, odd width": (
        "m2m100",
        {"d_model": 15, "decoder_attention_heads": 5, "pad_token_id": 0, "bos_token_id": 1},
    ),
    "Pegasus": ("pegasus", {"scale_embedding": True, "activation_function": "relu"}),
    "Blenderbot": ("blenderbot", {"scale_embedding": True}),
    "T5": ("t5", _T5_SIZES),
    "T5 v1.1, Flan-T5": ("t5", _T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mT5": ("mt5", _T5_SIZES),
    "mT5, tied": ("mt5", _T5_SIZES | {"feed_forward_proj": "gated-silu"}),
    "UMT5": ("umt5", _T5_SIZES),
    "UMT5, tied": ("umt5", _T5_SIZES | {"feed_forward_proj": "relu"}),
}
UNTIED = ("T5 v1.1, Flan-T5", "mT5", "UMT5")  # their weights untie the output layer, which the settings always tie

# Layouts of models that attend to padding uniformly if a sentence has no source token, where the twins give 0.
UNIFORM = ("t5", "mt5", "umt5")


@dataclass(frozen=True)
class Row:
    """Worst float64 difference of either twin from `transformers`, and what the round trip changed."""

    name: str
    encoder: float
    logits: float
    gradients: float
    maps: float
    changes: tuple[str, ...]
    reports: tuple[Report, ...]

    @property
    def ok(self) -> bool:
        """Whether every array is within its bound and the round trip changed nothing."""
        return not self.changes and all(report.ok for report in self.reports)


def random_model(name: str, seed: int = 0) -> Any:
    """A model of `transformers` with random weights."""
    import transformers

    layout, settings = VARIANTS[name]
    architecture = getattr(transformers, family(layout).architecture)
    sizes = {} if "n_positions" in settings else _SIZES
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = with_causal_decoder(architecture(architecture.config_class(**{**sizes, **settings})).eval())
    if name in UNTIED:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    randomize(model, seed)
    return model


def measure(name: str, folder: Path) -> Row:
    """The row of a variant; its directories are written into a folder."""
    random_model(name).save_pretrained(folder / "original")
    checkpoint = convert.load(folder / "original")
    differences = []
    for framework, converted in through_frameworks(checkpoint).items():
        convert.save(converted, folder / framework, layout=VARIANTS[name][0])
        differences += [f"through {framework}: {change}" for change in changes(folder / "original", folder / framework)]
    return compare(name, checkpoint, load_oracle(folder / "original", checkpoint), differences)


def through_frameworks(checkpoint: Checkpoint) -> dict[str, Checkpoint]:
    """The checkpoint with the arrays of its Flax and of its PyTorch model, by framework."""
    models = {"flax": checkpoint.to_flax(), "pytorch": checkpoint.to_torch()}
    return {name: replace(checkpoint, arrays=Checkpoint.of(model).arrays) for name, model in models.items()}


def compare(
    name: str,
    checkpoint: Checkpoint,
    oracle: Oracle,
    differences: Sequence[str],
    batch: Batch | None = None,
    select: Callable[[Outputs], Outputs] = lambda outputs: outputs,
    run: Callable[..., dict[str, Outputs]] = run_twins,
) -> Row:
    """The row of a checkpoint, compared with its oracle on a batch: by default random, with padding of every kind.

    `select`: the part of the outputs to compare. `run`: the models to run, by default both twins.
    """
    config = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
    if batch is None:
        batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
        if checkpoint.layout not in UNIFORM:
            batch.src_tokens[2] = config.pad_id  # a sentence without a source token
        batch.src_tokens[0, 3] = batch.tgt_tokens[0, 2] = config.pad_id  # and one with padding inside
        coverage(batch, checkpoint.arrays, config.pad_id).check()
    expected = oracle(batch)
    with jax.enable_x64(True):
        outputs = run(config, {name: a.astype(np.float64) for name, a in checkpoint.arrays.items()}, batch)
    outputs = {framework: select(twin_outputs) for framework, twin_outputs in outputs.items()}
    reports = compare_with_oracle(
        outputs, select(expected), batch, config.pad_id, criteria=CRITERIA, reproduce=f"measure({name!r})"
    )
    compared_rungs = ("encoder", "logits", "gradients", "attention weights")
    errors = {
        rung: max(f.error for r in reports.values() for f in r.findings if f.rung == rung) for rung in compared_rungs
    }
    return Row(
        name,
        encoder=errors["encoder"],
        logits=errors["logits"],
        gradients=errors["gradients"],
        maps=errors["attention weights"],
        changes=tuple(differences),
        reports=tuple(reports.values()),
    )


def changes(before: Path, after: Path) -> list[str]:
    """Differences between two directories of one model: bytes of the weights, JSON files, loading and ties."""
    import transformers

    old, new = load_file(before / WEIGHTS), load_file(after / WEIGHTS)
    differences = sorted(old.keys() ^ new.keys())
    differences += [n for n in old.keys() & new.keys() if (old[n].shape, old[n].dtype) != (new[n].shape, new[n].dtype)]
    differences += [n for n in old.keys() & new.keys() if old[n].tobytes() != new[n].tobytes()]
    documents = ("config.json", "generation_config.json")
    differences += [n for n in documents if json.loads((before / n).read_text()) != json.loads((after / n).read_text())]
    architecture = getattr(transformers, json.loads((after / "config.json").read_text())["architectures"][0])
    models = [architecture.from_pretrained(folder, output_loading_info=True) for folder in (before, after)]
    differences += [f"{kind} of from_pretrained: {names}" for kind, names in models[1][1].items() if names]
    if _ties(models[0][0]) != _ties(models[1][0]):
        differences.append("ties")
    return differences


def _ties(model: Any) -> set[frozenset[str]]:
    by_memory: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_memory.setdefault(parameter.data_ptr(), []).append(name)
    return {frozenset(names) for names in by_memory.values()}
