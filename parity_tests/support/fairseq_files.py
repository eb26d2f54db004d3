"""Checkpoints as fairseq writes them, made of models of `transformers`, which are their oracles."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers

from parity_tests.support.conversion import Row, compare, through_frameworks
from twinax import convert
from twinax.convert.layouts import fairseq
from twinax.parity.functions import random_batch
from twinax.parity.ladder import run_twins
from twinax.parity.oracles.transformers import Oracle, oracle_of, randomize

_SIZES = {
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 19,
    "max_position_embeddings": 13,
}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_FAIRSEQ = {  # setting of transformers -> setting of fairseq
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "encoder_attention_heads": "encoder_attention_heads",
    "decoder_attention_heads": "decoder_attention_heads",
    "encoder_ffn_dim": "encoder_ffn_embed_dim",
    "decoder_ffn_dim": "decoder_ffn_embed_dim",
    "d_model": "encoder_embed_dim",
    "activation_function": "activation_fn",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
}
_PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
_LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True}
_SHARED = {"share_all_embeddings": True}
# name -> (class of transformers, its settings, further settings of fairseq)
FAIRSEQ: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fairseq, post-norm": ("FSMT", {"src_vocab_size": 31, "tgt_vocab_size": 29}, {}),
    "fairseq, pre-norm, shared": ("M2M100", {"activation_function": "gelu"}, _PRE_NORM | _SHARED),
    "fairseq, learned positions": ("MBart", {"activation_function": "relu"}, _PRE_NORM | _LEARNED | _SHARED),
}


def fairseq_model(name: str) -> Any:
    """The model of `transformers` of a variant, with random weights."""
    family, settings, _ = FAIRSEQ[name]
    sizes = {"vocab_size": 31} if "src_vocab_size" not in settings else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **_SIZES, **_IDS, **settings)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    tables = {n: p.detach().clone() for n, p in model.named_parameters() if "embed_positions" in n}
    randomize(model)
    for table, initial in tables.items():
        parameter = model.get_parameter(table)
        if family == "FSMT":  # its fixed table is a parameter
            parameter.data = initial
        parameter.data[_IDS["pad_token_id"]] = 0  # fairseq never trains the row of padding
    if (bias := getattr(model, "final_logits_bias", None)) is not None:
        bias.zero_()
    return model


def fairseq_args(name: str) -> Namespace:
    """The `args` of a variant, with the settings of training and task that real ones have."""
    family, settings, further = FAIRSEQ[name]
    config = getattr(transformers, f"{family}Config")(**_SIZES, **settings)
    args = {setting: getattr(config, name) for name, setting in _FAIRSEQ.items()}
    args |= {"max_source_positions": 13, "max_target_positions": 13, "encoder_embed_path": None, "no_cuda": False}
    args |= {"no_scale_embedding": not config.scale_embedding, "adaptive_softmax_cutoff": None, "lr": [0.0005]}
    args |= {"arch": "transformer_wmt_en_de", "task": "translation", "source_lang": "de", "target_lang": "en"}
    args |= {"decoder_embed_dim": 12, "decoder_output_dim": 12, "decoder_input_dim": 12, "seed": 1, "clip_norm": 0.0}
    return Namespace(**args, **further)


def fairseq_state(model: Any, learned: bool = False) -> dict[str, torch.Tensor]:
    """The state dict of the same model in fairseq."""
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    state["decoder.output_projection.weight"] = state.pop(
        "lm_head.weight", state.get("decoder.output_projection.weight")
    )
    dropped = {"shared.weight", "final_logits_bias"}
    state = {name: t for name, t in state.items() if name not in dropped and (learned or "embed_positions" not in name)}
    for side in ("encoder", "decoder"):
        state[f"{side}.version"] = torch.tensor([3.0])
        state |= {} if learned else {f"{side}.embed_positions._float_tensor": torch.zeros(1)}
    return state


def fairseq_content(args: Any, state: dict[str, torch.Tensor], cfg: Any = None) -> dict[str, Any]:
    """The content of a checkpoint, as `checkpoint_utils.save_state` arranges it."""
    history = {"criterion_name": "LabelSmoothedCrossEntropyCriterion", "optimizer_name": "FairseqAdam"}
    history |= {"lr_scheduler_state": {"best": 4.5}, "num_updates": 100}
    extra = {"train_iterator": {"epoch": 3, "iterations_in_epoch": 0, "shuffle": True}, "val_loss": 4.5}
    moments = {0: {"step": 100, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}}
    return {
        "cfg": cfg,
        "args": args,
        "model": state,
        "optimizer_history": [history],
        "extra_state": extra,
        "last_optimizer_state": {"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }


def write_dictionaries(folder: Path, sizes: tuple[int, int]) -> None:
    """Dictionaries `dict.de.txt` and `dict.en.txt`; equal ones for equal sizes."""
    for language, size in zip(("de", "en"), sizes, strict=True):
        lines = [f"w{i}{'@@' if i % 3 == 0 else ''} {1000 - i}" for i in range(size - 6)]
        text = "\n".join([*lines, "madeupword0000 0", "madeupword0001 0"]) + "\n"
        (folder / f"dict.{language}.txt").write_text(text, encoding="utf-8")


def save_fairseq(name: str, folder: Path) -> Any:
    """Writes a variant's checkpoint and dictionaries into a folder, as fairseq does; returns the model."""
    model = fairseq_model(name)
    state = fairseq_state(model, learned="encoder_learned_pos" in FAIRSEQ[name][2])
    folder.mkdir(exist_ok=True)
    torch.save(fairseq_content(fairseq_args(name), state), folder / "model.pt")
    sizes = (len(state["encoder.embed_tokens.weight"]), len(state["decoder.embed_tokens.weight"]))
    write_dictionaries(folder, sizes)
    return model


