"""The speed of beam search in twinax, `generate` of `transformers`, and CTranslate2, on the same weights and sentences.

twinax and `transformers` must return the same tokens, and CTranslate2 must write as many. twinax and `transformers` use
a GPU if they see one.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.alternating import Program, alternate, started

ROUNDS, SENTENCES, SOURCE, TARGET = 5, 32, 24, 40
BEAMS = (1, 4)
PAD = 8191
TWINAX, TRANSFORMERS, CTRANSLATE2 = "twinax, float32", "transformers, float32", "CTranslate2, float32"

Generate = Callable[[np.ndarray, int], np.ndarray]  # (sources, beam size) -> tokens of the best hypotheses


class Row(NamedTuple):
    """The comparison at one beam size."""

    beam_size: int
    seconds: Mapping[str, Sequence[float]]  # by program, one per round
    equal: Mapping[str, int]  # sentences whose tokens are those of transformers in float32, by program; {} without it
    devices: Mapping[str, str]  # by program


def make_model(folder: Path, layers: int = 6) -> None:
    """Save a random Marian of the base size. No translation ends early, so that all steps are made."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    sizes = {"vocab_size": PAD + 1, "d_model": 512, "max_position_embeddings": 64, "init_std": 0.05}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": 8, f"{side}_ffn_dim": 2048}
    ids = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": 0, "forced_eos_token_id": 0}
    torch.manual_seed(0)
    MarianMTModel(MarianConfig(**sizes, **ids)).save_pretrained(folder)


def in_flax(folder: Path, quantized: bool = False, dtype: str = "float32") -> tuple[str, Generate]:
    """The device, and decoding in twinax, compiled."""
    import jax

    from twinax import convert, flax_transformer
    from twinax.configs.decoding import DecodingConfig

    jax.config.update("jax_default_matmul_precision", "highest")  # float32 on a GPU too, as in torch
    checkpoint = convert.load(folder)
    model = replace(checkpoint, config=checkpoint.config.replace(compute_dtype=dtype)).to_flax()
    model = model.quantized() if quantized else model

    def run(src: np.ndarray, beam_size: int) -> np.ndarray:
        config = DecodingConfig(beam_size=beam_size, max_length=TARGET)
        return flax_transformer.generate(model, src, config).tokens[:, 0]

    return jax.devices()[0].device_kind, run


def in_transformers(folder: Path, dtype: str = "float32") -> tuple[str, Generate]:
    """The device, and decoding in `transformers`, eager, with its cache."""
    import torch
    from transformers import MarianMTModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MarianMTModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)

    def run(src: np.ndarray, beam_size: int) -> np.ndarray:
        tokens = torch.from_numpy(src).to(device)
        output = model.generate(
            input_ids=tokens, attention_mask=(tokens != PAD).long(), num_beams=beam_size, max_new_tokens=TARGET,
            do_sample=False, early_stopping=False, bad_words_ids=[[PAD]],
        )  # fmt: skip
        return output[:, 1:].cpu().numpy()

    return torch.cuda.get_device_name() if device == "cuda" else device, run


def in_ctranslate2(folder: Path, quantization: str | None = None) -> tuple[str, Generate]:
    """The device, and decoding in CTranslate2, which truncates hypotheses at the maximum length."""
    import ctranslate2

    from twinax import convert
    from twinax.convert.formats.ctranslate2 import Vocabulary, write_into

    path = folder.with_name(f"ctranslate2_{quantization}")
    path.mkdir()
    checkpoint = convert.load(folder)
    tokens = [f"<{i}>" for i in range(PAD + 1)]  # ids in brackets, so that no tokenizer is needed
    vocabulary = Vocabulary(tokens, tokens[0])
    write_into(path, checkpoint.config, checkpoint.arrays, vocabulary, vocabulary, quantization)
    compute_type = quantization or "float32"
    model = ctranslate2.Translator(str(path), compute_type=compute_type, inter_threads=1, intra_threads=os.cpu_count())

    def run(src: np.ndarray, beam_size: int) -> np.ndarray:
        sources = [[tokens[i] for i in row if i != PAD] for row in src]
        results = model.translate_batch(
            sources, beam_size=beam_size, max_decoding_length=TARGET, min_decoding_length=TARGET,
            suppress_sequences=[[tokens[PAD]]], max_input_length=0,
        )  # fmt: skip
        return np.array([[int(token[1:-1]) for token in result.hypotheses[0]] for result in results])

    return "cpu", run


PROGRAMS: dict[str, Callable[[Path], tuple[str, Generate]]] = {
    TWINAX: in_flax,
    TRANSFORMERS: in_transformers,
    CTRANSLATE2: in_ctranslate2,
    "twinax, int8": partial(in_flax, quantized=True),
    "CTranslate2, int8": partial(in_ctranslate2, quantization="int8"),
    "twinax, bfloat16": partial(in_flax, dtype="bfloat16"),
    "transformers, bfloat16": partial(in_transformers, dtype="bfloat16"),
}
ON_CPU = tuple(PROGRAMS)[:5]
ON_GPU = (TRANSFORMERS, TWINAX, *tuple(PROGRAMS)[5:])


def sources() -> np.ndarray:
    """Sentences of 6 to SOURCE random tokens."""
    rng = np.random.default_rng(0)
    src = rng.integers(1, PAD, (SENTENCES, SOURCE))
    return np.where(np.arange(SOURCE) < rng.integers(6, SOURCE + 1, (SENTENCES, 1)), src, PAD)


def compare(
    beam_sizes: Sequence[int], rounds: int, names: Sequence[str] = ON_CPU, layers: int = 6, together: bool = False
) -> list[Row]:
    """Decode in these programs, `rounds` times per beam size. `together`: as `started`."""
    src, rows = sources(), []
    with tempfile.TemporaryDirectory() as temporary:
        make_model(folder := Path(temporary) / "model", layers)
        programs = [Program(name, partial(PROGRAMS[name], folder)) for name in names]
        with started(programs, "decoding", together) as running:
            devices = {name: program.about for name, program in running.items()}
            for beam_size in beam_sizes:
                seconds, tokens = alternate(running, rounds, f"beam {beam_size}", src, beam_size, together=together)
                expected = tokens.get(TRANSFORMERS)
                equal = {} if expected is None else {n: _equal(n, each, expected) for n, each in tokens.items()}
                rows.append(Row(beam_size, seconds, equal, devices))
    return rows


def _equal(name: str, tokens: np.ndarray, expected: np.ndarray) -> int:
    """The number of equal sentences; without the last token for CTranslate2, which truncates hypotheses."""
    length = TARGET - name.startswith("CTranslate2")
    return int((tokens[:, :length] == expected[:, :length]).all(1).sum())
