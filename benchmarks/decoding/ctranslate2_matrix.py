"""Two tables on backends: one beam search in four of them, and BLEU beside `twinax translate`.

`python -m benchmarks.decoding.ctranslate2_matrix PAGE FOLDER RUN` prints them and writes them into the page. FOLDER has
Multi30k in German and English, as text or .gz; RUN is a German-English run on it. If RUN does not exist, a small model
is trained there; if it is not finished, it is resumed.
"""

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForSeq2SeqLM

from benchmarks.conversion.text_matrix import lines
from benchmarks.pages import marks, write_table
from twinax import convert
from twinax.configs.decoding import DecodingConfig
from twinax.formulas.padding import pad
from twinax.inference.scores import corpus_scores
from twinax.inference.translator import Translator, load
from twinax.parity.search.backends import BACKENDS, BEAM_SIZES, BackendAgreement, compare_backends, load_searches
from twinax.parity.search.ctranslate2 import COMMON_RULES, translate_options
from twinax.parity.search.decoding import FAMILIES, random_family, sentences

TRAINING = "--loop.epochs None --training.warmup-updates 400 --batches.shapes 4"
UPDATES = 1600
LONGEST = 96  # tokens of a translation; a model trained so briefly may repeat itself up to the maximum
LONGEST_COMPARED = 48  # the same in the comparison of backends, whose reference computes each step anew
RANDOM = 64  # sentences that random models translate
BACKENDS_HEADER = (
    "model",
    "beam",
    "backend",
    "sentences equal",
    "within rounding",
    "different",
    "largest error of a sum",
)
HEADER = ("backend", "beam", "BLEU", "sentences that differ")
REFERENCE = "`twinax translate`"
_PROGRESS = {"console": Console(stderr=True), "transient": True}
Translate = Callable[[], list[list[int]]]


def main(page: Path, folder: Path, run: Path) -> int:
    """Measures, prints the tables, writes them into the page. Returns 0 if rounding explains every difference."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are small
    for name in ("search-backends", "ctranslate2"):
        marks(page, name)
    train_run(folder, run)
    translator, texts = load(str(run)), lines(folder, "test_2016_flickr", "de")
    write_table(page, "ctranslate2", HEADER, _translations(translator, texts, lines(folder, "test_2016_flickr", "en")))
    rows, equal = [], True
    for name, agreement, count in _agreements(translator, texts):
        rounding = len(agreement.certificates) - len(agreement.different)
        counts = (f"{agreement.equal:,} of {count:,}", f"{rounding}", f"{len(agreement.different)}")
        error = "no scores" if agreement.score_error is None else f"{agreement.score_error:.1e}"
        rows.append((name, str(agreement.beam_size), agreement.backend, *counts, error))
        for certificate in agreement.certificates:
            print(f"{name}, beam {agreement.beam_size}, {agreement.backend}, {certificate}")
        equal &= agreement.ok
    write_table(page, "search-backends", BACKENDS_HEADER, rows)
    return 0 if equal else 1


def train_run(folder: Path, run: Path, updates: int = UPDATES, further: Sequence[str] = ()) -> None:
    """Train the run, with further flags, or resume it; a finished one is not changed."""
    twinax = str(Path(sys.executable).with_name("twinax"))
    if (run / "config.json").is_file():
        subprocess.run([twinax, "train", str(run)], check=True)
        return
    files = {"src": "train.de", "tgt": "train.en", "valid-src": "val.de", "valid-tgt": "val.en"}
    flags = [word for flag, name in files.items() for word in (f"--{flag}", _path(folder, name))]
    flags += [*TRAINING.split(), "--loop.updates", str(updates), *further, "--out", str(run)]
    subprocess.run([twinax, "train", "multi30k_de_en", *flags], check=True)


def _path(folder: Path, name: str) -> str:
    return str(folder / name if (folder / name).is_file() else folder / f"{name}.gz")


def _agreements(translator: Translator, texts: Sequence[str]) -> Iterator[tuple[str, BackendAgreement, int]]:
    """(model, agreement of a backend, number of sentences), for the run and for random models of the families."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = {"Multi30k": (translator.checkpoint, dict(enumerate(translator.source_ids(texts), 1)))}
        for name in FAMILIES:
            _, checkpoint = random_family(name, folder / name)
            rows = sentences(checkpoint.config.pad_id, RANDOM).tolist()
            ids = [[token for token in row if token != checkpoint.config.pad_id] for row in rows]
            models[f"{name}, random"] = (checkpoint, dict(enumerate(ids, 1)))
        for number, (name, (checkpoint, sources)) in enumerate(track(models.items(), "search-backends", **_PROGRESS)):
            path = folder / f"backends{number}"
            path.mkdir()
            searches, _ = load_searches(checkpoint, BACKENDS, path)
            longest = min(LONGEST_COMPARED, checkpoint.config.max_length)
            for beam_size in BEAM_SIZES:
                for agreement in compare_backends(checkpoint, searches, sources, beam_size, max_length=longest):
                    yield name, agreement, len(sources)


