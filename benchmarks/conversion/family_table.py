"""A table with one row per family: what converts, what is equal, and what limits it.

`benchmarks.conversion.conversion_matrix` writes it into its page, with the rows that it has measured.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from parity_tests.support.conversion import Row
from parity_tests.support.fine_tuning import training_difference
from parity_tests.support.legacy_flax_files import Row as FlaxRow
from parity_tests.support.text import compare_text, compare_translations, write_files, write_model
from twinax.cli.demo.demo_language import make_corpus

HEADER = ("family", "weights in and out", "text", "`generate`", "gradients", "training", "legacy Flax", "longest input")
SENTENCES, TRANSLATED = 200, 4  # sentences per language
TRAINING_BOUND = 1e-9
_TABLE, _NO_LIMIT = "`max_position_embeddings`", "`n_positions`, else 512"


class Family(NamedTuple):
    """The variants of a family: of its weights and of its tokenizers."""

    weights: tuple[str, ...]
    text: tuple[str, ...] = ()
    longest: str = _TABLE
    flax: tuple[str, ...] = ()  # directories that its Flax class saved


FAMILIES = {
    "Marian": Family(
        ("Marian", "Marian, two vocabularies", "Marian, untied"),
        ("Marian", "Marian, multilingual", "Marian, two vocabularies"),
        flax=("marian",),
    ),
    "mBART": Family(("mBART",), ("mBART",), flax=("mbart_float16",)),
    "mBART-50": Family(("mBART",), ("mBART-50",), flax=("mbart_float16",)),
    "M2M100": Family(("M2M100", "M2M100, odd width"), ("M2M100",)),
    "NLLB": Family(("M2M100",), ("NLLB",)),
    "Pegasus": Family(("Pegasus",), ("Pegasus",), flax=("pegasus",)),
    "BART": Family(("BART", "BART, untied, scaled"), ("BART",), flax=("bart", "bart_untied_bfloat16")),
    "Blenderbot": Family(("Blenderbot",), ("Blenderbot",), flax=("blenderbot_safetensors",)),
    "T5": Family(("T5",), ("T5",), _NO_LIMIT, ("t5",)),
    "T5 v1.1, Flan-T5": Family(("T5 v1.1, Flan-T5",), ("T5 v1.1",), _NO_LIMIT, ("t5_gated_sharded",)),
    "mT5": Family(("mT5", "mT5, tied"), ("mT5",), _NO_LIMIT, ("mt5",)),
    "UMT5": Family(("UMT5", "UMT5, tied"), ("UMT5",), _NO_LIMIT),
}
# Other toolkits: their text is segmented before, and `generate` and training are those of the families above.
OTHERS = {
    "fairseq": Family(
        ("fairseq, post-norm", "fairseq, pre-norm, shared", "fairseq, learned positions"),
        longest="`max_source_positions`",
    ),
    "Marian `.npz`": Family(
        ("Marian .npz", "Marian .npz, untied", "Marian .npz, pre-norm", "Marian .npz, trained positions"),
        longest="trained positions, else 1,000",
    ),
}


def family_rows(measured: Mapping[str, Row], flax_rows: Mapping[str, FlaxRow]) -> tuple[list[tuple[str, ...]], bool]:
    """(the cells of each family, whether all is equal), from the measured rows of the weights and of Flax classes."""
    rows, equal = [], True
    for name, family in track([*FAMILIES.items()], "text and training", console=Console(stderr=True), transient=True):
        text, translations = _text(family)
        training = max(_training(variant) for variant in family.weights)
        flax_errors = [flax_rows[name].errors[framework] for name in family.flax for framework in ("Flax", "PyTorch")]
        flax = f"{max(flax_errors):.0e}" if flax_errors else "no Flax class"
        equal &= text[0] == text[1] and translations[0] == translations[1] and training <= TRAINING_BOUND
        cells = (_count(text), _count(translations), _gradients(family, measured), f"{training:.0e}", flax)
        rows.append((name, _weights(family, measured), *cells, family.longest))
    for name, family in OTHERS.items():
        cells = ("segmented before", "—", _gradients(family, measured), "—", "—")
        rows.append((name, _weights(family, measured), *cells, family.longest))
    return rows, equal


def _weights(family: Family, measured: Mapping[str, Row]) -> str:
    changes = [change for name in family.weights for change in measured[name].changes]
    return ", ".join(changes) or "identical"


def _gradients(family: Family, measured: Mapping[str, Row]) -> str:
    return f"{max(measured[name].gradients for name in family.weights):.0e}"


def _count(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]:,} of {numbers[1]:,}"


def _training(variant: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return training_difference(variant, Path(folder))


def _text(family: Family) -> tuple[tuple[int, int], tuple[int, int]]:
    """((equal texts, all texts), (equal translations, all translations)) of the demo's sentences."""
    corpus = make_corpus(train=4 * SENTENCES, test=1).train
    sides = [[pair[side] for pair in corpus] for side in (0, 1)]
    texts = [text for side in sides for text in side[:SENTENCES]]
    equal = total = equal_translations = translations = 0
    for name in family.text:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            write_files(name, directory, (sides[0], sides[1]), 300)
            row = compare_text(name, directory, texts)
            equal += 3 * row.texts - len(row.sources) - len(row.targets) - len(row.decoded)
            total += 3 * row.texts
            write_model(name, directory)
            sources = [*sides[0][:TRANSLATED], *sides[1][:TRANSLATED]]
            for beam_size in (1, 4, None):
                equal_translations += len(sources) - len(compare_translations(name, directory, sources, beam_size))
                translations += len(sources)
    return (equal, total), (equal_translations, translations)
