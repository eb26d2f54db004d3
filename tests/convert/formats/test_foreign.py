"""What twinax cannot read: files and directories of other projects, in the layouts that those write."""

import json
import os
import struct
import tarfile
import warnings
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from twinax import convert
from twinax.convert.identify.foreign_directories import unsupported_hugging_face
from twinax.convert.identify.unreadable import UnreadableError


def gguf(*pairs):
    """The header of a GGUF file: magic, version, numbers of tensors and of pairs, and pairs of (key, type, value)."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, kind, value in pairs:
        content += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind)
        text = struct.pack("<Q", len(str(value))) + str(value).encode()
        content += text if kind == 8 else struct.pack("<I", value)
    return content


def marian_binary(*types):
    """marian-conv's binary format: version, number of tensors, their headers, their names."""
    names = [b"special:model.yml\0", *(f"W{i}\0".encode() for i in range(len(types) - 1))]
    headers = b"".join(struct.pack("<QQQQ", len(n), t, 1, 256) for n, t in zip(names, types, strict=True))
    return struct.pack("<QQ", 1, len(types)) + headers + b"".join(names) + bytes(512)


def small_safetensors(path, dtype=np.float32, name="encoder.weight"):
    safetensors.numpy.save_file({name: np.zeros((4, 4), dtype)}, path)


def truncated_safetensors(path):
    small_safetensors(path)
    path.write_bytes(path.read_bytes()[:-10])


def torch_script(path):
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), path)


def zip_file(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/weights", "a")


def tar(path):
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("model_config.yaml"))


def sentencepiece_model(path):
    (text := path.with_name("text")).write_text("a b c d\n" * 9)
    options = {"vocab_size": 9, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(path.with_suffix("")), **options)


