"""The seconds from start to last line of commands that translate a file, in turns, and the BLEU of what they write.

`python -m benchmarks.performance.translation PAGE FOLDER RUN`: FOLDER has Multi30k in German and English, RUN is a run
on it, which is trained if it does not exist (12 minutes). 3,000 sentences: test, validation, and the first of training.
They are translated by its model, and by one of base size with the same function. The page receives a table. 50 minutes.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.conversion.text_matrix import lines
from benchmarks.decoding.ctranslate2_matrix import train_run
from benchmarks.multi30k.runs import describe_machine
from benchmarks.pages import marks, write_between, write_table
from benchmarks.performance import peers
from benchmarks.performance.widening import widened
from twinax import convert
from twinax.convert.checkpoint import Checkpoint
from twinax.inference.scores import corpus_scores
from twinax.inference.translator import load

ROUNDS, SENTENCES = 1, 3000
TWINAX = "`twinax translate`"
FIRST = f"{TWINAX}, compiles"
NAME = "translation speed"
LAYOUT = "blenderbot"  # of `transformers`: pre-norm, with learned positions
HEADER = ("model", "command", "seconds", "time / that of `twinax translate`", "BLEU", "lines as `twinax translate`")
_PROGRESS = {"console": Console(stderr=True), "transient": True}


def main(page: Path, folder: Path, run: Path) -> None:
    """Measure and write."""
    for name in (NAME, f"{NAME}, machine"):
        marks(page, name)
    train_run(folder, run)
    sources, references = (
        [line for part in ("test_2016_flickr", "val", "train") for line in lines(folder, part, side)][:SENTENCES]
        for side in ("de", "en")
    )
    checkpoint = load(str(run)).checkpoint
    small = replace(checkpoint, config=checkpoint.config.replace(positions="learned"), training=None)
    rows = []
    for model in (small, widened(checkpoint)):
        with tempfile.TemporaryDirectory() as temporary:
            seconds, written = _measure(Path(temporary), model, str(run / "tokenizer" / "tokenizer.json"), sources)
        size = (
            f"{model.config.num_encoder_layers}+{model.config.num_decoder_layers} layers, width {model.config.d_model}"
        )
        for name, times in seconds.items():
            bleu = corpus_scores(written[name], [references])[1].value
            same = sum(a == b for a, b in zip(written[name], written[TWINAX], strict=True))
            median = statistics.median(times)
            ratio = median / statistics.median(seconds[TWINAX])
            rows.append((size, name, f"{median:.1f}", f"{ratio:.2f}", f"{bleu:.2f}", f"{same:,}"))
    write_table(page, NAME, HEADER, rows)
    write_between(page, f"{NAME}, machine", describe_machine(f"{os.cpu_count()} cores") + ".")


def _measure(
    folder: Path, checkpoint: Checkpoint, tokenizer: str, sources: Sequence[str]
) -> tuple[Mapping[str, list[float]], Mapping[str, list[str]]]:
    """(seconds of each round, lines) by command; a first round fills the compilation cache."""
    text, own = folder / "sources", folder / "model.safetensors"
    models = {name: folder / name for name in (LAYOUT, "float32", "int8")}
    text.write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
    convert.save(checkpoint, own)
    convert.save(checkpoint, models[LAYOUT], layout=LAYOUT)
    convert.save(checkpoint, models["float32"], layout="ctranslate2")
    convert.save(checkpoint, models["int8"], layout="ctranslate2", quantization="int8")
    twinax = [str(Path(sys.executable).with_name("twinax")), "translate", str(own), str(text)]
    twinax += ["--beam-size", str(peers.BEAM_SIZE)]
    peer = [sys.executable, peers.__file__]
    commands = {
        TWINAX: twinax,
        FIRST: twinax,
        f"{TWINAX} --quantize int8": [*twinax, "--quantize", "int8"],
        "CTranslate2, float32": [*peer, "float32", str(models["float32"]), tokenizer],
        "CTranslate2, int8": [*peer, "int8", str(models["int8"]), tokenizer],
        "transformers, float32": [*peer, "transformers", str(models[LAYOUT]), tokenizer],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    written: dict[str, list[str]] = {}
    for number in track(range(ROUNDS + 1), NAME, **_PROGRESS):
        for name, command in commands.items():
            if not number and (name == FIRST or not name.startswith(TWINAX)):
                continue
            cache = {"XDG_CACHE_HOME": str(folder / f"cache-{number if name == FIRST else ''}")}
            with text.open() as file:
                begin = time.perf_counter()
                output = subprocess.run(
                    command, stdin=file, capture_output=True, check=True, encoding="utf-8", env=os.environ | cache
                )
                duration = time.perf_counter() - begin
            print(f"{name}: {duration:.1f} s", file=sys.stderr)
            written[name] = output.stdout.splitlines()
            if number:
                seconds[name].append(duration)
    return seconds, written


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m benchmarks.performance.translation PAGE FOLDER RUN")
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
