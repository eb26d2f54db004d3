"""`twinax translate` and `twinax score`: text in, text or numbers out."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from ...configs.data import CorpusConfig, is_file
from ...configs.decoding import BEAM_SIZE, DecodingConfig, SamplingConfig
from ...convert.formats.generation import decoding_with
from ...convert.io.checksums import checksum_of, checksum_of_json
from ...inference.attention_plot import attention_plot
from ...inference.ensemble import Ensemble
from ...inference.minimum_bayes_risk import rerank
from ...inference.text_warnings import text_warnings
from ...inference.translator import Hypothesis, Sources, Translator, load
from ...train.text import corpus
from ...train.text.glossary import Glossary
from ...train.tracking.progress import progress_bar
from ..flags.shared import Quantization, Sampling
from ..flags.text import Evaluate, Score, Translate
from ..process.messages import set_encoding_errors
from ..usage import UsageError, enable_compilation_cache, report_assumed
from .resumable_output import ResumableOutput

_Window = tuple[int, list[str], list[str] | None]  # number of the first line, lines, prefixes
_FIRST_WINDOW, _GROWTH, LARGEST_WINDOW = 256, 4, 16_384  # lines translated before they are printed


def translate(flags: Translate) -> int:
    """Print the translations of a file, of standard input, or of what is entered; return the exit status."""
    set_encoding_errors("strict", sys.stdout)  # a translation is complete or not printed
    if flags.output is not None and os.path.exists(flags.output):
        raise UsageError(f"{flags.output}: exists; remove it, or name another file")
    settings = {
        **flags.decoding,
        "log_linear": flags.log_linear or None,
        "n_best": flags.n_best,
        **sampling_fields(flags, flags.beam_size, flags.n_best),
    }
    check_decoding(settings)
    translator = load_translator(flags.checkpoint, flags.adapter, flags.quantize, flags.ensemble)
    translator = decoding_in(translator, **flags.languages)
    translator = translator if flags.glossary is None else translator.with_glossary(flags.glossary)
    terms = TermUsage(translator.glossary)
    if flags.forbidden_words is not None:
        settings["forbidden_sequences"] = translator.forbidden(corpus.read_lines(flags.forbidden_words))
    decoding = decoding_config(translator, settings, flags.ignore_generation_config)
    prefixes = None if flags.prefix is None else corpus.read_lines(flags.prefix)
    printed = decoding.n_best if flags.mbr is None else flags.n_best
    picture_done = flags.attention is None

    def lines_of(
        sources: Sources,
        first: int,
        beginnings: Sequence[str] | None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> list[str]:
        nonlocal picture_done
        for i in sources.too_long:
            longest = translator.config.max_length
            print(f"twinax: line {first + i}: has more than {longest} tokens and was truncated", file=sys.stderr)
        results = translator.hypotheses(sources, decoding, flags.framework, progress, first - 1, beginnings)
        if flags.mbr is not None:
            results = [rerank(samples, flags.mbr)[: flags.n_best] for samples in results]
        terms.add(sources.texts, [n_best[0].text if n_best else "" for n_best in results])
        picture_done = picture_done or _draw(translator, sources.texts, results, flags.attention)
        numbered = enumerate(results, first)
        return [line for i, n_best in numbered for line in _lines_of(n_best, i, printed, flags.scores)]

    if flags.output is None and flags.source is None and sys.stdin is not None and sys.stdin.isatty():
        print("one sentence per line; Ctrl-D ends", file=sys.stderr)
        for number, line in enumerate(_terminal_lines(), 1):
            sources = translator.sources([line])
            warn_about_text(translator, sources)
            print(*lines_of(sources, number, _next_prefixes(flags.prefix, prefixes, 1)), sep="\n", flush=True)
    else:
        total, has_warned, begin, before = _number_of_lines(flags.source), False, time.monotonic(), 0
        if flags.prefix is not None and total not in (None, _number_of_lines(flags.prefix)):
            raise UsageError(f"--prefix {flags.prefix}: must have as many lines as {flags.source}, empty for no prefix")
        with _output(translator, flags, decoding) as output, progress_bar() as progress:

            def show(count: int) -> None:
                rate = (count - before) / max(time.monotonic() - begin, 1e-3)
                progress(f"lines, {rate:,.0f} per second", count, total)

            def remaining() -> Iterator[_Window]:
                nonlocal before
                for first, texts in windows(_source_lines(flags.source)):
                    beginnings = _next_prefixes(flags.prefix, prefixes, len(texts))
                    if output is not None and output.has([*texts, *(beginnings or ())]):
                        before = first + len(texts) - 1
                    else:
                        yield first, texts, beginnings

            for (first, texts, beginnings), sources in _encoded(remaining(), translator, flags.source is not None):
                has_warned = has_warned or warn_about_text(translator, sources, first)
                lines = lines_of(sources, first, beginnings, lambda count, first=first: show(first - 1 + count))
                show(first - 1 + len(texts))  # blank ones included
                if output is not None:
                    output.write([*texts, *(beginnings or ())], lines)
                elif lines:
                    print(*lines, sep="\n", flush=True)
            if output is not None:
                output.finish()
    if prefixes is not None and next(prefixes, None) is not None:
        raise UsageError(f"--prefix {flags.prefix}: has more lines than the source")
    if not picture_done:
        raise UsageError(f"--attention {flags.attention}: no line has text to draw")
    terms.print()
    return 0


def _output(translator: Translator, flags: Translate, decoding: DecodingConfig) -> ResumableOutput | nullcontext[None]:
    """The file of `--output`; None without it."""
    if flags.output is None:
        return nullcontext()
    settings = identity(translator, flags, decoding)
    settings |= {"checkpoint": flags.checkpoint, "scores": flags.scores, "n_best": flags.n_best}
    return ResumableOutput(flags.output, settings)


class TermUsage:
    """Counts the terms of a glossary in sources, and those whose target term is in the translation."""

    def __init__(self, glossary: Glossary | None):
        self._glossary, self._terms, self._translated = glossary, 0, 0

    def add(self, sources: Sequence[str], translations: Sequence[str]) -> None:
        """Count those of some sentences."""
        if self._glossary is None:
            return
        for source, translation in zip(sources, translations, strict=True):
            terms, translated = self._glossary.usage(source, translation)
            self._terms, self._translated = self._terms + terms, self._translated + translated

    def print(self) -> None:
        """Print the counts, if there was a term."""
        if self._glossary is not None and self._terms:
            print(
                f"twinax: {self._glossary.name}: {self._terms:,} terms in the sources, {self._translated:,} of them "
                "translated by their target term",
                file=sys.stderr,
            )


def _next_prefixes(path: str | None, prefixes: Iterator[str] | None, number: int) -> list[str] | None:
    """The next lines of the file of prefixes. Raises: UsageError if it has fewer."""
    if prefixes is None:
        return None
    lines = list(islice(prefixes, number))
    if len(lines) < number:
        raise UsageError(f"--prefix {path}: has fewer lines than the source; an empty line is no prefix")
    return lines


def sampling_fields(flags: Sampling, beam_size: int | None, n_best: int = 1) -> dict[str, Any]:
    """The fields of `DecodingConfig` that the flags of sampling set; none without them.

    Raises:
        UsageError: they contradict the beam size, or the number of hypotheses.
    """
    values = dict(flags.sampling)
    if not values and flags.mbr is not None:
        raise UsageError(f"--mbr {flags.mbr}: compares samples; set their number with --samples")
    if not values:
        return {}
    if beam_size is not None or (n_best != 1 and flags.mbr is None):
        first, other = next(iter(values)).replace("_", "-"), "--n-best" if beam_size is None else "--beam-size"
        raise UsageError(f"--{first}: samples, without a beam; omit {other}, and set --samples for several per line")
    samples = values.pop("samples", 1)
    if samples < n_best:
        least = "1" if n_best == 1 else f"--n-best {n_best}"
        raise UsageError(f"--samples {samples}: must be at least {least}")
    return {"beam_size": samples, "n_best": samples, "sampling": SamplingConfig(**values)}


def windows(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines) of windows that grow, so that output begins soon and padding stays small."""
    first, size = 1, _FIRST_WINDOW
    while window := list(islice(lines, size)):
        yield first, window
        first, size = first + len(window), min(_GROWTH * size, LARGEST_WINDOW)