def open_nmt(path):
    content = {"model": {"encoder.x": torch.ones(2)}, "generator": {"0.weight": torch.ones(2)}, "opt": {}, "vocab": {}}
    torch.save(content, path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 242043056\n"
TABLE_END = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"  # of a LevelDB table, as TensorFlow's .index files are
Q4 = gguf(("general.architecture", 8, "t5"), ("general.file_type", 4, 15))
F16 = gguf(("general.architecture", 8, "llama"), ("general.file_type", 4, 1))
TOKENIZER = '{"version": "1.0", "truncation": null, "added_tokens": [], "model": {}}'
CT2 = struct.pack("<IH", 6, 16) + b"TransformerSpec\0" + bytes(40)
ONNX = b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + bytes(20)

FILES = {  # case -> (name, content or function that writes it, what it is, obstacle, what to do)
    "GGUF": (
        "a.gguf",
        Q4,
        "GGUF file of llama.cpp (version 3, architecture t5)",
        "general.file_type=15 (Q4_K_M), quant",
        "original",
    ),
    "GGUF in float16": ("a.gguf", F16, "architecture llama", "general.file_type=1 (float16)", "original checkpoint"),
    "GGUF cut off": ("a.gguf", Q4[:30], "(version 3, architecture unknown)", "no general.file_type", "original"),
    "git-lfs": ("model.safetensors", LFS, "a git-lfs pointer", "242,043,056 bytes, is not", "`git lfs pull`"),
    "git-lfs .pt": ("model.pt", LFS, "a git-lfs pointer", "is not downloaded", "`git lfs pull`"),
    "incomplete": ("model.safetensors.incomplete", b"abc", "a partial download", "it ended early", "download it again"),
    "cut off": (
        "a.safetensors",
        truncated_safetensors,
        "not a complete safetensors",
        "it has 134 of 144 bytes",
        "download",
    ),
    "int8": (
        "a.safetensors",
        lambda p: small_safetensors(p, np.int8),
        "a quantized",
        "encoder.weight has dtype I8",
        "",
    ),
    "uint8": ("a.safetensors", lambda p: small_safetensors(p, np.uint8), "a quantized", "has dtype U8", "pass the"),
    "LoRA": (
        *("a.safetensors", lambda p: small_safetensors(p, name="q.lora_A.weight"), "a LoRA adapter"),
        *("no base model", "adapter_config.json"),
    ),
    "TorchScript": ("a.pt", torch_script, "a TorchScript model", "constants.pkl", "torch.jit.load(FILE).state_dict()"),
    "module": ("a.pt", lambda p: torch.save(nn.Linear(2, 2), p), "a pickled nn.Module", "Linear; none", "state_dict()"),
    "old module": (
        *("a.bin", lambda p: torch.save(nn.Linear(2, 2), p, _use_new_zipfile_serialization=False)),
        *("a pickled nn.Module", "a torch.nn.modules.linear.Linear; none of its code was run", "state_dict()"),
    ),
    "pickle": ("a.pkl", b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "pickled objects", "a posix.system; none", "save"),
    "OpenNMT-py": ("a.pt", open_nmt, "an OpenNMT-py checkpoint", "layout is not supported", "twinax cannot read it"),
    "HDF5": ("tf_model.h5", b"\x89HDF\r\n\x1a\n" + bytes(9), "an HDF5 file", "HDF5", "from_tf=True"),
    "TF index": ("model.ckpt-9.index", bytes(99) + TABLE_END, "TensorFlow checkpoint", ".index and .data", "from_tf"),
    "TF index by content": ("x", bytes(99) + TABLE_END, "a part of a TensorFlow checkpoint", ".index", "from_tf"),
    "TF data": ("model.ckpt-9.data-00000-of-00001", bytes(99), "TensorFlow checkpoint", ".data files", "from_tf"),
    "TF state": ("checkpoint", b'model_checkpoint_path: "m"\n', "TensorFlow checkpoints", "TensorFlow", "directory"),
    "SavedModel": ("saved_model.pb", b"\x08\x01\x12", "a TensorFlow SavedModel", "graph", "checkpoint"),
    "ONNX": ("a.onnx", ONNX, "an ONNX model", "by pytorch", "from which it was made"),
    "ONNX by content": ("x.bin", ONNX, "an ONNX model", "a computation graph, by pytorch", "from which it was made"),
    "CTranslate2": ("model.bin", CT2, "a CTranslate2 model", "TransformerSpec of binary version 6", "ct2-*-converter"),
    "marian-conv": ("m.bin", marian_binary(0x0101, 0x0404), "marian-conv", "Marian's binary format", "model.npz"),
    "marian-conv int8": (
        "m.bin",
        marian_binary(0x0101, 0x4101),
        "marian-conv",
        "quantized tensors, type 0x4101",
        "npz",
    ),
    "gzip": ("a.pt.gz", b"\x1f\x8b\x08" + bytes(20), "a gzip archive", "packed", "unpack it"),
    "tar": ("a.tar", tar, "a tar archive", "packed", "tar -xf a.tar"),
    "NeMo": ("a.nemo", tar, "a NeMo archive", "packed", "tar -xf a.nemo"),
    "zip": ("a.zip", zip_file, "a zip archive", "model/weights", "unpack it"),
    "tokenizer": ("tokenizer.json", TOKENIZER.encode(), "a tokenizer", "without a model", "--tokenizer tokenizer.json"),
    "SentencePiece": (
        "s.model",
        sentencepiece_model,
        "a SentencePiece model",
        "without a model",
        "--tokenizer s.model",
    ),
    "config.json": ("config.json", b'{"model_type": "t5"}', "config.json of a model", "no weights", "its directory"),
    "JSON lines": ("a.jsonl", b'{"de": "a"}\n{"de": "b"}\n', "a data file", "no weights", "`twinax train --dataset`"),
    "Parquet": ("a", b"PAR1" + bytes(9), "a data file", "no weights", "`twinax train --dataset`"),
    "NumPy": ("a.npy", lambda p: np.save(p, np.ones(2)), "one NumPy array", "not a model", "safetensors.numpy.save"),
    "msgpack": ("flax_model.msgpack", b"\x81\xa1a\x00", "Flax weights as msgpack", "no config", "config.json"),
    "text": ("x", b"ein Haus\n", "not a checkpoint", "a text file that starts with 'ein Haus'", "pass a run"),
    "text as .pt": ("a.pt", b"a b\nc\n", "not a checkpoint", "a text file that starts with 'a b'", "again"),
    "page": ("a.safetensors", b"\n<!DOCTYPE html>\n<html>", "not a checkpoint", "'<!DOCTYPE html>'", "the file itself"),
    "unknown": ("x", bytes([1, 2, 255]) * 9, "not a checkpoint", "its first bytes are 01 02 ff 01", "pass a run"),
    "empty": ("a.pt", b"", "an empty file", "0 bytes", "again"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_other_projects(case, tmp_path):
    name, content, *parts = FILES[case]
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    check_obstacle(path, parts)


def check_obstacle(path, parts):
    """The error of `load` is one line with these parts of what it is, of the obstacle, and of what to do."""
    with pytest.raises(UnreadableError) as error:
        convert.load(path)
    obstacle = error.value.unsupported
    assert str(error.value) == f"{path}: is {obstacle.what}: {obstacle.why}; {obstacle.hint}"
    assert "\n" not in str(error.value)
    for text, part in zip((obstacle.what, obstacle.why, obstacle.hint), parts, strict=True):
        assert part in text


def adapter(kind):
    config = {"peft_type": kind, "r": 8, "base_model_name_or_path": "google/flan-t5-base", "task_type": "SEQ_2_SEQ_LM"}
    return {"adapter_config.json": json.dumps(config), "adapter_model.safetensors": ""}


T5 = json.dumps({"model_type": "t5", "is_encoder_decoder": True})
INDEX = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
DIRECTORIES = {  # case -> (entries and their text, what it is, obstacle, what to do)
    "LoRA": (
        adapter("LORA"),
        "a LoRA adapter",
        "base model google/flan-t5-base (peft_type='LORA', r=8)",
        "`twinax convert BASE NEW --layout FAMILY --adapter ",
    ),
    "prompts": (adapter("PROMPT_TUNING"), "a PEFT adapter (PROMPT_TUNING)", "google/flan-t5-base", "twinax cannot"),
    "damaged adapter": ({"adapter_config.json": "{"}, "a PEFT adapter (None)", "no settings", "merge"),
    "diffusers": (
        {"model_index.json": "{}", "text_encoder/config.json": T5},
        "a diffusers pipeline",
        "images",
        "twinax cannot",
    ),
    "SavedModel": (
        {"saved_model.pb": "", "variables/variables.index": ""},
        "TensorFlow SavedModel",
        "graph",
        "checkpoint",
    ),
    "TensorFlow": (
        {"checkpoint": 'model_checkpoint_path: "m"', "m.ckpt-1.index": "x", "m.ckpt-1.data-00000-of-00001": "x"},
        *("a part of a TensorFlow checkpoint", "m.ckpt-1.data-00000-of-00001: ", "from_tf=True"),
    ),
    "FSDP": ({".metadata": "", "__0_0.distcp": ""}, "torch.distributed", "sharded by process", "dcp_to_torch DIR"),
    "DeepSpeed": (
        {"latest": "global_step9", "zero_to_fp32.py": "", "global_step9/mp_rank_00_model_states.pt": ""},
        *("a DeepSpeed checkpoint", "sharded by process", "python zero_to_fp32.py . NEW"),
    ),
    "Megatron": (
        {"latest_checkpointed_iteration.txt": "9", "iter_0000009/mp_rank_00/model_optim_rng.pt": ""},
        *("a Megatron-LM checkpoint", "sharded by process", "tools/checkpoint"),
    ),
    "NeMo": ({"model_config.yaml": "", "model_weights.ckpt": "x"}, "an unpacked NeMo model", "layout", "twinax cannot"),
    "Sockeye": (
        {"params.best": "", "vocab.src.0.json": "{}", "config": ""},
        "a Sockeye model",
        "layout",
        "twinax cannot",
    ),
    "T5X": ({"checkpoint": "x", "target.encoder.norm.scale/.zarray": ""}, "a T5X checkpoint", "names", "convert_t5x"),
    "orbax": (
        {"_CHECKPOINT_METADATA": "{}", "default/_METADATA": "{}", "default/manifest.ocdbt": ""},
        *("an orbax checkpoint of another project", "no twinax config", "`twinax compare --write-rules`"),
    ),
    "flax.training": ({"checkpoint_1000": "x"}, "checkpoints of flax.training", "no config", "twinax cannot"),
    "dataset": ({"dataset_info.json": "{}", "data-00000.arrow": ""}, "a dataset", "no weights", "`twinax train --dat"),
    "OpenVINO": ({"openvino_encoder_model.xml": "", "config.json": T5}, "an OpenVINO model", "graph", "was made"),
    "GGUF": (
        {"config.json": T5, "model-Q4_K_M.gguf": "GGUF"},
        *("a directory with a GGUF file of llama.cpp", "model-Q4_K_M.gguf: its header has no", "original checkpoint"),
    ),
    "TensorFlow in a Hugging Face directory": (
        {"config.json": T5, "tf_model.h5": "\x89HDF\r\n\x1a\n"},
        *("a directory with an HDF5 file", "tf_model.h5: twinax does not read HDF5", "from_tf=True"),
    ),
    "CTranslate2": (
        {"config.json": "{}", "model.bin": CT2.decode(), "shared_vocabulary.json": "[]"},
        *("a CTranslate2 model", "TransformerSpec of binary version 6", "ct2-*-converter"),
    ),
    "ONNX": (
        {"config.json": T5, "encoder_model.onnx": "x"},
        "a directory with an ONNX model",
        "encoder_model.onnx",
        "",
    ),
    "no weights": ({"config.json": T5}, "a config.json without weights", "looked for model.safetensors", "hf download"),
    "another name": (
        {"config.json": T5, "last.ckpt": "x", "training_args.bin": "x"},
        *("a config.json beside a file of weights", "looked for model.safetensors", "last.ckpt NEW --layout FAMILY"),
    ),
    "partial": (
        {"config.json": T5, "model.safetensors.incomplete": "x"},
        *("a directory with a partial download", "model.safetensors.incomplete: it ended early", "download it again"),
    ),
    "git-lfs": (
        {"config.json": T5, "model.safetensors": LFS.decode()},
        *("a directory whose model.safetensors is a git-lfs pointer", "242,043,056 bytes", "`git lfs pull`"),
    ),
    "git-lfs shards": (
        {"config.json": T5, "model.safetensors.index.json": INDEX, "model-00001-of-00002.safetensors": LFS.decode()},
        *("whose model-00001-of-00002.safetensors is a git-lfs pointer", "242,043,056 bytes", "`git lfs pull`"),
    ),
    "text as weights": (
        {"config.json": T5, "model.safetensors": "Entry not found"},
        *("whose model.safetensors is not a checkpoint", "starts with 'Entry not found'", "download or copy"),
    ),
    "no config": ({"model.safetensors": "x"}, "weights without a config.json", "it has model.safetensors", "copy the"),
    "files": ({"a.pt": "x", "b.pt": "x"}, "a directory with files of weights", "it has 2", "a.pt`"),
    "tokenizer": ({"tokenizer.json": TOKENIZER}, "a tokenizer", "it has tokenizer.json and no weights", "--tokenizer"),
    "around": ({"a/x": "", "b/config.json": T5}, "neither a run", "the checkpoint is in b", "/b"),
    "runs of a Trainer": ({"checkpoint_9/config.json": T5}, "neither a run", "is in checkpoint_9", "/checkpoint_9"),
    "dataset with splits": (
        {"dataset_dict.json": "{}", "train/state.json": "{}"},
        "a dataset",
        "no weights",
        "--dataset",
    ),
    "hub cache": (
        {"refs/main": "", "blobs/1": "", "snapshots/abc/config.json": T5},
        *("neither a run", "the checkpoint is in abc", "/snapshots/abc"),
    ),
    "empty": ({}, "an empty directory", "no config.json", "pass a run"),
    "unknown": ({"b": "", "a\nb": ""}, "neither a run", "its entries are a\\nb, b", "pass a run"),
}


def write_entries(folder, entries):
    for name, text in entries.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode("latin-1"))


@pytest.mark.parametrize("case", DIRECTORIES)
def test_directories_of_other_projects(case, tmp_path):
    entries, *parts = DIRECTORIES[case]
    write_entries(tmp_path, entries)
    check_obstacle(tmp_path, parts)


def test_of_several_checkpoints_it_names_the_newest(tmp_path):
    write_entries(tmp_path, {f"checkpoint-{number}/config.json": T5 for number in (9, 10)})
    os.utime(tmp_path / "checkpoint-9", (999, 999))  # the last by name
    check_obstacle(tmp_path, ("neither a run", "is in checkpoint-10", "/checkpoint-10"))


def test_flax_weights_are_no_obstacle(tmp_path):
    """Only the reader of weights decides on them."""
    write_entries(tmp_path, {"config.json": T5, "flax_model.msgpack": "x"})
    assert unsupported_hugging_face(tmp_path) is None


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_obstacle(tmp_path / "pipe", ("a device, a pipe or a socket", "not a file", "pass a run"))


HEADS = (
    b"",
    b"PK\x03\x04",
    b"\x80\x02",
    b"GGUF\x03\0\0\0",
    b"{",
    b"\x08\x08\x12\x07",
    bytes(8) + b"{",
    b"\x01" + bytes(7),
)
NAMES = ("x", "a.pt", "a.safetensors", "a.npz", "a.bin", "a.json", "tokenizer.json", "a.model", "config.json", "a.nemo")
LIMITS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@LIMITS
@given(
    head=st.sampled_from([*HEADS, Q4[:60], CT2[:20], ONNX]), tail=st.binary(max_size=200), name=st.sampled_from(NAMES)
)
def test_any_bytes_are_one_line(head, tail, name, tmp_path):
    path = tmp_path / name
    path.write_bytes(head + tail)
    check_one_line(path)
    path.unlink()


def check_one_line(path):
    with pytest.raises(convert.ConversionError) as error:
        convert.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


ENTRIES = (
    *("config.json", "adapter_config.json", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"),
    *(
        "model.bin",
        "checkpoint",
        "tf_model.h5",
        "a.gguf",
        "tokenizer.json",
        "dict.de.txt",
        "a.pt",
        "a/config.json",
        "b",
    ),
)
TEXTS = (
    "",
    "{}",
    "[]",
    "{",
    T5,
    LFS.decode(),
    "GGUF",
    '{"weight_map": {"a": "b"}}',
    '{"model_type": "led"}',
    "\x80\x02",
)


@LIMITS
@given(entries=st.dictionaries(st.sampled_from(ENTRIES), st.sampled_from(TEXTS) | st.binary(max_size=30), max_size=6))
def test_any_directory_is_one_line(entries, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    write_entries(folder, entries)
    check_one_line(folder)


def test_inspect_prints_a_table_and_the_other_commands_one_line(command, tmp_path):
    path, report = tmp_path / "a.gguf", tmp_path / "report.json"
    path.write_bytes(Q4)
    code, out, err = command("inspect", path, "--json", report)
    assert (code, err) == (2, "")
    rows = json.loads(report.read_text())
    assert [*rows] == ["path", "type", "obstacle", "what to do", "tensors"]
    assert all(word in out for word in ("obstacle", "what to do", "general.file_type=15 (Q4_K_M)"))
    for arguments in (["translate", path], ["convert", path, tmp_path / "b.pt"], ["parity", path], ["audit", path]):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert err == f"twinax: {path}: is {rows['type']}: {rows['obstacle']}; {rows['what to do']}\n"
    assert not (tmp_path / "b.pt").exists()
