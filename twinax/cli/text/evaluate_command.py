"""`twinax evaluate`: scores of one system, or of several in comparison."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from ..usage import WEIGHTS, UsageError, check_exists, check_outputs, one_line_errors, write_json, write_text
from .text_commands import (
    Framework,
    Quantization,
    check_decoding,
    check_quantization,
    decoding_config,
    decoding_in,
    load_translator,
    one_line,
    read_pairs,
    warn_about_text,
)

Systems = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SYSTEM [SYSTEM ...]")]
_Flag = tyro.conf.FlagCreatePairsOff


def evaluate(
    systems: Systems,
    *,
    adapter: str | None = None,
    src: str | None = None,
    tgt: str | None = None,
    references: tuple[str, ...] = (),
    dataset: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    src_column: str | None = None,
    tgt_column: str | None = None,
    beam_size: int | None = None,
    length_exponent: float | None = None,
    max_length: int | None = None,
    no_repeat_ngram_size: int | None = None,
    ignore_generation_config: Annotated[bool, _Flag] = False,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    forced_bos: str | None = None,
    tokenize: str = "13a",
    bootstrap: Annotated[bool, _Flag] = False,
    paired: Annotated[bool, _Flag] = False,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
    output: str | None = None,
    quantize: Quantization | None = None,
    framework: Framework = "flax",
) -> int:
    """Translate a file and score it against its reference: cased and lowercased BLEU, chrF, TER and exact match.

    sacreBLEU's scores are printed with their signatures. Exact match is the percentage of translations equal to a
    reference. Several systems are compared with --paired.

    Example: twinax evaluate runs/de_en --src test.de --tgt test.en

    Args:
        systems: runs, checkpoints, Hugging Face directories with their tokenizers, .pt or .safetensors files, fairseq
            checkpoints or their directories; or text files with translations, one per line (.gz too).
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        src: text file, one sentence per line (.gz too); not needed if all systems are text files.
        tgt: its reference translations.
        references: files with further reference translations.
        dataset: instead of --src and --tgt: file with two columns (.tsv .csv .json .jsonl .parquet, or .txt in SCAN's
            format), directory, or hub name.
        subset: subset of a hub dataset or directory, such as "de-en" of opus_books.
        split: split of a hub dataset or directory; default: test.
        src_column: source column, or the source language in a column "translation".
        tgt_column: the same for references; without both, a .tsv file has no header.
        beam_size: beam size; 1 is greedy decoding, the fastest. Default: the Hugging Face directory's (1 if
            it sets none), else 5.
        length_exponent: scores are sums of log-probabilities divided by length to this power. Default: the
            directory's, else 1.
        max_length: maximum length of a translation in tokens, including EOS; default: the directory's (20 if it sets
            none), else the model's maximum.
        no_repeat_ngram_size: n-grams of this size occur once per translation; 0: no rule. Default: the directory's.
        ignore_generation_config: ignore the directory's settings, such as num_beams and bad_words_ids.
        src_lang: language of the source in a multilingual model: deu_Latn (NLLB), de (M2M100), de_DE (mBART).
        tgt_lang: language of the translations; Marian's too, such as fra for >>fra<<.
        forced_bos: first token of every translation, or its id.
        tokenize: sacreBLEU's tokenization for BLEU: 13a, zh, intl, char, ja-mecab, ko-mecab, none and others.
        json_file: JSON file to write the results to.
        output: file to write the translations to; of several systems, FILE.1, FILE.2 and so on.
        bootstrap: print 95 % confidence intervals, of 1,000 resamples of the sentences.
        paired: compare the systems with the first one, by paired bootstrap with 1,000 resamples.
        quantize: int8 computes products with weights in 8-bit integers, which is faster on a CPU with
            AVX512-VNNI or AMX; some translations change.
        framework: the twin that computes.
    """
    check_quantization(quantize, framework)
    check_exists(*systems, *filter(None, (src, tgt, adapter)), *references)
    _check_systems(systems, paired)
    texts_only = all(map(is_text, systems))
    outputs = _outputs(output, len(systems))
    texts = (src, tgt, dataset if dataset is not None and Path(dataset).is_file() else None)
    check_outputs([json_file, *outputs], [*systems, adapter, *texts, *references])
    with one_line_errors():
        corpus = {"src": src, "tgt": tgt, "dataset": dataset, "subset": subset}
        corpus |= {"src_column": src_column, "tgt_column": tgt_column}
        flags = {"beam_size": beam_size, "length_exponent": length_exponent, "max_length": max_length}
        flags |= {"no_repeat_ngram_size": no_repeat_ngram_size}
        check_decoding(flags)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang, "forced_bos": forced_bos}
        if texts_only:
            _check_unset(flags | languages | {"adapter": adapter, "quantize": quantize})
        scores = import_module("twinax.inference.scores")
        sources = {"src": tgt} if texts_only and src is None else {}  # not read
        pairs = list(read_pairs(**corpus | sources, split=split))
        all_references = _all_references(
            [[pair[1] for pair in pairs], *(_lines(path, len(pairs)) for path in references)]
        )
        scores.corpus_scores(["a"], [["a"]], tokenize)  # checks --tokenize before minutes of translation
        system_texts = {system: _lines(system, len(pairs)) for system in systems if is_text(system)}
        translators = {
            system: decoding_in(load_translator(system, adapter, quantize), src_lang, tgt_lang, forced_bos)
            for system in systems
            if system not in system_texts
        }
        decodings = {
            system: decoding_config(translator, flags, ignore_generation_config)
            for system, translator in translators.items()
        }
        results = []
        for system, path in zip(systems, outputs or [None] * len(systems), strict=True):
            if system in system_texts:
                results.append(_Translations(system, system_texts[system]))
            else:
                translator, decoding = translators.pop(system), decodings[system]
                settings = {name: getattr(decoding, name) for name in flags}
                set_values = languages | {"quantize": quantize}
                settings |= {name: value for name, value in set_values.items() if value is not None}
                texts, cut = _translate(translator, [pair[0] for pair in pairs], decoding, framework)
                results.append(_Translations(system, texts, cut, {**settings, "framework": framework}))
            if path is not None:  # at once: a later system may fail
                results[-1].write(path)
        texts_of = {result.system: result.texts for result in results}
        if paired:
            scores_of = scores.compare_systems(texts_of, all_references, tokenize)
        else:
            (result,) = results
            scores_of = {result.system: scores.corpus_scores(result.texts, all_references, tokenize, bootstrap)}
        _show(scores_of, len(pairs), sum(result.cut for result in results))
        if json_file is not None:
            corpus = {name: value for name, value in (corpus | {"split": split}).items() if value is not None}
            corpus |= {"references": [*references]} if references else {}
            documents = [result.document(corpus, len(pairs), scores_of[result.system]) for result in results]
            document = {"systems": documents} if len(documents) > 1 else documents[0]
            write_json(json_file, document)
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
    lines = list(import_module("twinax.train.text.corpus").read_lines(path))
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


def _translate(translator: Any, sources: Sequence[str], decoding: Any, framework: Framework) -> tuple[list[str], int]:
    """(translations, number of sources that were truncated)."""
    truncated = translator.too_long(sources)
    warn_about_text(translator, sources)
    with import_module("twinax.train.tracking.progress").progress_bar() as progress:
        hypotheses = translator.hypotheses(
            sources, decoding, framework, lambda count: progress("sentences", count, len(sources))
        )
    return [one_line(n_best[0].text) if n_best else "" for n_best in hypotheses], len(truncated)


def _show(scores_of: Mapping[str, Sequence[Any]], pairs: int, truncated: int) -> None:
    """Print a table: a row per score of one system, or per system and score."""
    rich = import_module("rich.table")
    system = [rich.Column("system", overflow="fold")] if len(scores_of) > 1 else []
    columns = rich.Column(""), rich.Column("", justify="right"), rich.Column("signature", overflow="fold")
    table = rich.Table(*system, *columns, title=f"sentences: {pairs:,}")
    for scores in zip(*scores_of.values(), strict=True):
        for name, score in zip(scores_of, scores, strict=True):
            first = name == next(iter(scores_of))
            cells = [score.name if first else "", _value(score), score.signature if first else ""]
            table.add_row(*([name] if system else []), *cells)
    import_module("rich.console").Console().print(table)
    if truncated:
        noun = "source" if truncated == 1 else "sources"
        print(f"twinax: truncated {truncated} {noun} with more tokens than the model's maximum", file=sys.stderr)


def _value(score: Any) -> str:
    """The score, its interval, and its p-value."""
    text = f"{score.value:.2f}"
    text += f" ({score.mean:.2f} ± {score.interval:.2f})" if score.interval is not None else ""
    return text + (f", p = {score.p_value:.4f}" if score.p_value is not None else "")