class _MaskedTargets:
    """A model of `transformers` whose decoder masks padding, as fairseq's does."""

    def __init__(self, model: Any, pad_id: int):
        self.model, self.pad_id = model, pad_id

    def __call__(self, **inputs: Any) -> Any:
        keep = inputs["decoder_input_ids"] != self.pad_id
        # FSMT's mask goes through float32, which overflows for a float64 model
        module = "transformers.models.fsmt.modeling_fsmt"
        with patch(f"{module}.fill_with_neg_inf", lambda t: torch.full_like(t, torch.finfo(t.dtype).min)):
            return self.model(**inputs, decoder_attention_mask=keep.long())

    def named_parameters(self, **arguments: Any) -> Any:
        return self.model.named_parameters(**arguments)

    def set_attn_implementation(self, name: str) -> None:
        if type(self.model).__name__.startswith("FSMT"):
            return  # has one attention, which returns its weights
        self.model.set_attn_implementation(name)


def fairseq_oracle(model: Any, checkpoint: convert.Checkpoint) -> Oracle:
    """The model as an oracle in float64; its parameters have fairseq's names after `model.`."""
    rules = [replace(rule, target=(f"model.{rule.target[0]}",)) for rule in fairseq.rules_of(checkpoint.config)]
    return oracle_of(_MaskedTargets(model.double(), checkpoint.config.pad_id), checkpoint, rules)


def measure_fairseq(name: str, folder: Path, run: Any = run_twins) -> Row:
    """The row of a variant; its files are written into a folder. `run`: as for `compare`."""
    model = save_fairseq(name, folder / "original")
    checkpoint = convert.load(folder / "original")
    differences = []
    for framework, converted in through_frameworks(checkpoint).items():
        convert.save(converted, folder / framework, layout="fairseq")
        changes = fairseq_changes(folder / "original", folder / framework)
        differences += [f"through {framework}: {change}" for change in changes]
    config = checkpoint.config
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    batch.src_tokens[0, 3] = batch.tgt_tokens[0, 2] = config.pad_id  # but no sentence of padding, which FSMT attends to
    if config.positions == "learned":  # mBART counts padding, so there is none
        for tokens in (batch.src_tokens, batch.tgt_tokens):
            tokens[tokens == config.pad_id] = 5
    return compare(name, checkpoint, fairseq_oracle(model, checkpoint), differences, batch, run=run)


def fairseq_changes(before: Path, after: Path) -> list[str]:
    """Differences between two directories of one model: settings, arrays and dictionaries."""
    old, new = (torch.load(folder / "model.pt", weights_only=False) for folder in (before, after))
    tensors, new_tensors = old["model"], new["model"]
    differences = sorted(tensors.keys() ^ new_tensors.keys())
    common = tensors.keys() & new_tensors.keys()
    differences += [n for n in common if not torch.equal(tensors[n], new_tensors[n])]
    settings = {name: value for name, value in vars(old["args"]).items() if value is not None}
    new_settings = vars(new["args"])
    differences += [f"args.{n}" for n, value in settings.items() if n not in new_settings or new_settings[n] != value]
    names = {path.name for path in (*before.glob("dict.*"), *after.glob("dict.*"))}
    both = [(before / n, after / n) for n in names]
    return differences + [a.name for a, b in both if not b.exists() or a.read_bytes() != b.read_bytes()]
