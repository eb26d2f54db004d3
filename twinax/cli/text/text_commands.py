"""`twinax translate` and `twinax score`: text in, text or numbers out."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...configs.data import CorpusConfig, is_file
from ...configs.decoding import BEAM_SIZE, DecodingConfig
from ...inference.attention_plot import attention_plot
from ...inference.text_warnings import text_warnings
from ...inference.translator import Hypothesis, Sources, Translator, load
from ...train.text import corpus
from ...train.tracking.progress import progress_bar
from ..flags.shared import Quantization
from ..flags.text import Score, Translate
from ..process.messages import set_encoding_errors
from ..usage import UsageError, enable_compilation_cache, report_assumed

_WINDOW = 256  # lines translated before the first one is printed


def translate(flags: Translate) -> int:
    """Print the translations of a file, of standard input, or of what is entered; return the exit status."""
    set_encoding_errors("strict", sys.stdout)  # a translation is complete or not printed
    settings = {**flags.decoding, "n_best": flags.n_best}
    check_decoding(settings)
    translator = load_translator(flags.checkpoint, flags.adapter, flags.quantize)
    translator = decoding_in(translator, **flags.languages)
    decoding = decoding_config(translator, settings, flags.ignore_generation_config)
    picture_done = flags.attention is None

    def show(sources: Sources, first: int, progress: Callable[[int], None] = lambda count: None) -> None:
        nonlocal picture_done
        for i in sources.too_long:
            longest = translator.config.max_length
            print(f"twinax: line {first + i}: has more than {longest} tokens and was truncated", file=sys.stderr)
        results = translator.hypotheses(sources, decoding, flags.framework, progress)
        for i, hypotheses in enumerate(results):
            for line in _lines_of(hypotheses, first + i, flags.n_best, flags.scores):
                print(line, flush=True)
        picture_done = picture_done or _draw(translator, sources.texts, results, flags.attention)

    if flags.source is None and sys.stdin is not None and sys.stdin.isatty():
        print("one sentence per line; Ctrl-D ends", file=sys.stderr)
        for number, line in enumerate(_terminal_lines(), 1):
            sources = translator.sources([line])
            warn_about_text(translator, sources)
            show(sources, number)
    else:
        sources = translator.sources(_source_lines(flags.source))
        warn_about_text(translator, sources)
        total = len(sources.texts)
        with progress_bar() as progress:
            for start in range(0, total, _WINDOW):
                window = sources.window(start, _WINDOW)
                show(window, start + 1, lambda count, start=start: progress("lines", start + count, total))
    if not picture_done:
        raise UsageError(f"--attention {flags.attention}: no line has text to draw")
    return 0


def score(flags: Score) -> int:
    """Print the log-probabilities; return the exit status."""
    pairs = list(read_pairs(src=flags.src, tgt=flags.tgt))
    translator = load_translator(flags.checkpoint, flags.adapter)
    translator = decoding_in(translator, flags.src_lang, flags.tgt_lang, None)
    sources, targets = translator.sources([pair[0] for pair in pairs]), [pair[1] for pair in pairs]
    warn_about_text(translator, sources)
    for value in translator.score(sources, targets, flags.framework, f"{flags.src} and {flags.tgt}, line"):
        print(f"{value:.6f}")
    return 0


def load_translator(checkpoint: str, adapter: str | None, quantize: Quantization | None = None) -> Translator:
    """Load the translator of a checkpoint, enable the compilation cache and print assumed settings.

    Raises:
        CheckpointError, DataError: the checkpoint has no readable tokenizers.
    """
    enable_compilation_cache()
    translator = load(checkpoint, adapter=adapter, quantize=quantize)
    _ = translator.tokenizers
    report_assumed(checkpoint, translator.checkpoint)
    return translator


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


def warn_about_text(translator: Translator, sources: Sources) -> None:
    """Warn of signs that these sources will be translated badly: unknown tokens, no language, no task prefix."""
    for warning in text_warnings(translator, sources):
        print(f"twinax: {warning}", file=sys.stderr)


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
    return DecodingConfig(**{"beam_size": BEAM_SIZE, **generation_fields, **flag_fields})


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
    rows = [(h.score, one_line(h.text)) for h in hypotheses] or [(0.0, "")]
    for value, text in rows:
        yield (f"{number}\t" if n_best > 1 else "") + (f"{value:.6f}\t" if scores else "") + text


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.splitlines())


def _draw(translator: Translator, lines: Sequence[str], results: Sequence[Any], path: str | None) -> bool:
    """Draw the attention of the first line with a translation; False if there is none."""
    first = next((i for i, hypotheses in enumerate(results) if hypotheses), None)
    if first is None:
        return False
    attention = translator.attention(lines[first], results[first][0])
    attention_plot(attention.weights, attention.targets, attention.sources, path)
    return True
