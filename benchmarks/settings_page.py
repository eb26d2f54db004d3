"""Writes the page of all settings from the configs: `python -m benchmarks.settings_page docs/settings.md`.

A field's comment is its description; a comment on a separate line starts a group.
"""

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from twinax.configs.data import BatchConfig, CleaningConfig, CorpusConfig, TokenizerConfig
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.configs.execution import ExecutionConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.schema import TransformerConfig
from twinax.configs.sharding import ShardingConfig
from twinax.configs.training import TrainingConfig

# section of the page -> (config, flags)
_SECTIONS: dict[str, tuple[type, str]] = {
    "The run": (RunConfig, "`--init-from runs/de_en`"),
    "The model": (TransformerConfig, "`--model.d-model 128` of `twinax train`, and so on"),
    "The training step": (TrainingConfig, "`--training.learning-rate 1e-3`"),
    "The corpus": (CorpusConfig, "`--src a.de`, `--dataset opus_books`: with or without the prefix `corpus.`"),
    "Cleaning": (CleaningConfig, "`--cleaning.max-ratio 3`"),
    "Tokenizers": (TokenizerConfig, "`--tokenizer.kind bpe`"),
    "Batches": (BatchConfig, "`--batches.tokens 4096`"),
    "The loop": (LoopConfig, "`--loop.epochs 10`"),
    "Devices": (ShardingConfig, "`--sharding.fsdp 4`"),
    "Execution": (ExecutionConfig, "`--execution.remat layers`"),
    "Decoding": (DecodingConfig, "`--beam-size 5` of `twinax translate`; all of them from Python"),
    "Sampling": (SamplingConfig, "`--temperature 0.8` of `twinax translate`, and so on"),
}

_HEAD = """# Settings

Every field of every config, with the default of its class; `make settings` writes this page from the configs. For a
user's own corpus, `twinax train` has other defaults ([runs.md](runs.md)); `--print-config` prints the values of a run.
The error for a wrong value names the field, the value and the allowed values. [config.md](config.md) explains the
model's settings, [training.md](training.md) and [runs.md](runs.md) the others.
"""


class Setting(NamedTuple):
    """A field of a config."""

    group: str
    name: str
    values: str  # type, or allowed names
    default: str
    comment: str


def settings_of(kind: Any) -> Iterator[Setting]:
    """The fields of a config in their order, without those that are configs of their own."""
    source = inspect.getsource(kind)
    comments = _comments(source)
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    hints, defaults = get_type_hints(kind), {f.name: f.default for f in fields(kind)}
    group, above = "", 0
    for node in body.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not any(map(is_dataclass, (hints[node.target.id], *get_args(hints[node.target.id]))))
        ):
            between = [text for line, (alone, text) in comments.items() if alone and above < line < node.lineno]
            group = " ".join(between) or group
            _, comment = comments.get(node.end_lineno or 0, (False, ""))
            name = node.target.id
            default = "required" if defaults[name] is MISSING else f"`{defaults[name]!r}`"
            yield Setting(group, name, _values(hints[name]), default, comment)
        above = node.end_lineno or 0


def page() -> str:
    """The whole page in Markdown."""
    text = _HEAD
    for title, (kind, flags) in _SECTIONS.items():
        doc = (kind.__doc__ or "").splitlines()[0]
        text += f"\n## {title}: `{kind.__name__}`\n\n{doc} Flags: {flags}.\n"
        group = None
        for setting in settings_of(kind):
            if setting.group != group:
                group = setting.group
                text += f"\n{group}\n" if group else ""
                text += "\n| field | values | default | |\n|---|---|---|---|\n"
            cells = (f"`{setting.name}`", setting.values, setting.default, setting.comment)
            text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return text


def _comments(source: str) -> dict[int, tuple[bool, str]]:
    """Line number -> (whether the comment has a separate line, its text)."""
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            comments[token.start[0]] = (alone, token.string.lstrip("# "))
    return comments


def _values(hint: Any) -> str:
    """The allowed names of a field, or its type."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if hint is type(None):
        return "None"
    if get_origin(hint) is tuple:
        return f"several of {_values(get_args(hint)[0])}"
    if args := get_args(hint):
        return " or ".join(_values(arg) for arg in args)
    return {"str": "text", "int": "whole number", "float": "number", "bool": "True, False"}[hint.__name__]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.settings_page PAGE")
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
