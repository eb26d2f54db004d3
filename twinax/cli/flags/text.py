"""The flags of `twinax translate`, `twinax score` and `twinax evaluate`."""

from typing import Annotated

import tyro

from ...backend.torch_package import require_torch
from ..process.importing import import_without_gc
from ..usage import UsageError, check_exists, check_outputs, check_picture, one_line_errors
from .shared import CheckpointPath, Decoding, Framework, JsonFile, Languages, Quantization, Sampling, Switch, flags


@flags
class Translate(Languages, Decoding, Sampling):
    """Translate a file or standard input line by line; an empty line gives an empty line.

    Lines are read and translated in windows of 256 to 16,384, sorted by length within; the output is in order. A line
    with more tokens than the model's maximum is truncated, with a warning. If standard input is a terminal, each line
    is translated as you enter it; Ctrl-D ends.

    Example: twinax translate runs/de_en input.de > output.en

    Attributes:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with its tokenizer, a .pt or .safetensors
            file, a fairseq checkpoint or its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        source: text file, one sentence per line (.gz too); default: standard input.
        ensemble: further checkpoints with the same target vocabulary, which translate together with the first, by the
            mean of their probabilities.
        log_linear: the ensemble averages log-probabilities instead.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        output: file to write the translations to; the same command continues it after an interruption.
        prefix: text file with the beginning of each translation, one per line, empty for none.
        forbidden_words: text file with words or phrases that translations do not contain, one per line.
        glossary: text file with a source term, a tab and its target term per line, which the source then shows; for
            a model that was trained with --corpus.glossary.
        n_best: translations per line; if more than 1, each output line begins with the source line number and a tab.
            Samples are printed in the same way, in the order in which they are drawn.
        scores: print each translation's score and a tab before it.
        attention: picture to write of the attention weights of the first translation (.png, .pdf, .svg).
        quantize: int8 computes products with weights in 8-bit integers, which is faster on a CPU with
            AVX512-VNNI or AMX; some translations change.
        framework: the twin that computes.
    """

    checkpoint: CheckpointPath
    source: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[FILE]")] = None
    ensemble: tuple[str, ...] = ()
    log_linear: Switch = False
    adapter: str | None = None
    output: str | None = None
    prefix: str | None = None
    forbidden_words: str | None = None
    glossary: str | None = None
    n_best: int = 1
    scores: bool = False
    attention: str | None = None
    quantize: Quantization | None = None
    framework: Framework = "flax"

    def execute(self) -> int:
        """The exit status. Raises: UsageError."""
        _check_quantization(self.quantize, self.framework)
        texts = (self.source, self.prefix, self.forbidden_words, self.glossary)
        check_exists(self.checkpoint, *self.ensemble, *filter(None, (*texts, self.adapter)))
        check_picture("--attention", self.attention)
        check_outputs([self.attention, self.output], [*texts, self.checkpoint, *self.ensemble])
        with one_line_errors():
            _check_framework(self.framework)
            return import_without_gc("twinax.cli.text.text_commands").translate(self)


@flags
class Score:
    """Print the log-probability of each translation in nats, one per line.

    Example: twinax score runs/de_en --src test.de --tgt test.en

    Attributes:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with its tokenizer, a .pt or .safetensors
            file, a fairseq checkpoint or its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        ensemble: further checkpoints with the same target vocabulary: the mean of their probabilities counts.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        src: text file, one sentence per line (.gz too).
        tgt: its translations.
        src_lang: language of the source in a multilingual model: deu_Latn (NLLB), de (M2M100), de_DE (mBART).
        tgt_lang: language of the translations; Marian's too, such as fra for >>fra<<.
        framework: the twin that computes.
    """

    checkpoint: CheckpointPath
    ensemble: tuple[str, ...] = ()
    adapter: str | None = None
    src: str
    tgt: str
    src_lang: str | None = None
    tgt_lang: str | None = None
    framework: Framework = "flax"

    def execute(self) -> int:
        """The exit status. Raises: UsageError."""
        check_exists(self.checkpoint, *self.ensemble, self.src, self.tgt, *filter(None, [self.adapter]))
        with one_line_errors():
            _check_framework(self.framework)
            return import_without_gc("twinax.cli.text.text_commands").score(self)


@flags
class Evaluate(Languages, Decoding, Sampling):
    """Translate a file and score it against its reference: cased and lowercased BLEU, chrF, TER and exact match.

    sacreBLEU's scores are printed with their signatures. Exact match is the percentage of translations equal to a
    reference. Several systems are compared with --paired.

    Example: twinax evaluate runs/de_en --src test.de --tgt test.en

    Attributes:
        systems: runs, checkpoints, Hugging Face directories with their tokenizers, .pt or .safetensors files, fairseq
            checkpoints or their directories; or text files with translations, one per line (.gz too).
        ensemble: further checkpoints with the same target vocabulary, which translate together with the first system,
            by the mean of their probabilities.
        log_linear: the ensemble averages log-probabilities instead.
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
        tokenize: sacreBLEU's tokenization for BLEU: 13a, zh, intl, char, ja-mecab, ko-mecab, none and others.
        json_file: JSON file to write the results to.
        output: file to write the translations to; of several systems, FILE.1, FILE.2 and so on. The same command
            continues it after an interruption.
        glossary: text file with a source term, a tab and its target term per line, as in twinax translate.
        bootstrap: print 95 % confidence intervals, of 1,000 resamples of the sentences.
        paired: compare the systems with the first one, by paired bootstrap with 1,000 resamples.
        quantize: int8 computes products with weights in 8-bit integers, which is faster on a CPU with
            AVX512-VNNI or AMX; some translations change.
        framework: the twin that computes.
    """

    systems: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SYSTEM [SYSTEM ...]")]
    ensemble: tuple[str, ...] = ()
    log_linear: Switch = False
    adapter: str | None = None
    src: str | None = None
    tgt: str | None = None
    references: tuple[str, ...] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str | None = None
    src_column: str | None = None
    tgt_column: str | None = None
    tokenize: str = "13a"
    bootstrap: Switch = False
    paired: Switch = False
    json_file: JsonFile = None
    output: str | None = None
    glossary: str | None = None
    quantize: Quantization | None = None
    framework: Framework = "flax"

    def execute(self) -> int:
        """The exit status. Raises: UsageError."""
        _check_quantization(self.quantize, self.framework)
        texts = (self.src, self.tgt, *self.references, self.glossary)
        check_exists(*self.systems, *self.ensemble, *filter(None, (*texts, self.adapter)))
        with one_line_errors():
            _check_framework(self.framework)
            return import_without_gc("twinax.cli.text.evaluate_command").evaluate(self)


def _check_framework(framework: Framework) -> None:
    """Raises: MissingPackageError if the framework is not installed."""
    if framework == "torch":
        require_torch("--framework torch")


def _check_quantization(quantize: Quantization | None, framework: Framework) -> None:
    """Raises: UsageError if the framework cannot compute with quantized weights."""
    if quantize is not None and framework != "flax":
        raise UsageError(f"--quantize {quantize}: needs --framework flax")
