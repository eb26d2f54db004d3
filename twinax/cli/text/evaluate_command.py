"""`twinax evaluate`: scores of one system, or of several in comparison."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from ...configs.decoding import DecodingConfig
from ...inference import scores
from ...inference.translator import Translator
from ...train.text.corpus import read_lines
from ...train.tracking.progress import progress_bar
from ..flags.shared import Framework
from ..flags.text import Evaluate
from ..usage import WEIGHTS, UsageError, check_outputs, write_json, write_text
from .text_commands import (
    check_decoding,
    decoding_config,
    decoding_in,
    load_translator,
    one_line,
    read_pairs,
    warn_about_text,
)

_CORPUS = ("src", "tgt", "dataset", "subset", "src_column", "tgt_column")


def evaluate(flags: Evaluate) -> int:
    """Print the scores, after translating what is no text; return the exit status."""
    _check_systems(flags.systems, flags.paired)
    texts_only = all(map(is_text, flags.systems))
    outputs = _outputs(flags.output, len(flags.systems))
    dataset = flags.dataset if flags.dataset is not None and Path(flags.dataset).is_file() else None
    texts = (flags.src, flags.tgt, dataset)
    check_outputs([flags.json_file, *outputs], [*flags.systems, flags.adapter, *texts, *flags.references])
    corpus = {name: getattr(flags, name) for name in _CORPUS}
    settings = dict(flags.decoding)
    check_decoding(settings)
    if texts_only:
        _check_unset(settings | flags.languages | {"adapter": flags.adapter, "quantize": flags.quantize})
    sources = {"src": flags.tgt} if texts_only and flags.src is None else {}  # not read
    pairs = list(read_pairs(**corpus | sources, split=flags.split))
    all_references = _all_references(
        [[pair[1] for pair in pairs], *(_lines(path, len(pairs)) for path in flags.references)]
    )
    scores.corpus_scores(["a"], [["a"]], flags.tokenize)  # checks --tokenize before minutes of translation
    system_texts = {system: _lines(system, len(pairs)) for system in flags.systems if is_text(system)}
    translators = {
        system: decoding_in(load_translator(system, flags.adapter, flags.quantize), **flags.languages)
        for system in flags.systems
        if system not in system_texts
    }
    decodings = {
        system: decoding_config(translator, settings, flags.ignore_generation_config)
        for system, translator in translators.items()
    }
    results = []
    for system, path in zip(flags.systems, outputs or [None] * len(flags.systems), strict=True):
        if system in system_texts:
            results.append(_Translations(system, system_texts[system]))
        else:
            translator, decoding = translators.pop(system), decodings[system]
            used = {name: getattr(decoding, name) for name in settings}
            set_values = flags.languages | {"quantize": flags.quantize}
            used |= {name: value for name, value in set_values.items() if value is not None}
            texts, cut = _translate(translator, [pair[0] for pair in pairs], decoding, flags.framework)
            results.append(_Translations(system, texts, cut, {**used, "framework": flags.framework}))
        if path is not None:  # at once: a later system may fail
            results[-1].write(path)
    texts_of = {result.system: result.texts for result in results}
    if flags.paired:
        scores_of = scores.compare_systems(texts_of, all_references, flags.tokenize)
    else:
        (result,) = results
        scores_of = {result.system: scores.corpus_scores(result.texts, all_references, flags.tokenize, flags.bootstrap)}
    _show(scores_of, len(pairs), sum(result.cut for result in results))
    if flags.json_file is not None:
        corpus = {name: value for name, value in (corpus | {"split": flags.split}).items() if value is not None}
        corpus |= {"references": [*flags.references]} if flags.references else {}
        documents = [result.document(corpus, len(pairs), scores_of[result.system]) for result in results]
        document = {"systems": documents} if len(documents) > 1 else documents[0]
        write_json(flags.json_file, document)
    return 0


class _Translations(NamedTuple):
    """The translations of a system; how many sources were cut, and the settings that made them."""

    system: str
    texts: Sequence[str]
    cut: int = 0
    settings: Mapping[str, Any] = {}

    def write(self, path: str) -> None:
        """Write the translations, one per line."""
        write_text(path, "".join(f"{text}\n" for text in self.texts))

    def document(self, corpus: Mapping[str, Any], pairs: int, scores: Sequence[Any]) -> dict[str, Any]:
        """What --json writes of the system."""
        inputs = {"checkpoint": self.system, **corpus, "pairs": pairs, "cut": self.cut}
        return {**inputs, **self.settings, "scores": [score.stated() for score in scores]}


def is_text(system: str) -> bool:
    """Whether a system is a text file with its translations, not a checkpoint."""
    return Path(system).exists() and not Path(system).is_dir() and not system.lower().endswith(WEIGHTS)


def _check_systems(systems: Sequence[str], paired: bool) -> None:
    """Raises: UsageError if the systems cannot be compared."""
    if not systems:
        raise UsageError("evaluate: needs a checkpoint, or a text file with translations")
    if len(systems) > 1 and not paired:
        raise UsageError(f"evaluate: {len(systems)} systems are compared with --paired; add it, or name one system")
    if paired and len(systems) == 1:
        raise UsageError("--paired: needs at least two systems; name the others after the first, the baseline")
    if len({*systems}) < len(systems):
        raise UsageError(f"evaluate: {max(systems, key=systems.count)} is named twice")


def _check_unset(flags: Mapping[str, Any]) -> None:
    """Raises: UsageError if a flag of translation is given, where nothing is translated."""
    for name, value in flags.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')}: every system is a text file, nothing is translated; omit it")


def _outputs(output: str | None, number: int) -> list[str]:
    if output is None:
        return []
    return [output] if number == 1 else [f"{output}.{i}" for i in range(1, number + 1)]


def _lines(path: str, pairs: int) -> list[str]:
    """The lines of a text file. Raises: UsageError if it has another number of lines than the corpus has pairs."""
    lines = list(read_lines(path))
    if len(lines) != pairs:
        raise UsageError(f"{path}: has {len(lines)} lines, and there are {pairs} pairs")
    return lines


def _all_references(files: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """The references by file; None for a blank one beside others: a sentence may have fewer than another."""
    rows = [
        [text if text.strip() or not any(t.strip() for t in row) else None for text in row]
        for row in zip(*files, strict=True)
    ]
    return [list(column) for column in zip(*rows, strict=True)]


def _translate(
    translator: Translator, sources: Sequence[str], decoding: DecodingConfig, framework: Framework
) -> tuple[list[str], int]:
    """(translations, number of sources that were truncated)."""
    encoded = translator.sources(sources)
    warn_about_text(translator, encoded)
    with progress_bar() as progress:
        hypotheses = translator.hypotheses(
            encoded, decoding, framework, lambda count: progress("sentences", count, len(sources))
        )
    return [one_line(n_best[0].text) if n_best else "" for n_best in hypotheses], len(encoded.too_long)


def _show(scores_of: Mapping[str, Sequence[Any]], pairs: int, truncated: int) -> None:
    """Print a table: a row per score of one system, or per system and score."""
    system = [Column("system", overflow="fold")] if len(scores_of) > 1 else []
    columns = Column(""), Column("", justify="right"), Column("signature", overflow="fold")
    table = Table(*system, *columns, title=f"sentences: {pairs:,}")
    for row in zip(*scores_of.values(), strict=True):
        for name, score in zip(scores_of, row, strict=True):
            first = name == next(iter(scores_of))
            cells = [score.name if first else "", _value(score), score.signature if first else ""]
            table.add_row(*([name] if system else []), *cells)
    Console().print(table)
    if truncated:
        noun = "source" if truncated == 1 else "sources"
        print(f"twinax: truncated {truncated} {noun} with more tokens than the model's maximum", file=sys.stderr)


def _value(score: Any) -> str:
    """The score, its interval, and its p-value."""
    text = f"{score.value:.2f}"
    text += f" ({score.mean:.2f} ± {score.interval:.2f})" if score.interval is not None else ""
    return text + (f", p = {score.p_value:.4f}" if score.p_value is not None else "")
