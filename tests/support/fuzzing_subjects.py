"""Every kind of file that twinax reads: how a small valid one is written, and what reads it."""

import gzip
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from parity_tests.support import legacy_flax_files, text
from parity_tests.support.fairseq_files import save_fairseq
from twinax import convert
from twinax.compare.weight_map.rules import read_rules
from twinax.configs import TransformerConfig
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.convert.checkpoint import MOMENTS, Checkpoint, checksum
from twinax.convert.formats.registry import describe, describe_verification, load_config
from twinax.convert.port import flax_specs
from twinax.inference.translator import Translator
from twinax.train.checkpointing.checkpoints import folder_of, read_run
from twinax.train.checkpointing.run_directory import read_data
from twinax.train.text.corpus import read_pairs
from twinax.train.text.pretrained import load_for_model
from twinax.train.tracking.metrics import MetricsLog

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
MARIAN = Path(__file__).parents[2] / "parity_tests" / "support" / "marian"
_WORDS = [
    "ein",
    "kleiner",
    "Hund",
    "läuft",
    "über",
    "die",
    "grüne",
    "Wiese",
    "am",
    "Fluss",
    "und",
    "sieht",
    "das",
    "Haus",
]
SENTENCES = [" ".join(np.random.default_rng(i).permutation(_WORDS)[:6]) for i in range(60)]
_COLUMNS = {"src_column": "de", "tgt_column": "en"}


class Subject(NamedTuple):
    """A kind of file or directory."""

    name: str
    write: Callable[[Path], object]  # a valid one, into an empty folder
    read: Callable[[Path], object]  # as the commands do; returns what must not change
    is_native: bool = False  # a library below may end the process or leave threads, so that it is read in another one
    is_verified: bool = False  # checksums or CRC-32 guarantee what is read


def read_checkpoint(path: Path, *, with_tables: bool = True) -> str:
    """Reads everything that `convert`, `inspect` and `translate` read of a checkpoint; returns the arrays' checksum.

    Of a training, also that of Adam's moments. `with_tables`: and of position tables, which a family computes from
    settings that have no checksum.
    """
    checkpoint = convert.load(path)
    describe(path)
    describe_verification(path)
    if checkpoint.files:
        translator = Translator(checkpoint, str(path))
        translator.source_ids(SENTENCES[:2])
        _ = translator.generation
    training = checkpoint.training
    moments = (
        {} if training is None else {f"{key}.{n}": a for key in MOMENTS for n, a in getattr(training, key).items()}
    )
    arrays = {n: a for n, a in checkpoint.arrays.items() if with_tables or not n.endswith(".table")}
    return checksum(arrays | moments)


def _read_family(path: Path) -> str:
    return read_checkpoint(path, with_tables=False)


def _in(name: str, read: Callable[[Path], object] = read_checkpoint) -> Callable[[Path], object]:
    return lambda folder: read(folder / name)


# ---- checkpoints


def _stored(name: str, layout: str = "twinax", with_training: bool = False) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        checkpoint = _without_biases() if with_training else replace(convert.load(STORED), training=None)
        convert.save(checkpoint, folder / name, layout=layout)

    return write


def _without_biases() -> Checkpoint:
    """The stored checkpoint with half its arrays: orbax takes milliseconds for each."""
    checkpoint = convert.load(STORED)
    biases = ("norm_bias", "q_proj_bias", "k_proj_bias", "v_proj_bias", "out_proj_bias", "ffn_bias")
    config = checkpoint.config.replace(**dict.fromkeys(biases, False), output_bias="none")
    training, names = checkpoint.training, flax_specs(config).keys()
    assert training is not None
    moments = {key: {n: array for n, array in getattr(training, key).items() if n in names} for key in MOMENTS}
    training = replace(training, run=replace(training.run, model=config), **moments)
    arrays = {name: checkpoint.arrays[name] for name in names}
    return replace(checkpoint, config=config, arrays=arrays, training=training)


def _bare(folder: Path) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in _twin().items()}
    torch.save(tensors, folder / "x.pt")


@cache
def _twin() -> dict[str, np.ndarray]:
    checkpoint = convert.load(STORED)
    return {name: tensor.numpy() for name, tensor in checkpoint.to_torch().state_dict().items()}


