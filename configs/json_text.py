"""Parsing of untrusted JSON."""

import json
from collections.abc import Collection
from typing import Any

_DEPTH = 100  # maximum nesting, because later code may recurse


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has unpaired surrogates, which UTF-8 cannot encode.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(_DEPTH):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
    if level:
        raise ValueError("nested too deeply")
    if "\\ud" in text.lower():  # half a surrogate pair can be read, but not written
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _items(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
