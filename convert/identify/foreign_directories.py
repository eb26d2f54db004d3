"""Directories of other projects that twinax cannot read, recognized by the names in them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...backend.errors import ConversionError
from ...configs.printing import escape
from ..checkpoint import CONFIG
from ..weight_files.reading import FORMS, read_json, weight_files
from .foreign_files import unsupported_file, unsupported_weights
from .unreadable import COMPARE, NOT_READABLE, READABLE, Unsupported, printable

# Weights that a Hugging Face directory can have, one of which twinax reads
_WEIGHTS = (*FORMS, *(f"{form}.index.json" for form in FORMS))
_SHARD = r"^(model|pytorch_model|flax_model)-\d{5}-of-\d{5}\.(safetensors|bin|msgpack)$"
# Weights under another name, unlike the files that `transformers`' Trainer writes beside them
_OTHER_WEIGHTS = r"^(?!training_args|optimizer|scheduler|scaler|rng_state).*\.(ckpt|pt|pth|bin|safetensors)$"
_ENTRIES = 1000  # of a directory that are read
_SHOWN = 5
_PROMPTS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")  # not part of the weights
_TOKENIZERS = ("tokenizer.json", "spiece.model", "sentencepiece.bpe.model", "source.spm", "tokenizer_config.json")
_SHARDED = "its weights are sharded by process"

# (patterns of names, all of which a directory has; obstacle); the name of a subdirectory ends in a slash
_LAYOUTS = (
    (
        (r"^model_index\.json$",),
        Unsupported("a diffusers pipeline", "it generates images or sound, from several models", NOT_READABLE),
    ),
    (
        (r"^saved_model\.pb(txt)?$",),
        Unsupported("a TensorFlow SavedModel", "it is a computation graph", "pass its checkpoint"),
    ),
    (
        (r"\.distcp$",),
        Unsupported(
            "a checkpoint of torch.distributed (FSDP, DCP)",
            _SHARDED,
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR model.pt",
        ),
    ),
    (
        (r"^(zero_to_fp32\.py|(mp_rank|zero_pp_rank)_.*_(model|optim)_states\.pt|global_step\d+/)$",),
        Unsupported(
            "a DeepSpeed checkpoint",
            _SHARDED,
            "python zero_to_fp32.py . NEW, in its directory; then copy config.json to NEW",
        ),
    ),
    (
        (r"^(latest_checkpointed_iteration\.txt|mp_rank_\d+(_\d+)?/)$",),
        Unsupported(
            "a Megatron-LM checkpoint",
            _SHARDED,
            "convert it to a Hugging Face directory with Megatron's tools/checkpoint",
        ),
    ),
    (
        (r"^(model_config\.yaml)$", r"^model_weights(\.ckpt|/)$"),
        Unsupported("an unpacked NeMo model", "its layout is not supported", COMPARE),
    ),
    (
        (r"^params\.(best|\d+)$", r"^vocab\.(src|trg)\..*json$"),
        Unsupported("a Sockeye model", "its layout is not supported", COMPARE),
    ),
    (
        (r"^checkpoint$", r"^(target|state)\."),
        Unsupported(
            "a T5X checkpoint",
            "its arrays are in T5X's names, without a config",
            "convert it with convert_t5x_checkpoint_to_pytorch.py of transformers",
        ),
    ),
    (
        (r"^(_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|_sharding)$",),
        Unsupported(
            "an orbax checkpoint of another project",
            "it has no twinax config (run/config.json)",
            "restore it there and convert its arrays with `twinax compare --write-rules` (docs/compare.md)",
        ),
    ),
    (
        (r"^checkpoint_\d+$",),
        Unsupported("checkpoints of flax.training", "they have no config", COMPARE),
    ),
    (
        (r"^(dataset_dict|dataset_info|state)\.json$", r"^(dataset_info\.json|train/|.*\.arrow)$"),
        Unsupported("a dataset", "it has no weights", "pass it to `twinax train --dataset`, and a checkpoint here"),
    ),
    (
        (r"^openvino_.*\.(xml|bin)$",),
        Unsupported("an OpenVINO model", "it is a computation graph", "pass the checkpoint from which it was made"),
    ),
)
# Files of weights that twinax does not read; their own obstacle is that of the directory.
_FOREIGN_WEIGHTS = (
    *(r"\.gguf$", r"\.onnx$", r"^tf_model\.h5$", r"^model\.bin$", r"\.incomplete$"),
    *(r"\.data-\d{5}-of-\d{5}$", r"\.index$", r"^checkpoint$", r"\.nemo$", r"\.(tar|zip)(\.\w+)?$"),
)


def unsupported_directory(path: Path) -> Unsupported | None:
    """The obstacle in a directory that no format recognizes, None if it is unknown."""
    names = _names(path)
    if not names:
        return Unsupported("an empty directory", "it has no config.json", READABLE)
    for recognize in _RECOGNIZERS:
        if unsupported := recognize(path, names):
            return unsupported
    return None


def unsupported_hugging_face(path: Path) -> Unsupported | None:
    """The obstacle in a directory with a config.json of a supported family, None if its weights may be readable."""
    names = _names(path)
    if not {*_WEIGHTS} & {*names}:
        unsupported = unsupported_project(path)
        file = next((name for name in names if re.search(_OTHER_WEIGHTS, name)), None)
        reason = f"{printable(path.name)} has no weights; looked for {', '.join(FORMS)} and shards of them"
        download = "download them too: `hf download NAME --local-dir DIR`"
        if file is not None and unsupported is None:
            command = f"twinax convert {escape(str(path / file))} NEW --layout FAMILY --config {escape(str(path))}"
            return Unsupported("a config.json beside a file of weights", reason, f"name the file: `{command}`")
        return unsupported or Unsupported("a config.json without weights", reason, download)
    # as in `transformers`, weights in other forms, and shards of an earlier save, are not read
    found = ((file.name, unsupported_weights(file)) for file in weight_files(path))
    name, unsupported = next((pair for pair in found if pair[1]), ("", None))
    kind = f"a directory whose {name} is {unsupported.what if unsupported else ''}"
    return unsupported and Unsupported(kind, unsupported.why, unsupported.hint)


def unsupported_project(path: Path) -> Unsupported | None:
    """The obstacle in a directory that another project wrote, with or without a config.json."""
    names = _names(path)
    return _adapter(path, names) or _foreign_weights(path, names) or _layout(path, names)


def unidentified_directory(path: Path) -> Unsupported:
    """The obstacle of a directory that nothing recognizes."""
    names = _names(path)
    shown = ", ".join(map(printable, names[:_SHOWN])) + (", …" if names[_SHOWN:] else "")
    kind = "neither a run, nor a checkpoint, nor a Hugging Face directory"
    return Unsupported(kind, f"it has no {CONFIG}; its entries are {shown}", READABLE)


def _names(path: Path) -> list[str]:
    names = sorted(entry.name for entry, _ in zip(path.iterdir(), range(_ENTRIES), strict=False))
    return [name for name in names if name not in (".git", ".gitattributes", ".DS_Store", "README.md")] or names


def _adapter(path: Path, names: list[str]) -> Unsupported | None:
    if "adapter_config.json" not in names:
        return None
    settings = _settings(path / "adapter_config.json")
    kind = settings.get("peft_type")
    base = printable(settings.get("base_model_name_or_path") or "unknown")
    values = [f"{name}={printable(repr(settings[name]))}" for name in ("peft_type", "r") if name in settings]
    reason = f"its weights are changes to the base model {base} ({', '.join(values) or 'no settings'})"
    if kind in _PROMPTS:
        return Unsupported(f"a PEFT adapter ({kind})", f"prompts before the input of {base}", NOT_READABLE)
    if kind == "LORA":
        command = f"`twinax convert BASE NEW --layout FAMILY --adapter {escape(str(path))}`"
        advice = f"pass its base model and the adapter: {command}"
        return Unsupported("a LoRA adapter", reason, advice)
    name = f"PEFT adapter ({printable(kind)})"
    advice = (
        "merge it, `from peft import AutoPeftModelForSeq2SeqLM as Model; "
        f"model = Model.from_pretrained({escape(str(path))!r}).merge_and_unload(); "
        "model.save_pretrained('merged')`, and run `twinax inspect merged`"
    )
    return Unsupported(f"a {name}", reason, advice)


def _layout(path: Path, names: list[str]) -> Unsupported | None:
    names = [f"{name}/" if (path / name).is_dir() else name for name in names]
    matches = (all(any(re.search(p, name) for name in names) for p in patterns) for patterns, _ in _LAYOUTS)
    return next((unsupported for match, (_, unsupported) in zip(matches, _LAYOUTS, strict=True) if match), None)


def _foreign_weights(path: Path, names: list[str]) -> Unsupported | None:
    files = [n for pattern in _FOREIGN_WEIGHTS for n in names if re.search(pattern, n) and (path / n).is_file()]
    unsupported, name = next(((o, n) for n in files if (o := unsupported_file(path / n))), (None, ""))
    return unsupported and Unsupported(
        f"a directory with {unsupported.what}", f"{name}: {unsupported.why}", unsupported.hint
    )


def _weights_without_config(path: Path, names: list[str]) -> Unsupported | None:
    name = next((n for n in names if n in _WEIGHTS or re.search(_SHARD, n)), None)
    if name is None:
        return None
    reason = f"it has {name} and no {CONFIG}"
    return Unsupported("weights without a config.json", reason, f"copy the model's {CONFIG} into the directory")


def _single_file(path: Path, names: list[str]) -> Unsupported | None:
    files = [n for n in names if n.endswith((".pt", ".pth", ".ckpt", ".safetensors", ".npz", ".bin"))]
    if not files:
        return None
    advice = f"pass the file: `twinax inspect {escape(str(path / files[0]))}`"
    return Unsupported("a directory with files of weights", f"it has {len(files)} and no {CONFIG}", advice)


def _tokenizer(path: Path, names: list[str]) -> Unsupported | None:
    name = next((name for name in _TOKENIZERS if name in names), None)
    if name is None:
        return None
    advice = "`twinax convert MODEL NEW --tokenizer DIR` adds it to a model"
    return Unsupported("a tokenizer", f"it has {name} and no weights", advice)


def _settings(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ConversionError:
        return {}


_Recognizer = Callable[[Path, list[str]], Unsupported | None]
_RECOGNIZERS: tuple[_Recognizer, ...] = (
    *(_adapter, _layout, _foreign_weights, _weights_without_config, _single_file, _tokenizer),
)
