"""`twinax translate`, `twinax evaluate`, `twinax score`: text in, text or numbers out."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .usage import (
    CheckpointPath,
    UsageError,
    check_exists,
    check_folder,
    check_picture,
    keep_compiled_programs,
    one_line_errors,
    report_assumed,
)

Framework = Literal["flax", "torch"]
_WINDOW = 256  # lines that are translated before the first of them is printed


def translate(
    checkpoint: CheckpointPath,
    source: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[FILE]")] = None,
    *,
    beam_size: int = 5,
    n_best: int = 1,
    length_exponent: float = 1.0,
    max_length: int | None = None,
    forced_bos: str | None = None,
    scores: bool = False,
    attention: str | None = None,
    framework: Framework = "flax",
) -> int:
    """Translate a file or standard input, line by line: one line each, in order; an empty line stays empty.

    Translations come 256 lines at a time. A line of more tokens than the model takes is reported and cut there. Where
    standard input is a terminal, lines are translated as you type them, until Ctrl-D.

    Example: twinax translate runs/de_en input.de > output.en

    Args:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with tokenizer.json, a .pt or .safetensors.
        source: text file, one sentence per line (.gz too); none: standard input.
        beam_size: hypotheses that are kept in the search; 1 is greedy, the fastest.
        n_best: translations of a line; with more than one, each line begins with the number of its source and a tab.
        length_exponent: scores are sums of log-probabilities over length to this power.
        max_length: longest translation in tokens, with the end; none: what the model takes. A model that is not
            trained well repeats itself until there.
        forced_bos: first token of every translation, or its id; in M2M100, NLLB and mBART-50 the target language's.
        scores: put each translation's score and a tab before it.
        attention: picture to write of where the translation of the first line looks.
        framework: which twin computes.
    """
    check_exists(checkpoint, *filter(None, [source]))
    check_picture("--attention", attention)
    with one_line_errors():
        decoding = import_module("twinax.configs.decoding").DecodingConfig(
            beam_size=beam_size, n_best=n_best, length_exponent=length_exponent, max_length=max_length
        )
        translator, drawn = decoding_in(_load(checkpoint), forced_bos), attention is None

        def show(lines: Sequence[str], first: int, progress: Callable[[int], None] = lambda done: None) -> None:
            nonlocal drawn
            for i in translator.too_long(lines):
                longest = translator.config.max_length
                print(f"twinax: line {first + i}: has more than {longest} tokens; the rest is cut off", file=sys.stderr)
            found = translator.hypotheses(lines, decoding, framework, progress)
            for i, hypotheses in enumerate(found):
                for line in _lines_of(hypotheses, first + i, n_best, scores):
                    print(line, flush=True)
            drawn = drawn or _draw(translator, lines, found, attention)

        if source is None and sys.stdin.isatty():
            print("one sentence per line; Ctrl-D ends", file=sys.stderr)
            for number, line in enumerate(_typed(), 1):
                show([line], number)
        else:
            lines = list(_read(source))
            with import_module("twinax.train.tracking.progress").counted() as counted:
                for start in range(0, len(lines), _WINDOW):
                    window = lines[start : start + _WINDOW]
                    show(window, start + 1, lambda done, before=start: counted("lines", before + done, len(lines)))
    if not drawn:
        raise UsageError(f"--attention {attention}: there is no line with text to draw")
    return 0


def evaluate(
    checkpoint: CheckpointPath,
    *,
    src: str | None = None,
    tgt: str | None = None,
    dataset: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    src_column: str | None = None,
    tgt_column: str | None = None,
    beam_size: int = 5,
    length_exponent: float = 1.0,
    max_length: int | None = None,
    forced_bos: str | None = None,
    tokenize: str = "13a",
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
    output: str | None = None,
    framework: Framework = "flax",
) -> int:
    """Translate a file and score it against its reference: BLEU with case and without, chrF, TER and exact match.

    Scores of sacreBLEU come with their signatures. Exact match is the share of translations that are their reference.

    Example: twinax evaluate runs/de_en --src test.de --tgt test.en

    Args:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with tokenizer.json, a .pt or .safetensors.
        src: text file, one sentence per line (.gz too).
        tgt: its reference translations.
        dataset: instead of both: file with two columns (.tsv .csv .json .jsonl .parquet, or .txt as SCAN's), directory,
            or hub name.
        subset: of a hub name or a directory, as "de-en" of opus_books.
        split: of these; none: test.
        src_column: column, or language in a column "translation".
        tgt_column: the same of the references; .tsv files without both have no header.
        beam_size: hypotheses that are kept in the search; 1 is greedy, the fastest.
        length_exponent: scores are sums of log-probabilities over length to this power.
        max_length: longest translation in tokens, with the end; none: what the model takes.
        forced_bos: first token of every translation, or its id; in M2M100, NLLB and mBART-50 the target language's.
        tokenize: sacreBLEU's tokenisation for BLEU: 13a, zh, intl, char, ja-mecab, ko-mecab, none and others.
        json_file: file to write the same numbers to, as JSON.
        output: file to write the translations to.
        framework: which twin computes.
    """
    check_exists(checkpoint, *filter(None, (src, tgt)))
    for path in (json_file, output):
        check_folder(path)
    with one_line_errors():
        where = {"src": src, "tgt": tgt, "dataset": dataset, "subset": subset}
        where |= {"src_column": src_column, "tgt_column": tgt_column}
        how = {"beam_size": beam_size, "length_exponent": length_exponent, "max_length": max_length}
        decoding = import_module("twinax.configs.decoding").DecodingConfig(**how)
        scores = import_module("twinax.train.scores")
        pairs = list(_pairs(**where, split=split))
        scores.corpus_scores(["a"], ["a"], tokenize)  # before minutes of translation
        translator = decoding_in(_load(checkpoint), forced_bos)
        sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        cut = translator.too_long(sources)
        with import_module("twinax.train.tracking.progress").counted() as counted:
            found = translator.hypotheses(
                sources, decoding, framework, lambda done: counted("sentences", done, len(pairs))
            )
        texts = [_one_line(hypotheses[0].text) if hypotheses else "" for hypotheses in found]
        results = scores.corpus_scores(texts, references, tokenize)
        _show_scores(results, len(pairs), len(cut))
        if output is not None:
            Path(output).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        if json_file is not None:
            given = {name: value for name, value in (where | {"split": split}).items() if value is not None}
            what = {"checkpoint": checkpoint, **given, "pairs": len(pairs), "cut": len(cut)}
            how |= {} if forced_bos is None else {"forced_bos": forced_bos}
            document = {**what, **how, "framework": framework, "scores": [score._asdict() for score in results]}
            Path(json_file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def score(
    checkpoint: CheckpointPath,
    *,
    src: str,
    tgt: str,
    framework: Framework = "flax",
) -> int:
    """Print the log-probability of given translations in nats, a line each.

    Example: twinax score runs/de_en --src test.de --tgt test.en

    Args:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with tokenizer.json, a .pt or .safetensors.
        src: text file, one sentence per line (.gz too).
        tgt: its translations.
        framework: which twin computes.
    """
    check_exists(checkpoint, src, tgt)
    with one_line_errors():
        pairs = list(_pairs(src=src, tgt=tgt))
        translator = _load(checkpoint)
        for value in translator.score([pair[0] for pair in pairs], [pair[1] for pair in pairs], framework):
            print(f"{value:.6f}")
    return 0


def _load(checkpoint: str) -> Any:
    """The translator of a checkpoint, whose compiled programs go into the cache; what was assumed of it is printed.

    Raises:
        CheckpointError, DataError: it has no tokenizers that can be read.
    """
    keep_compiled_programs()
    translator = import_module("twinax.train.translator").load(checkpoint)
    _ = translator.tokenizers
    report_assumed(checkpoint, translator.checkpoint)
    return translator


def decoding_in(translator: Any, forced_bos: str | None) -> Any:
    """The translator whose translations begin with a token, or an id; prints a warning where its family needs one."""
    if forced_bos is not None:
        return translator.with_forced_bos(int(forced_bos) if forced_bos.isdecimal() else forced_bos)
    if translator.lacks_language:
        print(
            f"twinax: {translator.name}: the first token of a translation names its language, and the checkpoint sets "
            "none; set it by --forced-bos, as in --forced-bos deu_Latn (NLLB), __de__ (M2M100) or de_DE (mBART-50)",
            file=sys.stderr,
        )
    return translator


def _read(path: str | None) -> Iterator[str]:
    corpus = import_module("twinax.train.data.corpus")
    return corpus.read_lines(path) if path is not None else corpus.decode_lines(sys.stdin.buffer, "standard input")


def _pairs(*, split: str | None = None, **where: Any) -> Iterator[tuple[str, str]]:
    """Sentence pairs of two files, or of a dataset; that has a split where it is neither a file nor told otherwise."""
    data, name = import_module("twinax.configs.data"), where.get("dataset")
    if split is None and name is not None and not data.is_file(name):
        split = "test"
    config = data.CorpusConfig(**where, **({} if split is None else {"split": split}))
    return import_module("twinax.train.data.corpus").read_pairs(config)


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def _lines_of(hypotheses: Sequence[Any], number: int, n_best: int, scores: bool) -> Iterator[str]:
    """The lines to print of a source; one even where there is no hypothesis."""
    rows = [(h.score, _one_line(h.text)) for h in hypotheses] or [(0.0, "")]
    for value, text in rows:
        yield (f"{number}\t" if n_best > 1 else "") + (f"{value:.6f}\t" if scores else "") + text


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _show_scores(results: Sequence[Any], pairs: int, cut: int) -> None:
    rich = import_module("rich.table")
    columns = rich.Column(""), rich.Column("", justify="right"), rich.Column("signature", overflow="fold")
    table = rich.Table(*columns, title=f"{pairs:,} sentences")
    for found in results:
        table.add_row(found.name, f"{found.value:.2f}", found.signature)
    import_module("rich.console").Console().print(table)
    if cut:
        print(f"twinax: {cut} sources have more tokens than the model takes and were cut off", file=sys.stderr)


def _draw(translator: Any, lines: Sequence[str], found: Sequence[Any], path: str | None) -> bool:
    """Draws the first line that has a translation; False where none has."""
    first = next((i for i, hypotheses in enumerate(found) if hypotheses), None)
    if first is None:
        return False
    looked = translator.attention(lines[first], found[first][0].text)
    plot = import_module("twinax.attention_plot").attention_plot
    plot(looked.weights, looked.targets, looked.sources, path)
    return True
