"""Models as Marian writes them, made of models of `transformers`, which are their oracles.

`python -m parity_tests.support.marian_files FOLDER` writes the model that CTranslate2 scores.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml

from parity_tests.support.conversion import Row, compare, through_frameworks
from twinax import convert
from twinax.convert.formats.hugging_face import family
from twinax.convert.layouts.marian_npz import PAD_BIAS
from twinax.formulas.position_tables import sinusoidal_half_t2t
from twinax.parity.functions import Outputs, random_batch
from twinax.parity.ladder import run_twins
from twinax.parity.oracles.transformers import Oracle, oracle_of, randomize

SIZE = 31  # tokens of the vocabulary; padding has the next id
_SIZES = {
    "vocab_size": SIZE + 1,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 17,
    "max_position_embeddings": 13,
    "pad_token_id": SIZE,
    "decoder_start_token_id": SIZE,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "bos_token_id": None,
}
_PRE_NORM = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
_TIED = {"tied-embeddings-all": True, "tied-embeddings-src": True, "tied-embeddings": True}
_SWISH = {"activation_function": "swish", "scale_embedding": True}
_RELU = {"activation_function": "relu", "scale_embedding": True}
# name -> (layout, settings of transformers, options of Marian)
MARIAN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Marian .npz": ("marian", _SWISH, {"transformer-ffn-activation": "swish", **_TIED}),
    "Marian .npz, untied": (
        "marian",
        _RELU | {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
        {"transformer-ffn-activation": "relu"},
    ),
    "Marian .npz, pre-norm": ("pegasus", _RELU, {"transformer-ffn-activation": "relu", **_PRE_NORM, **_TIED}),
    "Marian .npz, trained positions": (
        "blenderbot",
        _SWISH | {"scale_embedding": False},
        {"transformer-train-position-embeddings": True, **_PRE_NORM, **_TIED},
    ),
}
_LAYER = {  # module of transformers -> (name in Marian, suffix of its linear maps)
    **{f"self_attn.{letter}_proj": ("self", letter) for letter in "qkv"},
    "self_attn.out_proj": ("self", "o"),
    **{f"encoder_attn.{letter}_proj": ("context", letter) for letter in "qkv"},
    "encoder_attn.out_proj": ("context", "o"),
    "fc1": ("ffn", "1"),
    "fc2": ("ffn", "2"),
}
_NORMS = {
    "self_attn_layer_norm": "self_Wo",
    "encoder_attn_layer_norm": "context_Wo",
    "final_layer_norm": "ffn_ffn",
}


def marian_model(name: str) -> Any:
    """The model of `transformers` of a variant, with random weights and what Marian has otherwise."""
    layout, settings, _ = MARIAN[name]
    architecture = getattr(transformers, family(layout).architecture)
    model = architecture(architecture.config_class(**_SIZES, **settings)).eval()
    randomize(model)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    positions = (model.model.encoder.embed_positions, model.model.decoder.embed_positions)
    learned = positions[0].weight.detach() if layout == "blenderbot" else None
    table = torch.from_numpy(sinusoidal_half_t2t(13, 12).astype(np.float32)) if learned is None else learned
    for module in positions:
        module.weight = torch.nn.Parameter(table.clone(), requires_grad=learned is not None)
    with torch.no_grad():
        for tensor in (model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight):
            tensor[SIZE] = 0
        model.lm_head.weight[SIZE] = 0
        model.final_logits_bias[0, SIZE] = PAD_BIAS
    return model


def marian_arrays(name: str, model: Any) -> dict[str, np.ndarray]:
    """The arrays of the same model in Marian: matrices (in, out), vectors (1, D), no padding."""
    options = MARIAN[name][2]
    pre = "_pre" if options.get("transformer-preprocess") == "n" else ""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    arrays: dict[str, np.ndarray] = {"decoder_ff_logit_out_b": state["final_logits_bias"][:, :SIZE]}
    for key, array in state.items():
        side, *parts = key.removeprefix("model.").split(".")
        module, leaf = ".".join(parts[2:-1]), parts[-1] if parts else ""
        if parts[:1] == ["layers"]:
            prefix = f"{side}_l{int(parts[1]) + 1}"
            if module in _LAYER:
                scope, suffix = _LAYER[module]
                arrays[f"{prefix}_{scope}_{'W' if leaf == 'weight' else 'b'}{suffix}"] = (
                    array.T if leaf == "weight" else array[None]
                )
            else:
                kind = "scale" if leaf == "weight" else "bias"
                arrays[f"{prefix}_{_NORMS[module]}_ln_{kind}{pre}"] = array[None]
        elif parts[:1] == ["layer_norm"]:
            arrays[f"{side}_top_ln_{'scale' if leaf == 'weight' else 'bias'}"] = array[None]
    if options.get("tied-embeddings-all"):
        arrays["Wemb"] = state["model.shared.weight"][:SIZE]
    else:
        arrays |= {f"{side}_Wemb": state[f"model.{side}.embed_tokens.weight"][:SIZE] for side in ("encoder", "decoder")}
        arrays["decoder_ff_logit_out_Wt"] = state["lm_head.weight"][:SIZE]
    if options.get("transformer-train-position-embeddings"):
        arrays["Wpos"] = state["model.encoder.embed_positions.weight"]
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def marian_options(name: str) -> dict[str, Any]:
    """The options of a variant, with those of other models that Marian stores too."""
    options = {"type": "transformer", "dim-vocabs": [SIZE, SIZE], "dim-emb": 12, "dim-rnn": 1024, "enc-type": "bi"}
    options |= {"enc-cell": "gru", "enc-depth": 2, "dec-cell": "gru", "dec-depth": 1, "skip": False, "ulr": False}
    options |= {"layer-normalization": False, "right-left": False, "input-types": [], "special-vocab": []}
    options |= dict.fromkeys(("tied-embeddings", "tied-embeddings-src", "tied-embeddings-all"), False)
    options |= {"transformer-heads": 3, "transformer-no-projection": False, "transformer-dim-ffn": 17}
    options |= {"transformer-ffn-depth": 2, "transformer-ffn-activation": "swish", "transformer-dim-aan": 2048}
    options |= {"transformer-aan-depth": 2, "transformer-aan-activation": "swish", "transformer-aan-nogate": False}
    options |= {"transformer-decoder-autoreg": "self-attention", "transformer-tied-layers": [], "lemma-dim-emb": 0}
    options |= {"transformer-guided-alignment-layer": "last", "transformer-preprocess": "", "ulr-dim-emb": 0}
    options |= {"transformer-postprocess-emb": "d", "transformer-postprocess": "dan", "transformer-postprocess-top": ""}
    options |= {"transformer-train-position-embeddings": False, "version": "v1.11.0 f00d062 2022-02-08 08:39:24 -0800"}
    return options | MARIAN[name][2]


def save_npz(path: Path, arrays: dict[str, np.ndarray], options: Any) -> None:
    """Writes an `.npz` as Marian does: the options are YAML that ends in a zero."""
    text = yaml.safe_dump(options).encode() + b"\0"
    np.savez(path, **arrays, **{"special:model.yml": np.frombuffer(text, np.int8)})


def save_marian(name: str, path: Path) -> Any:
    """Writes a variant; returns the model."""
    model = marian_model(name)
    save_npz(path, marian_arrays(name, model), marian_options(name))
    return model


def marian_oracle(name: str, model: Any, checkpoint: convert.Checkpoint) -> Oracle:
    """The model as an oracle in float64; `transformers` does not train its output bias."""
    rules = family(MARIAN[name][0]).rules(checkpoint.config)
    return oracle_of(model.double(), checkpoint, [rule for rule in rules if rule.source != ("output.bias",)])


def measure_marian(name: str, folder: Path, run: Any = run_twins) -> Row:
    """The row of a variant; its files are written into a folder. `run`: as for `compare`."""
    model = save_marian(name, folder / "original.npz")
    checkpoint = convert.load(folder / "original.npz")
    differences = []
    for framework, converted in through_frameworks(checkpoint).items():
        convert.save(converted, folder / f"{framework}.npz", layout="marian_npz")
        changes = npz_changes(folder / "original.npz", folder / f"{framework}.npz")
        differences += [f"through {framework}: {change}" for change in changes]
    config = checkpoint.config
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    batch.src_tokens[2] = batch.src_tokens[0, 3] = config.pad_id
    batch.tgt_tokens[:, 0] = config.decoder_start_id
    return compare(name, checkpoint, marian_oracle(name, model, checkpoint), differences, batch, _without_padding, run)


def _without_padding(outputs: Outputs) -> Outputs:
    """The outputs without the logits of padding, whose bias would set the tolerance."""
    return outputs | {"logits": outputs["logits"][..., :SIZE]}


def npz_changes(before: Path, after: Path) -> list[str]:
    """Differences between two files of one model."""
    old, new = (dict(np.load(path)) for path in (before, after))
    texts = [arrays.pop("special:model.yml").tobytes().rstrip(b"\0") for arrays in (old, new)]
    differences = sorted(old.keys() ^ new.keys())
    differences += [n for n in old.keys() & new.keys() if old[n].dtype != new[n].dtype or old[n].shape != new[n].shape]
    differences += [n for n in old.keys() & new.keys() if old[n].tobytes() != new[n].tobytes()]
    return differences + (["options"] if yaml.safe_load(texts[0]) != yaml.safe_load(texts[1]) else [])


def write_vocabulary(path: Path, size: int = SIZE) -> None:
    """A vocabulary as Marian's `marian-vocab` writes it."""
    words = ['</s>: 0\n<unk>: 1\n":": 2\n', *(f"w{i}{'@@' if i % 3 == 0 else ''}: {i}\n" for i in range(3, size))]
    path.write_text("".join(words), encoding="utf-8")


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    destination.mkdir(exist_ok=True)
    torch.manual_seed(0)
    save_marian("Marian .npz", destination / "model.npz")
    write_vocabulary(destination / "vocab.yml")