def _read_bare(path: Path) -> str:
    return checksum(convert.load(path, load_config(STORED)).arrays)


def _family(name: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # `transformers` warns about how it writes
            text.write_files(name, folder, (SENTENCES, SENTENCES), size=90)
            text.write_model(name, folder)

    return write


def _torch_weights(folder: Path) -> None:
    from safetensors.torch import load_file

    _family("BART")(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _as(layout: str, name: str, **options: Any) -> Callable[[Path], object]:
    """A Marian directory in another layout."""

    def write(folder: Path) -> None:
        _family("Marian")(folder / "marian")
        convert.save(convert.load(folder / "marian"), folder / name, layout=layout, **options)
        shutil.rmtree(folder / "marian")

    return write


def _legacy_flax(folder: Path) -> None:
    shutil.copytree(legacy_flax_files.FOLDER / "bart", folder, dirs_exist_ok=True)


def _adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSeq2SeqLM

    with warnings.catch_warnings(action="ignore"):
        _family("BART")(folder / "base")
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / "base")
        get_peft_model(model, LoraConfig(r=2)).save_pretrained(folder / "adapter")
    shutil.move(folder / "base", folder.parent / "base")


def _read_adapter(folder: Path) -> None:
    convert.load(folder.parent / "base", adapter=folder / "adapter")


# ---- runs


def _run(folder: Path) -> None:
    """What a run directory has beside its checkpoints."""
    (folder / "config.json").write_text((STORED / "run" / "config.json").read_text())
    shutil.copytree(STORED / "run" / "tokenizer", folder / "tokenizer")
    counts = {"kept": 70, "total": 70}
    (folder / "data.json").write_text(json.dumps({"shapes": [[5, 7, 8]], "ids": "a b", "counts": {"train": counts}}))
    records: list[dict[str, Any]] = [{"update": i, "loss": 5 / i, "tokens": 60, "epoch": 0} for i in range(1, 41)]
    records += [{"update": 40, "validation": {"loss": 1.5, "perplexity": 4.5, "bleu": 3.0}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for update in ("20", "40"):
        shutil.copytree(STORED / "run", folder / "checkpoints" / update / "run")
        (folder / "checkpoints" / update / "state").mkdir()
        (folder / "checkpoints" / update / "state" / "x").write_text("x")


def _read_run(folder: Path) -> None:
    """As when it resumes, up to the state."""
    read_run(folder)
    read_data(folder)
    MetricsLog(folder, 40, say=lambda line: None).close()
    read_run(folder_of(folder) / "run")


# ---- tokenizers and corpora


def _tokenizer(name: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        _family("T5")(folder / "t5")
        shutil.move(folder / "t5" / "spiece.model", folder / "spiece.model")
        tokens = ["<pad>", "</s>", "<unk>", "<s>", *_WORDS]
        shutil.rmtree(folder / "t5")
        (folder / "x.txt").write_text("\n".join(tokens) + "\n")
        words = ["</s>", "<unk>", *_WORDS]  # as Marian has them, without padding
        (folder / "x.yml").write_text("".join(f"{json.dumps(token)}: {i}\n" for i, token in enumerate(words)))
        (folder / "tokenizer.json").write_text((STORED / "run" / "tokenizer" / "tokenizer.json").read_text())
        for path in folder.iterdir():
            if path.name != name:
                path.unlink()

    return write


def _read_tokenizer(folder: Path) -> None:
    (path,) = folder.iterdir()
    ids: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "bos_id": 3}
    if path.suffix == ".yml":
        ids = {"pad_id": 499, "eos_id": 0, "bos_id": None, "decoder_start_id": 499}
    config = TransformerConfig(src_vocab_size=500, tgt_vocab_size=500, **ids)
    tokenizer = load_for_model(str(path), config, TokenizerConfig())
    tokenizer.decode(tokenizer.encode(SENTENCES[:2]))


def _corpus(name: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        rows = [{"de": sentence, "en": sentence.upper()} for sentence in SENTENCES]
        lines = {
            ".jsonl": [json.dumps(row) for row in rows],
            ".json": [json.dumps(rows)],
            ".tsv": ["\t".join(row) for row in [rows[0].keys(), *(row.values() for row in rows)]],
            ".csv": [",".join(row) for row in [rows[0].keys(), *(row.values() for row in rows)]],
            ".gz": ["\t".join(row) for row in [rows[0].keys(), *(row.values() for row in rows)]],
        }
        if name.endswith(".parquet"):
            import datasets

            datasets.Dataset.from_list(rows).to_parquet(str(folder / name))
        else:
            content = ("\n".join(lines[Path(name).suffix]) + "\n").encode()
            (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)

    return write


def _read_corpus(folder: Path) -> None:
    (path,) = (path for path in folder.iterdir() if path.is_file())
    list(read_pairs(CorpusConfig(dataset=str(path), **_COLUMNS)))


# ---- other files


def _rules(folder: Path) -> None:
    (folder / "rules.toml").write_text(
        '"a.kernel" = { source = "a.weight", layout = "w.T" }\n"b.scale" = { source = "b.weight", layout = "w" }\n'
    )


def _read_rules(folder: Path) -> None:
    sources = {"a.weight": (3, 4), "b.weight": (4,)}
    read_rules(folder / "rules.toml", sources, {"a.kernel": (4, 3), "b.scale": (4,)})


_CHECKPOINTS = (
    Subject("orbax, training", _stored("x", with_training=True), _in("x"), is_native=True, is_verified=True),
    Subject("orbax, weights", _stored("x"), _in("x"), is_native=True, is_verified=True),
    Subject("PyTorch, training", _stored("x.pt", with_training=True), _in("x.pt"), is_verified=True),
    Subject("PyTorch, torch_nn", _stored("x.pt", "torch_nn"), _in("x.pt"), is_verified=True),
    Subject("PyTorch, bare", _bare, _in("x.pt", _read_bare), is_verified=True),
    Subject(
        "safetensors, training", _stored("x.safetensors", with_training=True), _in("x.safetensors"), is_verified=True
    ),
    Subject("Marian", _family("Marian"), read_checkpoint, is_native=True),
    Subject("BART", _family("BART"), read_checkpoint),
    Subject("T5", _family("T5"), read_checkpoint, is_native=True),
    Subject("mBART", _family("mBART"), read_checkpoint, is_native=True),
    Subject("BART, PyTorch weights", _torch_weights, read_checkpoint, is_verified=True),
    Subject("BART, Flax weights", _legacy_flax, read_checkpoint),
    Subject(
        "Marian, shards",
        _as("marian", "x", max_shard_size=20_000),
        _in("x", _read_family),
        is_native=True,
        is_verified=True,
    ),
    Subject(
        "Marian, npz", lambda folder: shutil.copy(MARIAN / "model.npz", folder), _in("model.npz"), is_verified=True
    ),
    Subject("CTranslate2", _as("ctranslate2", "x"), _in("x"), is_native=True, is_verified=True),
    Subject("fairseq", lambda folder: save_fairseq("fairseq, post-norm", folder), read_checkpoint, is_verified=True),
    Subject("LoRA adapter", _adapter, _read_adapter),
)
_OTHERS = (
    Subject("run directory", _run, _read_run),
    Subject("SentencePiece model", _tokenizer("spiece.model"), _read_tokenizer, is_native=True),
    Subject("vocabulary", _tokenizer("x.txt"), _read_tokenizer),
    Subject("Marian vocabulary", _tokenizer("x.yml"), _read_tokenizer),
    Subject("tokenizer.json", _tokenizer("tokenizer.json"), _read_tokenizer),
    Subject("corpus, .jsonl", _corpus("x.jsonl"), _read_corpus),
    Subject("corpus, .json", _corpus("x.json"), _read_corpus),
    Subject("corpus, .tsv", _corpus("x.tsv"), _read_corpus),
    Subject("corpus, .tsv.gz", _corpus("x.tsv.gz"), _read_corpus),
    Subject("corpus, .csv", _corpus("x.csv"), _read_corpus, is_native=True),
    Subject("corpus, .parquet", _corpus("x.parquet"), _read_corpus, is_native=True),
    Subject("rules of weights", _rules, _read_rules),
)
SUBJECTS = {subject.name: subject for subject in (*_CHECKPOINTS, *_OTHERS)}
