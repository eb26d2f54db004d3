"""Files of other projects that twinax cannot read, recognized by their first bytes, else by their names."""

import re
from collections.abc import Callable
from pathlib import Path

from ...configs.json_text import parse_json
from ..io import headers
from .unreadable import NOT_READABLE, READABLE, Unsupported, printable

_GGUF_UNQUANTIZED = {0: "float32", 1: "float16", 32: "bfloat16"}  # values of general.file_type
_GGUF_QUANTIZED = {
    **{2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L"},
    **{14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
}
_MARIAN_FLOAT32 = 0x0404
_QUANTIZED = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F4")  # dtypes of safetensors
_ORIGINAL = "pass the checkpoint from which it was made"
_UNPACK = "unpack it, then run `twinax inspect` on the directory"
_DATA = Unsupported("a data file", "it has no weights", "pass it to `twinax train --dataset`, and a checkpoint here")
_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_ROOTS = ("torch", "collections", "builtins", "__builtin__", "_codecs", "argparse", "numpy")  # of harmless classes

# (first byte of the magic, magic, obstacle)
_MAGICS = (
    *(
        (offset, magic, Unsupported(f"{name} archive", "its files are packed", _UNPACK))
        for offset, magic, name in (
            (0, b"\x1f\x8b", "a gzip"),
            (0, b"BZh", "a bzip2"),
            (0, b"\xfd7zXZ\0", "an xz"),
            (0, b"\x28\xb5\x2f\xfd", "a zstd"),
            (0, b"7z\xbc\xaf\x27\x1c", "a 7z"),
            (0, b"Rar!", "a rar"),
        )
    ),
    (
        0,
        b"\x89HDF\r\n\x1a\n",
        Unsupported(
            "an HDF5 file, the format of TensorFlow and Keras (tf_model.h5)",
            "twinax does not read HDF5",
            "with transformers 4 and TensorFlow: AutoModelForSeq2SeqLM.from_pretrained(DIR, from_tf=True)"
            ".save_pretrained(NEW)",
        ),
    ),
    *((0, magic, Unsupported("a GGML file", "its weights are quantized", _ORIGINAL)) for magic in (b"lmgg", b"tjgg")),
    (4, b"TFL3", Unsupported("a TensorFlow Lite model", "it is a computation graph", _ORIGINAL)),
    (4, b"ORTM", Unsupported("an ONNX Runtime model", "it is a computation graph", _ORIGINAL)),
    (
        0,
        b"\x93NUMPY",
        Unsupported("one NumPy array", "it is not a model", "save the arrays by name with safetensors.numpy.save_file"),
    ),
    (
        0,
        b"\x12\x01\0\0\0\0\0\0",
        Unsupported("an MXNet parameter file", "as Sockeye 2 and GluonNLP write", NOT_READABLE),
    ),
    (0, b"PAR1", _DATA),
    (0, b"ARROW1", _DATA),
    (
        0,
        b"model_checkpoint_path:",
        Unsupported("the index of TensorFlow checkpoints", "TensorFlow 1 or 2", "inspect its directory"),
    ),
)
# pattern of a name -> obstacle, for formats whose first bytes say little
_TENSORFLOW = Unsupported(
    "a part of a TensorFlow checkpoint",
    "twinax does not read TensorFlow's .index and .data files",
    "read it with tf.train.load_checkpoint, or convert it with transformers 4 and from_tf=True",
)
_NAMES = (
    (
        r"\.(incomplete|part|crdownload|aria2)$",
        Unsupported("a partial download", "it ended early", "download it again"),
    ),
    (r"\.data-\d{5}-of-\d{5}$|\.ckpt.*\.(index|meta)$", _TENSORFLOW),
    (
        r"^saved_model\.pb(txt)?$",
        Unsupported("a TensorFlow SavedModel", "it is a computation graph", "pass its checkpoint"),
    ),
    (r"\.onnx(_data)?$", Unsupported("an ONNX model", "it is a computation graph", _ORIGINAL)),
    (
        r"\.msgpack$",
        Unsupported("Flax weights as msgpack", "they have no config", "pass the directory with them and config.json"),
    ),
    (r"\.(jsonl|csv|tsv|parquet|arrow)(\.gz)?$", _DATA),
    (r"\.ya?ml$", Unsupported("a YAML file", "it has no weights", READABLE)),
)


def unsupported_file(path: Path) -> Unsupported | None:
    """The obstacle in a file, None if it may be a checkpoint that twinax reads."""
    head = headers.read_head(path)
    if not head:
        return Unsupported("an empty file", "it has 0 bytes", "download or copy it again")
    if unsupported := next((o for pattern, o in _NAMES[:1] if re.search(pattern, path.name)), None):
        return unsupported
    for recognize in _RECOGNIZERS:
        if unsupported := recognize(path, head):
            return unsupported
    return next((o for pattern, o in _NAMES if re.search(pattern, path.name)), None)


def unidentified_file(path: Path) -> Unsupported:
    """The obstacle of a file that nothing recognizes."""
    head = headers.read_head(path)
    if _is_text(head):
        return _text(head, READABLE)
    return Unsupported("not a checkpoint", f"no known format; its first bytes are {head[:16].hex(' ')}", READABLE)


def unsupported_weights(path: Path) -> Unsupported | None:
    """The obstacle in a file of weights in a Hugging Face directory."""
    head = headers.read_head(path)
    if not head:
        return unsupported_file(path)
    return _lfs_pointer(path, head) or _safetensors(path, head) or _text_as_weights(path, head)


def _magic(path: Path, head: bytes) -> Unsupported | None:
    return next((o for start, magic, o in _MAGICS if head[start:].startswith(magic)), None)


def _lfs_pointer(path: Path, head: bytes) -> Unsupported | None:
    if not head.startswith(b"version https://git-lfs"):
        return None
    size = re.search(rb"\nsize (\d{1,20})", head)
    content = f"its content, {int(size[1]):,} bytes," if size else "its content"
    return Unsupported("a git-lfs pointer", f"{content} is not downloaded", "run `git lfs pull` in its repository")


def _safetensors(path: Path, head: bytes) -> Unsupported | None:
    if head[8:9] != b"{" or head[:2] == b"PK":
        return None
    expected, actual = headers.safetensors_size(path), path.stat().st_size
    if expected is None and path.suffix.lower() == ".safetensors":
        expected = 8 + int.from_bytes(head[:8], "little")  # of the header
    if expected is not None and expected > actual:
        reason = f"it has {actual:,} of {expected:,} bytes"
        return Unsupported("not a complete safetensors file", reason, "download or copy it again")
    header = headers.safetensors_header(path) or {}
    for name, tensor in header.items():
        dtype = tensor.get("dtype") if isinstance(tensor, dict) else None
        if dtype in _QUANTIZED and name.endswith("weight"):
            return Unsupported("a quantized model", f"{printable(name)} has dtype {dtype}", _ORIGINAL)
    if any(".lora_" in name for name in header):
        return Unsupported("a LoRA adapter", "it has no base model", "pass its directory, with adapter_config.json")
    return None


def _gguf(path: Path, head: bytes) -> Unsupported | None:
    if not head.startswith(b"GGUF"):
        return None
    metadata = headers.gguf_metadata(headers.read_head(path, 1 << 20))
    version, file_type = metadata.get("version"), metadata.get("general.file_type")
    architecture = printable(metadata.get("general.architecture", "unknown"))
    kind = f"a GGUF file of llama.cpp (version {version}, architecture {architecture})"
    if file_type in _GGUF_UNQUANTIZED:
        reason = f"general.file_type={file_type} ({_GGUF_UNQUANTIZED[file_type]}), in llama.cpp's names and layouts"
    elif file_type is None:
        reason = "its header has no general.file_type"
    else:
        reason = f"general.file_type={file_type} ({_GGUF_QUANTIZED.get(file_type, 'unknown')}), quantized"
    return Unsupported(kind, reason, "pass the original checkpoint, a Hugging Face directory, from which it was made")


def _ctranslate2(path: Path, head: bytes) -> Unsupported | None:
    match = re.match(rb"([\x01-\x20])\0\0\0..(\w+Spec)\0", head, flags=re.DOTALL)
    if match is None:
        return None
    reason = f"{match[2].decode()} of binary version {match[1][0]}, whose weights are fused and often quantized"
    return Unsupported("a CTranslate2 model", reason, "pass the checkpoint that ct2-*-converter read")


def _marian(path: Path, head: bytes) -> Unsupported | None:
    types = headers.marian_types(path) if head.startswith(b"\x01\0\0\0\0\0\0\0") else None
    if types is None:
        return None
    packed = sorted(types - {_MARIAN_FLOAT32, 0x0101})  # the options are int8
    reason = f"packed or quantized tensors, type {packed[0]:#06x}" if packed else "Marian's binary format"
    return Unsupported("a Marian model of marian-conv", reason, "pass the model.npz that marian-conv read")


def _onnx(path: Path, head: bytes) -> Unsupported | None:
    match = re.match(rb"\x08[\x01-\x20]\x12[\x01-\x40]([ -~]{2,})", head)
    if match is None:
        return None
    return Unsupported("an ONNX model", f"a computation graph, by {printable(match[1].decode())}", _ORIGINAL)


def _tensorflow(path: Path, head: bytes) -> Unsupported | None:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        return _TENSORFLOW if file.read(8) == b"\x57\xfb\x80\x8b\x24\x75\x47\xdb" else None


def _tar(path: Path, head: bytes) -> Unsupported | None:
    if head[257:262] != b"ustar":
        return None
    kind = "a NeMo archive" if path.suffix == ".nemo" else "a tar archive"
    return Unsupported(
        kind, "its files are packed", f"unpack it (tar -xf {path.name}), then `twinax inspect` its files"
    )


def _zip(path: Path, head: bytes) -> Unsupported | None:
    if not head.startswith(b"PK\x03\x04"):
        return None
    names = headers.zip_names(path)
    if names is None or not names:
        return None  # a damaged file, which the reader describes
    if any(name.endswith("/constants.pkl") for name in names):
        advice = "if you trust it: torch.save(torch.jit.load(FILE).state_dict(), NEW)"
        return Unsupported("a TorchScript model", "it is code with weights (constants.pkl)", advice)
    if any(name.endswith("archive_format") for name in names):
        return Unsupported("a torch.export program", "it is a computation graph", _ORIGINAL)
    if {"model.json", "decoder_step"} <= {*names}:
        kind, reason = "a model that `twinax convert` exported", "it is programs for JAX, which run without twinax"
        return Unsupported(kind, reason, f"{_ORIGINAL}; docs/export.md has a script that runs it")
    if "model.weights.h5" in names:
        return Unsupported("a Keras model", "its weights are HDF5", NOT_READABLE)
    if any(name.endswith("/data.pkl") for name in names) or all(name.endswith(".npy") for name in names):
        return None
    return Unsupported("a zip archive", f"its files are packed ({printable(names[0])}, …)", _UNPACK)


def _pickle(path: Path, head: bytes) -> Unsupported | None:
    if not head.startswith((b"PK\x03\x04", b"\x80")):
        return None
    names, texts = headers.pickled_names(path)
    if {"generator", "opt"} <= texts and not {"args", "cfg"} & texts:
        advice = f"{NOT_READABLE}; `twinax compare` checks a port of it"
        return Unsupported("an OpenNMT-py checkpoint", "its layout is not supported (model, generator, opt)", advice)
    foreign = [n for n in names if not n.startswith(tuple(f"{root}." for root in _ROOTS)) or ".nn.modules." in n]
    if not foreign:
        return None
    reason = f"holds more than tensors, a {printable(foreign[0])}; none of its code was run"
    if "_parameters" in texts:
        advice = (
            "if you trust it, where its code is installed: "
            "torch.save(torch.load(FILE, weights_only=False).state_dict(), NEW)"
        )
        return Unsupported("a pickled nn.Module", reason, advice)
    return Unsupported("a file of pickled objects", reason, "save only the state dict")


def _sentencepiece(path: Path, head: bytes) -> Unsupported | None:
    if head[:1] != b"\n" or head[2:3] != b"\n" or not re.search(rb"<unk>|<pad>|<s>|\xe2\x96\x81", head[:256]):
        return None
    return Unsupported("a SentencePiece model", "a tokenizer without a model", _tokenizer_advice(path))


def _json(path: Path, head: bytes) -> Unsupported | None:
    text = head.lstrip()
    if not text.startswith((b"{", b"[")) or not _is_text(head):
        return None
    if re.search(rb'"(added_tokens|truncation|normalizer)"\s*:', head) and path.name.startswith("tokenizer"):
        return Unsupported("a tokenizer", "a tokenizer without a model", _tokenizer_advice(path))
    if path.name.endswith("config.json") or path.name.endswith(".index.json"):
        return Unsupported(f"{path.name} of a model", "it has no weights", "pass its directory")
    if path.suffix in (".jsonl", ".json") and _is_record(head):
        return _DATA
    return Unsupported("a JSON file", "it has no weights", READABLE)


def _is_record(head: bytes) -> bool:
    """Whether the first line is one JSON object."""
    try:
        return isinstance(parse_json(head.partition(b"\n")[0]), dict) and b"\n" in head
    except ValueError:
        return False


def _tokenizer_advice(path: Path) -> str:
    return f"`twinax convert MODEL NEW --tokenizer {printable(path.name)}` adds it to a model"


def _text_as_weights(path: Path, head: bytes) -> Unsupported | None:
    is_named_weights = path.suffix.lower() in _WEIGHT_SUFFIXES
    return _text(head, "download or copy it again") if is_named_weights and _is_text(head) else None


def _text(head: bytes, advice: str) -> Unsupported:
    line = printable(head.decode("utf-8", "ignore").strip().partition("\n")[0])
    if re.match(r"<(!doctype|html)", line, re.IGNORECASE):
        advice = "download the file itself, not the page about it"
    return Unsupported("not a checkpoint", f"a text file that starts with {line!r}", advice)


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # else the head ends within a character
            return False
        text = head[: error.start].decode()
    return all(c.isprintable() or c.isspace() for c in text)


_Recognizer = Callable[[Path, bytes], Unsupported | None]
_RECOGNIZERS: tuple[_Recognizer, ...] = (
    *(_lfs_pointer, _gguf, _magic, _safetensors, _zip, _pickle, _tar),
    *(_marian, _ctranslate2, _onnx, _tensorflow, _sentencepiece, _json, _text_as_weights),
)
