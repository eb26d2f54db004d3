"""A table that compares text of the families with `transformers`: ids, decoded text and translations.

`python -m benchmarks.conversion.text_matrix PAGE FOLDER` prints it and writes it into the page. FOLDER has Multi30k's
train and test_2016_flickr in German, English and French, as text or .gz.
"""

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.pages import marks, write_table
from parity_tests.support.text import VARIANTS, compare_text, compare_translations, write_files, write_model
from twinax.train.text.corpus import read_lines

LANGUAGES = ("de", "en", "fr")
TRAINING, SENTENCES, TRANSLATED = 6000, 1000, 20  # sentences per language: of the tokenizers, compared, translated
HEADER = ("family", "source ids", "target ids", "decoded text", "translations")


def main(page: Path, folder: Path) -> int:
    """Measure every family, print the table, write it into the page. Returns 0 if all is equal."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are small
    marks(page, "text-matrix")
    training = {language: lines(folder, "train", language)[:TRAINING] for language in LANGUAGES}
    sentences = [line for language in LANGUAGES for line in lines(folder, "test_2016_flickr", language)[:SENTENCES]]
    rows, equal = [], True
    for name in track(VARIANTS, "families", console=Console(stderr=True), transient=True):
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            write_files(name, directory, (training["de"], training["en"] + training["fr"]))
            row = compare_text(name, directory, sentences)
            write_model(name, directory)
            texts = [text for i in range(len(LANGUAGES)) for text in sentences[i * SENTENCES :][:TRANSLATED]]
            different = [len(compare_translations(name, directory, texts, beam)) for beam in (1, 4, None)]
        counts = (f"{row.texts - len(texts):,}" for texts in (row.sources, row.targets, row.decoded))
        translations = len(texts) * len(different)
        rows.append((name, *counts, f"{translations - sum(different)} of {translations}"))
        equal &= row.ok and not any(different)
    write_table(page, "text-matrix", HEADER, rows)
    return 0 if equal else 1


def lines(folder: Path, part: str, language: str) -> list[str]:
    """The lines of a part of the corpus in one language."""
    path = folder / f"{part}.{language}"
    return list(read_lines(str(path if path.is_file() else f"{path}.gz")))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.conversion.text_matrix PAGE FOLDER")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