def _translations(translator: Translator, texts: Sequence[str], references: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows on translations."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for beam_size in BEAM_SIZES:
            backends = _backends(translator, texts, Path(temporary, str(beam_size)), beam_size)
            results = {name: translate() for name, translate in backends.items()}
            for name, ids in results.items():
                hypotheses = translator.tokenizers.tgt.decode(ids)
                bleu = corpus_scores(hypotheses, [references])[1].value
                different = sum(a != b for a, b in zip(ids, results[REFERENCE], strict=True))
                rows.append((name, str(beam_size), f"{bleu:.2f}", f"{different} of {len(ids):,}"))
    return rows


def _backends(translator: Translator, texts: Sequence[str], folder: Path, beam_size: int) -> dict[str, Translate]:
    """Backend -> function that returns the ids of the best translations, without EOS."""
    quantized = Translator(translator.checkpoint, quantize="int8")
    config, decoding = translator.config, DecodingConfig(beam_size=beam_size, max_length=LONGEST)
    common = DecodingConfig(beam_size=beam_size, max_length=LONGEST, **COMMON_RULES)
    vocabulary: list[str] = []

    def twins(rules: DecodingConfig, translator: Translator = translator) -> Translate:
        return lambda: [list(n_best[0].tokens) for n_best in translator.hypotheses(texts, rules)]

    def library(quantization: str | None, own_rules: bool = False) -> Translate:
        path = folder / str(quantization)
        if not path.exists():
            convert.save(translator.checkpoint, path, layout="ctranslate2", quantization=quantization)
        model = ctranslate2.Translator(
            str(path),
            compute_type="int8" if quantization == "int8" else "float32",
            inter_threads=1,
            intra_threads=os.cpu_count() or 1,
        )
        tokens = convert.formats.ctranslate2.read_tokens(path, "source")
        vocabulary[:] = convert.formats.ctranslate2.read_tokens(path, "target")
        ids = {token: number for number, token in enumerate(vocabulary)}
        options = {"beam_size": beam_size} if own_rules else translate_options(config, common, vocabulary)

        def translate() -> list[list[int]]:
            sources = [[tokens[i] for i in sentence] for sentence in translator.source_ids(texts)]
            results = model.translate_batch(sources, max_batch_size=32, **options)
            return [[i for i in map(ids.__getitem__, r.hypotheses[0]) if i != config.eos_id] for r in results]

        return translate

    return {
        REFERENCE: twins(decoding),
        "twinax int8": twins(decoding, quantized),
        "`generate` of transformers": _transformers(translator, texts, folder / "transformers", beam_size),
        "twinax, rules of CTranslate2": twins(common),
        "CTranslate2 float32, same rules": library(None),
        "CTranslate2 float32, its defaults": library(None, own_rules=True),
        "CTranslate2 float16, same rules": library("float16"),
        "CTranslate2 int8, same rules": library("int8"),
    }


def _transformers(translator: Translator, texts: Sequence[str], folder: Path, beam_size: int) -> Translate:
    """The same in `transformers`, in batches of 32 sentences of similar lengths."""
    config = translator.config
    convert.save(translator.checkpoint, folder, layout="pegasus")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

    def translate() -> list[list[int]]:
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        sources = translator.source_ids(texts)
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        results: list[list[int]] = [[] for _ in sources]
        for rows in (order[start : start + 32] for start in range(0, len(order), 32)):
            tokens = torch.from_numpy(pad([sources[i] for i in rows], config.pad_id))
            output = model.generate(
                input_ids=tokens, attention_mask=(tokens != config.pad_id).long(), num_beams=beam_size,
                max_length=LONGEST + 1, do_sample=False, early_stopping=False, bad_words_ids=[[config.pad_id]],
            )  # fmt: skip
            for i, ids in zip(rows, output[:, 1:].tolist(), strict=True):
                results[i] = ids[: ids.index(config.eos_id)] if config.eos_id in ids else ids
        torch.set_num_threads(threads)
        return results

    return translate


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m benchmarks.decoding.ctranslate2_matrix PAGE FOLDER RUN")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
