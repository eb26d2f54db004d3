"""Validation of dataclass instances against their annotations."""

import types
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..backend.errors import ConfigError


def check_field_types(config: Any) -> None:
    """Check every field against its annotation: int, float, bool, str, None, a Literal, or a union of these.

    Raises:
        ConfigError: names the field, its value and what is allowed.
    """
    for name, hint, types_ in _hints(type(config)):
        value = getattr(config, name)
        if type(value) in types_:
            continue
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            value = value.item()
            object.__setattr__(config, name, value)
        if _accepts(hint, value):
            continue
        if type(value) is not int or abs(value) > 2**53 or not _accepts(hint, float(value)):
            raise ConfigError(f"{name}={value!r}: must be {_describe(hint)}")
        object.__setattr__(config, name, float(value))  # 0 becomes 0.0, so that equal configs are saved alike


@cache
def _hints(config: type) -> list[tuple[str, Any, set[Any]]]:
    """(name, annotation, types that it accepts whatever the value) of each field."""
    hints = get_type_hints(config)
    return [(field.name, hints[field.name], {*_members(hints[field.name])}) for field in fields(config)]


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _accepts(hint: Any, value: Any) -> bool:
    for member in _members(hint):
        if get_origin(member) is Literal:
            if any(value == allowed and type(value) is type(allowed) for allowed in get_args(member)):
                return True
        elif get_origin(member) is tuple:
            if type(value) is tuple and all(_accepts(get_args(member)[0], item) for item in value):
                return True
        elif type(value) is member:
            return True
    return False


_DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
    tuple[int, ...]: "whole numbers",
    tuple[tuple[int, ...], ...]: "sequences of whole numbers",
    tuple[str, ...]: "texts",
}


def _describe(hint: Any) -> str:
    parts = []
    for member in _members(hint):
        if get_origin(member) is Literal:
            allowed = ", ".join(map(repr, get_args(member)))
            parts.append(f"one of {allowed}" if len(get_args(member)) > 1 else allowed)
        else:
            parts.append(_DESCRIPTIONS.get(member, str(member)))
    return " or ".join(parts)