def _encoded(remaining: Iterator[_Window], translator: Translator, ahead: bool) -> Iterator[tuple[_Window, Sources]]:
    """The windows with their ids. `ahead`: a thread makes those of the next one, for which a pipe would wait."""
    with ThreadPoolExecutor(1) as thread:
        tasks: list[tuple[_Window, Future[Sources]]] = []
        for window in remaining:
            tasks.append((window, thread.submit(translator.sources, window[1])))
            if len(tasks) > ahead:
                window, sources = tasks.pop(0)
                yield window, sources.result()
        yield from ((window, sources.result()) for window, sources in tasks)


def _number_of_lines(path: str | None) -> int | None:
    """The number of lines of a text file, for the progress; None of standard input."""
    return None if path is None else sum(1 for _ in corpus.read_lines(path))


def identity(translator: Translator, flags: Translate | Evaluate, decoding: DecodingConfig) -> dict[str, Any]:
    """What determines a translation: the weights and the settings."""
    every = [member.checkpoint.arrays for member in translator.members]
    weights = [checksum_of_json({name: checksum_of(np.asarray(arrays[name])) for name in arrays}) for arrays in every]
    settings = {name: getattr(flags, name) for name in ("adapter", "quantize", "framework", "mbr")} | flags.languages
    settings["glossary"] = translator.glossary and translator.glossary.digest()
    return {"weights": weights, "decoding": asdict(decoding), **settings}


