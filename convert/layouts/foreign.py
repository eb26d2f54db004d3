"""What the layouts of other tools share: rules by module, the check of a config that is written, and error lines."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from ...backend.errors import ConfigError, ConversionError
from ...configs.schema import TransformerConfig
from ..port import LEAVES
from ..rules import Rule

_NOT_WRITTEN = ("linear_init", "embedding_init", "compute_dtype", "dropout_generator")


def not_written(config: TransformerConfig) -> tuple[str, ...]:
    """The fields that no other tool stores: a round trip may change them, but not what the model computes.

    Nothing attends to padding in the models of other tools, so that its embedding has no gradient to freeze unless the
    decoder starts with it.
    """
    return _NOT_WRITTEN if config.decoder_start_id == config.pad_id else (*_NOT_WRITTEN, "embedding_padding")


def rules_by_module(names: Iterable[str], modules: Mapping[str, str]) -> list[Rule]:
    """The rules of the arrays whose modules have another name; a star in it stands for a layer number."""
    rules = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        number = re.search(r"\.\d+\.", path)
        pattern = re.sub(r"\.\d+\.", ".*.", path)
        module = next((m for m in modules if f"{pattern}.".startswith(f"{m}.")), None)
        if module is not None:
            target = modules[module] + pattern.removeprefix(module)
            target = target.replace(".*.", number[0]) if number else target
            torch_leaf, transform = LEAVES[leaf]
            rules.append(Rule((name,), (f"{target}.{'weight' if leaf == 'table' else torch_leaf}",), transform))
    return rules


def check_restored(config: TransformerConfig, restored: TransformerConfig, tool: str, model: str) -> None:
    """Raises: ConversionError, lists every field of a config that its written form would not give back."""
    problems = [
        f"{f.name}={getattr(config, f.name)!r}: a {model} model has {getattr(restored, f.name)!r}"
        for f in fields(config)
        if f.name not in not_written(config) and getattr(config, f.name) != getattr(restored, f.name)
    ]
    if problems:
        raise ConversionError(f"{tool} has no such model:\n  " + "\n  ".join(problems))


def check_layers(names: Iterable[str], pattern: str, setting: str, expected: int) -> None:
    """Check the number of layers before a model is built; the pattern's group is a layer number.

    Raises:
        ConversionError: the weights have another number of layers.
    """
    numbers = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    if len(numbers) != expected:
        raise ConversionError(f"{setting}={expected}: contradicts the weights, which have {len(numbers)}")


@contextmanager
def errors_by_setting(tool: str, setting_of: Callable[[str], str]) -> Iterator[None]:
    """Turn a ConfigError into a ConversionError that names the tool's setting instead of the config's field."""
    try:
        yield
    except ConfigError as error:
        name, equals, rest = str(error).partition("=")
        raise ConversionError(f"{tool}: {setting_of(name)}{equals}{rest}") from None
