"""Signs that a text is not what a model expects: unknown tokens, no language, no task prefix."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from ..convert.checkpoint import CONFIG
from ..train.text.sentencepiece_tokenizer import SentencePieceTokenizer
from ..train.text.unknown_tokens import unknown_warning
from .translator import Sources, Translator

_EXAMPLES = 3


def text_warnings(translator: Translator, sources: Sources, first: int = 1) -> Iterator[str]:
    """One line per sign that these sources, whose first has number `first`, would be translated badly."""
    lines = {number: text for number, text in enumerate(sources.texts, first) if text.strip()}
    tokenizer = translator.tokenizers.src
    prefix_of = tokenizer.language_prefix if isinstance(tokenizer, SentencePieceTokenizer) else lambda text: ""
    prefixes = [*filter(None, map(prefix_of, lines.values()))]  # not text: `_language_warnings` has those unknown
    unknown = [*chain(*sources.ids)].count(tokenizer.unk_id) - sum(tokenizer.id_of(p) is None for p in prefixes)
    tokens = sum(len(ids) - tokenizer.added for ids in sources.ids if ids) - len(prefixes)
    if warning := unknown_warning(tokenizer, unknown, tokens):
        yield warning
    if isinstance(tokenizer, SentencePieceTokenizer):
        yield from _language_warnings(tokenizer, lines)
    tasks = _task_prefixes(translator)
    if lines and tasks and not any(text.startswith(prefix) for text in lines.values() for prefix in tasks):
        yield (
            f"{CONFIG} sets task prefixes ({_examples([*map(repr, tasks)])}), but no source starts with one; "
            "prepend the prefix of the task to each source"
        )


def _language_warnings(tokenizer: SentencePieceTokenizer, lines: dict[int, str]) -> Iterator[str]:
    """Of Marian, whose sources begin with the token of the target language if the model is multilingual."""
    languages = tokenizer.languages
    if languages is not None and languages.role != "source_prefix":
        return
    prefixes = {number: tokenizer.language_prefix(text) for number, text in lines.items()}
    unknown = [number for number, prefix in prefixes.items() if prefix and tokenizer.id_of(prefix) is None]
    known = _examples([] if languages is None else [*languages.tokens.values()])
    if unknown:
        reason = f"the model has {known}" if known else "the model has no languages"
        yield f"{_places(unknown)}: the vocabulary has no {prefixes[unknown[0]]}; {reason}"
    missing = [number for number, prefix in prefixes.items() if not prefix]
    if languages is not None and languages.target is None and missing:
        code = next(iter(languages.tokens))
        yield (
            f"{_places(missing)}: no target language; set it by --tgt-lang, as in --tgt-lang {code}, or begin the "
            f"source with it, as in {languages.tokens[code]}; the model has {known}"
        )


def _task_prefixes(translator: Translator) -> list[str]:
    """The prefixes of sources that T5's config.json states, without duplicates."""
    tasks: Any = translator.checkpoint.documents.get(CONFIG, {}).get("task_specific_params")
    settings = [task for task in tasks.values() if isinstance(task, dict)] if isinstance(tasks, dict) else []
    prefixes = [task["prefix"].strip() for task in settings if isinstance(task.get("prefix"), str)]
    return [*dict.fromkeys(filter(None, prefixes))]


def _places(lines: Sequence[int]) -> str:
    return f"line {lines[0]}" + (f" and {len(lines) - 1} more" if lines[1:] else "")


def _examples(values: Sequence[str]) -> str:
    return ", ".join(values[:_EXAMPLES]) + ", …" * (len(values) > _EXAMPLES)