def score(flags: Score) -> int:
    """Print the log-probabilities; return the exit status."""
    pairs = list(read_pairs(src=flags.src, tgt=flags.tgt))
    translator = load_translator(flags.checkpoint, flags.adapter, ensemble=flags.ensemble)
    translator = decoding_in(translator, flags.src_lang, flags.tgt_lang, None)
    sources, targets = translator.sources([pair[0] for pair in pairs]), [pair[1] for pair in pairs]
    warn_about_text(translator, sources)
    for value in translator.score(sources, targets, flags.framework, f"{flags.src} and {flags.tgt}, line"):
        print(f"{value:.6f}")
    return 0


def load_translator(
    checkpoint: str, adapter: str | None, quantize: Quantization | None = None, ensemble: Sequence[str] = ()
) -> Translator:
    """Load the translator of a checkpoint, enable the compilation cache and print assumed settings.

    `ensemble`: further checkpoints that translate with it.

    Raises:
        CheckpointError, DataError: the checkpoint has no readable tokenizers.
    """
    enable_compilation_cache()
    translator = load(checkpoint, adapter=adapter, quantize=quantize)
    _ = translator.tokenizers
    report_assumed(checkpoint, translator.checkpoint)
    if not ensemble:
        return translator
    return Ensemble([translator, *(load_translator(path, None, quantize) for path in ensemble)])


def decoding_in(
    translator: Translator, src_lang: str | None, tgt_lang: str | None, forced_bos: str | None
) -> Translator:
    """The translator for these languages, or with a forced first token, by token or id.

    It warns if the model needs a language and has none.
    """
    if src_lang is not None or tgt_lang is not None:
        translator = translator.with_languages(src_lang, tgt_lang)
    if forced_bos is not None:
        return translator.with_forced_bos(int(forced_bos) if forced_bos.isdecimal() else forced_bos)
    if translator.lacks_language:
        print(
            f"twinax: {translator.name}: a translation's first token selects the language, and the checkpoint sets "
            "none; set it by --tgt-lang, as in --tgt-lang deu_Latn (NLLB), de (M2M100) or de_DE (mBART, mBART-50)",
            file=sys.stderr,
        )
    return translator


def warn_about_text(translator: Translator, sources: Sources, first: int = 1) -> bool:
    """Warn of signs that these sources will be translated badly: unknown tokens, no language, no task prefix.

    `first`: the number of the first line. Return whether there was a warning.
    """
    warnings = [*text_warnings(translator, sources, first)]
    for warning in warnings:
        print(f"twinax: {warning}", file=sys.stderr)
    return bool(warnings)


def check_decoding(flags: Mapping[str, Any]) -> None:
    """Raises: ConfigError if a flag has an invalid value, before the checkpoint is read."""
    fields = {name: value for name, value in flags.items() if value is not None}
    DecodingConfig(**{"beam_size": max(flags.get("n_best", 1), 1), **fields})


def decoding_config(translator: Translator, flags: Mapping[str, Any], ignore: bool) -> DecodingConfig:
    """The decoding settings: of the flags, then of the directory, which are printed, then the defaults.

    `ignore`: the directory's are not applied; the defaults are printed in their place.
    """
    generation = None if ignore else translator.generation
    generation_fields = {} if generation is None else generation.fields
    if generation is not None:
        print(f"twinax: {translator.name}: {generation}", file=sys.stderr)
    if ignore and translator.checkpoint.layout is not None:
        defaults = {"beam_size": BEAM_SIZE, "max_length": translator.config.max_length}
        text = ", ".join(f"{name}={value}" for name, value in defaults.items())
        print(f"twinax: {translator.name}: {text} (the defaults of twinax)", file=sys.stderr)
    flag_fields = {name: value for name, value in flags.items() if value is not None}
    return decoding_with({"beam_size": BEAM_SIZE, **generation_fields}, flag_fields)


def _source_lines(path: str | None) -> Iterator[str]:
    if path is not None:
        return corpus.read_lines(path)
    if sys.stdin is None:
        raise UsageError("standard input is closed; pass a file")
    return corpus.decode_lines(sys.stdin.buffer, "standard input")


def read_pairs(*, split: str | None = None, **files: Any) -> Iterator[tuple[str, str]]:
    """Sentence pairs of two files or of a dataset; the default split, except for single files, is test."""
    name = files.get("dataset")
    if split is None and name is not None and not is_file(name):
        split = "test"
    return corpus.read_pairs(CorpusConfig(**files, **({} if split is None else {"split": split})))


def _terminal_lines() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def _lines_of(hypotheses: Sequence[Hypothesis], number: int, n_best: int, scores: bool) -> Iterator[str]:
    """The lines to print for a source; one line even if there is no hypothesis."""
    rows = [(h.score, h.line) for h in hypotheses] or [(0.0, "")]
    for value, text in rows:
        yield (f"{number}\t" if n_best > 1 else "") + (f"{value:.6f}\t" if scores else "") + text


def _draw(translator: Translator, lines: Sequence[str], results: Sequence[Any], path: str | None) -> bool:
    """Draw the attention of the first line with a translation; False if there is none."""
    first = next((i for i, hypotheses in enumerate(results) if hypotheses), None)
    if first is None:
        return False
    attention = translator.attention(lines[first], results[first][0])
    attention_plot(attention.weights, attention.targets, attention.sources, path)
    return True
