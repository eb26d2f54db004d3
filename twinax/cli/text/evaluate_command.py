"""`twinax evaluate`: scores of one system, or of several in comparison."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ...configs.decoding import DecodingConfig
from ...inference import scores
from ...inference.minimum_bayes_risk import rerank
from ...train.text.corpus import read_lines
from ...train.tracking.progress import progress_bar
from ..flags.text import Evaluate
from ..usage import WEIGHTS, UsageError, check_outputs, write_json
from .resumable_output import open_output
from .text_commands import (
    LARGEST_WINDOW,
    TermUsage,
    check_decoding,
    decoding_config,
    decoding_in,
    identity,
    load_translator,
    read_pairs,
    sampling_fields,
    warn_about_text,
)

_ALWAYS = ("beam_size", "length_exponent", "max_length", "no_repeat_ngram_size")  # of the search, in --json
_CORPUS = ("src", "tgt", "dataset", "subset", "src_column", "tgt_column")

# Consecutive sentences of the corpus: their sources, and the references by file.
_Part = tuple[list[str], list[list[str | None]]]


def evaluate(flags: Evaluate) -> int:
    """Print the scores, after translating what is no text; return the exit status."""
    _check_systems(flags.systems, flags.paired, flags.ensemble)
    texts_only = all(map(is_text, flags.systems))
    outputs = _outputs(flags.output, len(flags.systems))
    dataset = flags.dataset if flags.dataset is not None and Path(flags.dataset).is_file() else None
    texts = (flags.src, flags.tgt, dataset)
    inputs = [*flags.systems, *flags.ensemble, flags.adapter, flags.glossary, *texts, *flags.references]
    check_outputs([flags.json_file, *outputs], inputs)
    corpus = {name: getattr(flags, name) for name in _CORPUS}
    check_decoding({**flags.decoding, **sampling_fields(flags, flags.beam_size)})
    if texts_only:
        others = {name: getattr(flags, name) for name in ("adapter", "quantize", "mbr", "glossary")}
        _check_unset({**flags.decoding, **flags.languages, **flags.sampling, **others})
    sources = {"src": flags.tgt} if texts_only and flags.src is None else {}  # not read
    pairs = partial(read_pairs, **corpus | sources, split=flags.split)
    number = sum(1 for _ in pairs())
    _check_lengths([*flags.references, *filter(is_text, flags.systems)], number)
    scores.corpus_scores(["a"], [["a"]], flags.tokenize)  # checks --tokenize before minutes of translation
    ensembles = itertools.chain([flags.ensemble], itertools.repeat(()))
    systems = [
        _Text(name) if is_text(name) else _Model(name, flags, number, ensemble)
        for name, ensemble in zip(flags.systems, ensembles, strict=False)
    ]
    scores_of, documents, texts_of, cut = {}, {}, {}, 0
    with ExitStack() as opened:
        files = [
            None
            if path is None
            else opened.enter_context(open_output(path, {"system": system.name, **system.identity}))
            for path, system in zip(outputs or [None] * len(systems), systems, strict=True)
        ]
        while systems:  # a model is freed before the next translates
            system, file = systems.pop(0), files.pop(0)
            total = scores.CorpusScores(flags.tokenize, flags.bootstrap)
            texts_of[system.name] = []
            for sources, references in _parts(pairs(), flags.references):
                written = file.read(len(sources)) if file is not None and file.has(sources) else None
                lines = system.lines(sources, written)
                if file is not None and written is None:
                    file.write(sources, lines)
                if flags.paired:
                    texts_of[system.name] += lines
                else:
                    total.add(lines, references)
            system.terms.print()
            if file is not None:
                file.finish()  # at once: a later system may fail
            if not flags.paired:
                scores_of[system.name] = total.scores()
            documents[system.name] = {"cut": system.cut, **system.settings}
            cut += system.cut
    if flags.paired:  # its resamples need all references at once
        columns = zip(*(references for _, references in _parts(pairs(), flags.references)), strict=True)
        all_references = [list(itertools.chain(*column)) for column in columns]
        scores_of = scores.compare_systems(texts_of, all_references, flags.tokenize)
    _show(scores_of, number, cut)
    if flags.json_file is not None:
        corpus = {name: value for name, value in (corpus | {"split": flags.split}).items() if value is not None}
        corpus |= {"references": [*flags.references]} if flags.references else {}
        systems_document = [
            {"checkpoint": name, **corpus, "pairs": number, **document}
            | {"scores": [score.stated() for score in scores_of[name]]}
            for name, document in documents.items()
        ]
        write_json(flags.json_file, {"systems": systems_document} if len(documents) > 1 else systems_document[0])
    return 0


def _parts(pairs: Iterator[tuple[str, str]], references: Sequence[str]) -> Iterator[_Part]:
    """The corpus in parts. A blank reference beside others is None: a sentence may have fewer than another."""
    further = [read_lines(path) for path in references]
    while part := list(itertools.islice(pairs, LARGEST_WINDOW)):
        files = [[tgt for _, tgt in part], *(list(itertools.islice(lines, len(part))) for lines in further)]
        rows = [
            [text if text.strip() or not any(t.strip() for t in row) else None for text in row]
            for row in zip(*files, strict=True)
        ]
        yield [src for src, _ in part], [list(column) for column in zip(*rows, strict=True)]


class _Text:
    """A text file with translations."""

    def __init__(self, path: str):
        self.name, self.cut, self.terms = path, 0, TermUsage(None)
        self.settings: dict[str, Any] = {}
        self.identity: dict[str, Any] = {}
        self._lines = read_lines(path)

    def lines(self, sources: Sequence[str], written: list[str] | None) -> list[str]:
        """The translations of the next sources."""
        return list(itertools.islice(self._lines, len(sources)))


class _Model:
    """A checkpoint that translates; it counts the sources that it truncates."""

    def __init__(self, path: str, flags: Evaluate, number: int, ensemble: Sequence[str]):
        translator = load_translator(path, flags.adapter, flags.quantize, ensemble)
        self.name, self.cut = " + ".join([path, *ensemble]), 0
        translator = decoding_in(translator, **flags.languages)
        self._translator = translator if flags.glossary is None else translator.with_glossary(flags.glossary)
        self.terms = TermUsage(self._translator.glossary)
        settings = {**flags.decoding, **sampling_fields(flags, flags.beam_size)}
        settings |= {"log_linear": flags.log_linear or None} if ensemble else {}
        self._decoding = decoding_config(self._translator, settings, flags.ignore_generation_config)
        self._mbr = flags.mbr
        self._framework, self._number, self._begun, self._has_warned = flags.framework, number, 0, False
        set_values = flags.languages | {name: getattr(flags, name) for name in ("quantize", "mbr", "glossary")}
        used = {name: getattr(self._decoding, name) for name in flags.decoding}
        plain = asdict(DecodingConfig())
        self.settings = {name: value for name, value in used.items() if name in _ALWAYS or value != plain[name]}
        self.settings |= {name: value for name, value in set_values.items() if value is not None}
        self.settings |= {} if self._decoding.sampling is None else {"sampling": asdict(self._decoding.sampling)}
        self.settings |= {"framework": flags.framework} | ({"log_linear": True} if self._decoding.log_linear else {})
        self.identity = {} if flags.output is None else identity(self._translator, flags, self._decoding)

    def lines(self, sources: Sequence[str], written: list[str] | None) -> list[str]:
        """The translations of the next sources; `written`: those that an interrupted command has written."""
        encoded = self._translator.sources(sources)
        self._has_warned = self._has_warned or warn_about_text(self._translator, encoded, self._begun + 1)
        self.cut += len(encoded.too_long)
        if written is None:
            with progress_bar() as progress:
                hypotheses = self._translator.hypotheses(
                    encoded,
                    self._decoding,
                    self._framework,
                    lambda count: progress("sentences", self._begun + count, self._number),
                    self._begun,
                )
            if self._mbr is not None:
                hypotheses = [rerank(samples, self._mbr) for samples in hypotheses]
            written = [n_best[0].line if n_best else "" for n_best in hypotheses]
        self._begun += len(sources)
        self.terms.add(sources, written)
        return written


def is_text(system: str) -> bool:
    """Whether a system is a text file with its translations, not a checkpoint."""
    return Path(system).exists() and not Path(system).is_dir() and not system.lower().endswith(WEIGHTS)


def _check_systems(systems: Sequence[str], paired: bool, ensemble: Sequence[str]) -> None:
    """Raises: UsageError if the systems cannot be compared."""
    if not systems:
        raise UsageError("evaluate: needs a checkpoint, or a text file with translations")
    if ensemble and is_text(systems[0]):
        raise UsageError(f"--ensemble: translates together with the first system, and {systems[0]} is a text file")
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


def _check_lengths(paths: Iterable[str], pairs: int) -> None:
    """Raises: UsageError if a text file has another number of lines than the corpus has pairs."""
    for path in paths:
        lines = sum(1 for _ in read_lines(path))
        if lines != pairs:
            raise UsageError(f"{path}: has {lines} lines, and there are {pairs} pairs")


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
