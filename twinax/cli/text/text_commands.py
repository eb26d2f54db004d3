"""`twinax translate` and `twinax score`: text in, text or numbers out."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

import tyro

from ..process.importing import import_uncollected
from ..process.messages import set_encoding_errors
from ..usage import (
    CheckpointPath,
    UsageError,
    check_exists,
    check_outputs,
    check_picture,
    enable_compilation_cache,
    one_line_errors,
    report_assumed,
)

Framework = Literal["flax", "torch"]
Quantization = Literal["int8"]
_WINDOW = 256  # lines translated before the first one is printed


def translate(
    checkpoint: CheckpointPath,
    source: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[FILE]")] = None,
    *,
    adapter: str | None = None,
    beam_size: int | None = None,
    n_best: int = 1,
    length_exponent: float | None = None,
    max_length: int | None = None,
    no_repeat_ngram_size: int | None = None,
    ignore_generation_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    forced_bos: str | None = None,
    scores: bool = False,
    attention: str | None = None,
    quantize: Quantization | None = None,
    framework: Framework = "flax",
) -> int:
    """Translate a file or standard input line by line; an empty line gives an empty line.

    Translations are printed 256 lines at a time. A line with more tokens than the model's maximum is truncated, with a
    warning. If standard input is a terminal, each line is translated as you enter it; Ctrl-D ends.

    Example: twinax translate runs/de_en input.de > output.en

    Args:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with its tokenizer, a .pt or .safetensors
            file, a fairseq checkpoint or its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        source: text file, one sentence per line (.gz too); default: standard input.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        beam_size: beam size; 1 is greedy decoding, the fastest. Default: the Hugging Face directory's (1 if
            it sets none), else 5.
        n_best: translations per line; if more than 1, each output line begins with the source line number and a tab.
        length_exponent: scores are sums of log-probabilities divided by length to this power. Default: the
            directory's, else 1.
        max_length: maximum length of a translation in tokens, including EOS; default: the directory's (20 if it sets
            none), else the model's maximum. A poorly trained model repeats itself up to this length.
        no_repeat_ngram_size: n-grams of this size occur once per translation; 0: no rule. Default: the directory's.
        ignore_generation_config: ignore the directory's settings, such as num_beams and bad_words_ids.
        src_lang: language of the source in a multilingual model: deu_Latn (NLLB), de (M2M100), de_DE (mBART).
        tgt_lang: language of the translations; Marian's too, such as fra for >>fra<<.
        forced_bos: first token of every translation, or its id.
        scores: print each translation's score and a tab before it.
        attention: picture to write of the attention weights of the first translation (.png, .pdf, .svg).
        quantize: int8 computes products with weights in 8-bit integers, which is faster on a CPU with
            AVX512-VNNI or AMX; some translations change.
        framework: the twin that computes.
    """
    check_quantization(quantize, framework)
    check_exists(checkpoint, *filter(None, (source, adapter)))
    check_picture("--attention", attention)
    check_outputs([attention], [source])
    set_encoding_errors("strict", sys.stdout)  # a translation is complete or not printed
    with one_line_errors():
        flags = {"beam_size": beam_size, "length_exponent": length_exponent, "max_length": max_length}
        flags |= {"n_best": n_best, "no_repeat_ngram_size": no_repeat_ngram_size}
        check_decoding(flags)
        translator = decoding_in(load_translator(checkpoint, adapter, quantize), src_lang, tgt_lang, forced_bos)
        decoding = decoding_config(translator, flags, ignore_generation_config)
        picture_done = attention is None

        def show(lines: Sequence[str], first: int, progress: Callable[[int], None] = lambda count: None) -> None:
            nonlocal picture_done
            for i in translator.too_long(lines):
                longest = translator.config.max_length
                print(f"twinax: line {first + i}: has more than {longest} tokens and was truncated", file=sys.stderr)
            results = translator.hypotheses(lines, decoding, framework, progress)
            for i, hypotheses in enumerate(results):
                for line in _lines_of(hypotheses, first + i, n_best, scores):
                    print(line, flush=True)
            picture_done = picture_done or _draw(translator, lines, results, attention)

        if source is None and sys.stdin is not None and sys.stdin.isatty():
            print("one sentence per line; Ctrl-D ends", file=sys.stderr)
            for number, line in enumerate(_terminal_lines(), 1):
                warn_about_text(translator, [line])
                show([line], number)
        else:
            lines = list(_source_lines(source))
            warn_about_text(translator, lines)
            with import_module("twinax.train.tracking.progress").progress_bar() as progress:
                for start in range(0, len(lines), _WINDOW):
                    window = lines[start : start + _WINDOW]
                    show(window, start + 1, lambda count, start=start: progress("lines", start + count, len(lines)))
    if not picture_done:
        raise UsageError(f"--attention {attention}: no line has text to draw")
    return 0


def score(
    checkpoint: CheckpointPath,
    *,
    adapter: str | None = None,
    src: str,
    tgt: str,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    framework: Framework = "flax",
) -> int:
    """Print the log-probability of each translation in nats, one per line.

    Example: twinax score runs/de_en --src test.de --tgt test.en

    Args:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with its tokenizer, a .pt or .safetensors
            file, a fairseq checkpoint or its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        src: text file, one sentence per line (.gz too).
        tgt: its translations.
        src_lang: language of the source in a multilingual model: deu_Latn (NLLB), de (M2M100), de_DE (mBART).
        tgt_lang: language of the translations; Marian's too, such as fra for >>fra<<.
        framework: the twin that computes.
    """
    check_exists(checkpoint, src, tgt, *filter(None, [adapter]))
    with one_line_errors():
        pairs = list(read_pairs(src=src, tgt=tgt))
        translator = decoding_in(load_translator(checkpoint, adapter), src_lang, tgt_lang, None)
        sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        warn_about_text(translator, sources)
        for value in translator.score(sources, targets, framework, f"{src} and {tgt}, line"):
            print(f"{value:.6f}")
    return 0


def check_quantization(quantize: Quantization | None, framework: Framework) -> None:
    """Raises: UsageError if the framework cannot compute with quantized weights."""
    if quantize is not None and framework != "flax":
        raise UsageError(f"--quantize {quantize}: needs --framework flax")


def load_translator(checkpoint: str, adapter: str | None, quantize: Quantization | None = None) -> Any:
    """Load the translator of a checkpoint, enable the compilation cache and print assumed settings.

    Raises:
        CheckpointError, DataError: the checkpoint has no readable tokenizers.
    """
    enable_compilation_cache()
    translator = import_uncollected("twinax.inference.translator").load(checkpoint, adapter=adapter, quantize=quantize)
    _ = translator.tokenizers
    report_assumed(checkpoint, translator.checkpoint)
    return translator


def decoding_in(translator: Any, src_lang: str | None, tgt_lang: str | None, forced_bos: str | None) -> Any:
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


def warn_about_text(translator: Any, sources: Sequence[str]) -> None:
    """Warn of signs that these sources will be translated badly: unknown tokens, no language, no task prefix."""
    for warning in import_module("twinax.inference.text_warnings").text_warnings(translator, sources):
        print(f"twinax: {warning}", file=sys.stderr)


def check_decoding(flags: Mapping[str, Any]) -> None:
    """Raises: ConfigError if a flag has an invalid value, before the checkpoint is read."""
    fields = {name: value for name, value in flags.items() if value is not None}
    import_module("twinax.configs.decoding").DecodingConfig(**{"beam_size": max(flags.get("n_best", 1), 1), **fields})


def decoding_config(translator: Any, flags: Mapping[str, Any], ignore: bool) -> Any:
    """The decoding settings: of the flags, then of the directory, which are printed, then the defaults.

    `ignore`: the directory's are not applied; the defaults are printed in their place.
    """
    config = import_module("twinax.configs.decoding")
    generation = None if ignore else translator.generation
    generation_fields = {} if generation is None else generation.fields
    if generation is not None:
        print(f"twinax: {translator.name}: {generation}", file=sys.stderr)
    if ignore and translator.checkpoint.layout is not None:
        defaults = {"beam_size": config.BEAM_SIZE, "max_length": translator.config.max_length}
        text = ", ".join(f"{name}={value}" for name, value in defaults.items())
        print(f"twinax: {translator.name}: {text} (the defaults of twinax)", file=sys.stderr)
    flag_fields = {name: value for name, value in flags.items() if value is not None}
    return config.DecodingConfig(**{"beam_size": config.BEAM_SIZE, **generation_fields, **flag_fields})


def _source_lines(path: str | None) -> Iterator[str]:
    corpus = import_module("twinax.train.text.corpus")
    if path is not None:
        return corpus.read_lines(path)
    if sys.stdin is None:
        raise UsageError("standard input is closed; pass a file")
    return corpus.decode_lines(sys.stdin.buffer, "standard input")


def read_pairs(*, split: str | None = None, **corpus: Any) -> Iterator[tuple[str, str]]:
    """Sentence pairs of two files or of a dataset; the default split, except for single files, is test."""
    data = import_module("twinax.configs.data")
    name = corpus.get("dataset")
    if split is None and name is not None and not data.is_file(name):
        split = "test"
    config = data.CorpusConfig(**corpus, **({} if split is None else {"split": split}))
    return import_module("twinax.train.text.corpus").read_pairs(config)


def _terminal_lines() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def _lines_of(hypotheses: Sequence[Any], number: int, n_best: int, scores: bool) -> Iterator[str]:
    """The lines to print for a source; one line even if there is no hypothesis."""
    rows = [(h.score, one_line(h.text)) for h in hypotheses] or [(0.0, "")]
    for value, text in rows:
        yield (f"{number}\t" if n_best > 1 else "") + (f"{value:.6f}\t" if scores else "") + text


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.splitlines())


def _draw(translator: Any, lines: Sequence[str], results: Sequence[Any], path: str | None) -> bool:
    """Draw the attention of the first line with a translation; False if there is none."""
    first = next((i for i, hypotheses in enumerate(results) if hypotheses), None)
    if first is None:
        return False
    attention = translator.attention(lines[first], results[first][0])
    plot = import_module("twinax.inference.attention_plot").attention_plot
    plot(attention.weights, attention.targets, attention.sources, path)
    return True
