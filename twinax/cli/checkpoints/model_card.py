"""The model card of a directory that `twinax convert` wrote: README.md, as the Hugging Face Hub reads it."""

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...backend.errors import CheckpointError, DataError
from ...configs.json_text import parse_json
from ...configs.run import RunConfig
from ...convert import Checkpoint
from ...convert.formats.run import is_run_or_checkpoint
from ...inference.translator import Translator
from ...train.checkpointing.checkpoints import folder_of, read_run
from ..usage import UsageError

CARD = "README.md"
_METRICS = {
    "BLEU": "bleu",
    "BLEU, lower case": "bleu",
    "chrF": "chrf",
    "TER": "ter",
    "exact match": "exact_match",
}  # name -> the hub's
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_LISTED = 12  # languages in the text; the header has all
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def read_scores(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Results of `twinax evaluate --json`. Raises: UsageError if a file holds something else."""
    documents = []
    for path in paths:
        try:
            document = parse_json(Path(path).read_text(encoding="utf-8"))
            if "systems" in document:
                raise UsageError(f"--scores {path}: compares systems; pass the scores of one, without --paired")
            _check_scores(document)
            documents.append(document)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            raise UsageError(f"--scores {path}: is not a file that `twinax evaluate --json` wrote") from None
    return documents


def _check_scores(document: Mapping[str, Any]) -> None:
    """Raises: LookupError, TypeError, ValueError if it lacks what a card states, or a number is infinite or NaN."""
    texts = [document[name] for name in ("dataset", "src", "split") if name in document]
    if not document["scores"]:
        raise ValueError
    for score in document["scores"]:
        texts += [score["name"], score["signature"]]
        if type(score["value"]) not in (int, float) or not math.isfinite(score["value"]):
            raise ValueError
    if not all(isinstance(text, str) for text in texts):
        raise TypeError


def run_of(path: Path) -> RunConfig | None:
    """The config of the run at a path, None if there is none, as in a checkpoint of weights alone."""
    if not is_run_or_checkpoint(path):
        return None
    folder = folder_of(path) / "run"
    return read_run(folder) if (folder / "config.json").is_file() else None


def model_card(
    name: str,
    checkpoint: Checkpoint,
    checksum: str,
    *,
    run: RunConfig | None,
    scores: Sequence[Mapping[str, Any]],
    arguments: Sequence[str],
) -> str:
    """The card: a YAML header with languages, dataset and scores, and the text that says how the files were made."""
    pair, known = _tokenizer_languages(checkpoint)
    languages, dataset = _languages(run) or pair, _dataset(run)
    several = f"{len(known)}: {', '.join(known[:_LISTED])}{', …' * (len(known) > _LISTED)}" if known else ""
    stated = " to ".join(languages) or several or "the checkpoint does not state them"
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "translation", "tags": ["twinax"]}
    header |= {"language": sorted({*languages} or {*known})} if languages or known else {}
    header |= {"datasets": [dataset]} if dataset and _HUB_NAME.fullmatch(dataset) else {}
    if scores:
        results = [_result(document) for document in scores]
        header["model-index"] = [{"name": name, "results": results}]
    config = checkpoint.config
    lines = [
        f"# {name}",
        "",
        f"An encoder-decoder Transformer of width {config.d_model} in {config.param_dtype}, with "
        f"{config.num_encoder_layers} encoder layers and {config.num_decoder_layers} decoder layers.",
        "",
        f"- Languages: {stated}",
        f"- Training data: {dataset or 'the checkpoint does not state it'}",
        f"- SHA-256 of the weights, as `twinax inspect` prints it: `{checksum}`",
        f"- Written by: `{shlex.join(('twinax', *map(_without_folders, arguments)))}`",
    ]
    if scores:
        escaped = "\\|"  # in a table, a bar ends the cell
        lines += ["", "| test set | pairs | score | value | signature |", "|---|---|---|---|---|"]
        lines += [
            f"| {_test_set(document)} | {document.get('pairs', '')} | {score['name']} | {score['value']:.2f} | "
            f"{score['signature'].replace('|', escaped)} |"
            for document in scores
            for score in document["scores"]
        ]
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n" + "\n".join(lines) + "\n"


def _without_folders(argument: str) -> str:
    """An argument of the command, of paths the names only: the card is made to be published."""
    if argument.startswith("--") and "=" in argument:
        flag, _, value = argument.partition("=")
        return f"{flag}={_without_folders(value)}"
    return Path(argument).name or argument if os.sep in argument else argument


def _languages(run: RunConfig | None) -> tuple[str, ...]:
    """Source and target language, as far as the run states them."""
    if run is None:
        return ()
    columns = run.corpus.src_column, run.corpus.tgt_column
    pairs = (run.tokenizer.languages, (run.tokenizer.src_lang, run.tokenizer.tgt_lang), columns)
    for pair in pairs:
        codes = [_code_of(language) for language in pair]
        if len(codes) == 2 and all(codes):
            return tuple(codes)
    return ()


def _tokenizer_languages(checkpoint: Checkpoint) -> tuple[tuple[str, ...], list[str]]:
    """(source and target language, if the tokenizer's files state both; all languages of a multilingual tokenizer)."""
    try:
        tokenizer = Translator(checkpoint).tokenizers.src
    except (CheckpointError, DataError):
        return (), []
    settings, languages = tokenizer.files.settings if tokenizer.files else {}, tokenizer.languages
    pairs = [(settings.get("source_lang"), settings.get("target_lang"))]
    pairs += [(languages.source, languages.target)] if languages is not None else []
    codes = (tuple(map(_code_of, pair)) for pair in pairs)
    known = {_code_of(language) for language in (languages.tokens if languages is not None else ())} - {""}
    return next((pair for pair in codes if all(pair)), ()), sorted(known)


def _code_of(language: Any) -> str:
    """The language of a code such as deu_Latn or de_DE, as the Hub writes it; empty if it is none."""
    code = re.split(r"[_-]", language)[0] if isinstance(language, str) else ""
    return code if _LANGUAGE.fullmatch(code) else ""


def _dataset(run: RunConfig | None) -> str | None:
    """The name of the training data, without the folders of the machine."""
    if run is None:
        return None
    corpus = run.corpus
    if corpus.dataset is not None:
        return Path(corpus.dataset).name if Path(corpus.dataset).exists() else corpus.dataset
    return " and ".join(Path(path).name for path in (corpus.src, corpus.tgt) if path)


def _test_set(document: Mapping[str, Any]) -> str:
    dataset = document.get("dataset") or document.get("src") or "test set"
    return " ".join(filter(None, (Path(str(dataset)).name, document.get("split"))))


def _result(document: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of the header's results."""
    metrics = [
        {
            "type": _METRICS.get(score["name"], score["name"]),
            "name": score["name"],
            "value": round(float(score["value"]), 2),
            "args": {"signature": score["signature"]},
        }
        for score in document["scores"]
    ]
    return {
        "task": {"type": "translation", "name": "Translation"},
        "dataset": {"type": str(document.get("dataset") or "text"), "name": _test_set(document)},
        "metrics": metrics,
    }
