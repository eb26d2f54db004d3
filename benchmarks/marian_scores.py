"""Log-probabilities of targets of a Marian model by CTranslate2, an independent reader of Marian's files.

`python benchmarks/marian_scores.py FOLDER` reads model.npz and vocab.yml and writes scores.json. It runs in an
environment of its own, which has CTranslate2 and neither twinax nor its dependencies.
"""

import json
import sys
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np

SOURCES = ["w4 w6@@ w7 :", "w10", "w30@@ w29 w28 w27@@ w26 w25 w24@@ w4 w8", "<unk> w5 w5"]
TARGETS = ["w8 w6@@ w12", "w9@@ w10 w11", "w14", ": w15@@ <unk> w20 w22 w4 w4"]


def sinusoids(rows: int, width: int) -> np.ndarray:
    """Marian's positions: CTranslate2 computes others, unless a model stores them. Source: `node_initializers.cpp`."""
    half = width // 2
    frequencies = np.exp(-np.arange(half) * np.log(10000.0) / (half - 1))
    angles = np.arange(rows)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def main(folder: Path) -> None:
    """Convert the model, score the targets, and write the results."""
    arrays = dict(np.load(folder / "model.npz"))
    arrays["Wpos"] = sinusoids(64, arrays["Wemb"].shape[1])
    with tempfile.TemporaryDirectory() as temporary:
        np.savez(f"{temporary}/model.npz", **arrays)
        converter = ctranslate2.converters.MarianConverter(f"{temporary}/model.npz", [str(folder / "vocab.yml")] * 2)
        converter.convert(f"{temporary}/converted")
        translator = ctranslate2.Translator(f"{temporary}/converted", compute_type="float32", inter_threads=1)
        sources, targets = ([text.split() for text in texts] for texts in (SOURCES, TARGETS))
        scores = [result.log_probs for result in translator.score_batch(sources, targets)]
    document = {
        "ctranslate2": ctranslate2.__version__,
        "sources": SOURCES,
        "targets": TARGETS,
        "log_probs": scores,
    }
    (folder / "scores.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
