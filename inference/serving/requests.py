"""What a client sends: fields of JSON or of a form, with LibreTranslate's names, and their limits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl


class RequestError(ValueError):
    """A request cannot be answered; `status` is HTTP's."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    bytes: int
    sentences: int
    beam_size: int


_COMMON = {"source": str, "target": str, "api_key": str, "secret": str}
TRANSLATE = _COMMON | {
    **{"q": (str, list), "format": str, "alternatives": int, "beam_size": int, "split_sentences": bool, "stream": bool}
}
PAIRS = _COMMON | {"q": (str, list), "translation": (str, list)}
_NAMES = {str: "a string", int: "a whole number", bool: "true or false", (str, list): "a string or a list of strings"}


def parse(body: bytes, content_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body with their values; null is omitted.

    Raises:
        RequestError: it is neither JSON nor a form, a field is unknown, or has a value of another type.
    """
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == "application/x-www-form-urlencoded":
            pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), errors="strict")
            values: Any = {name: _from_form(value, fields.get(name)) for name, value in pairs}
        elif kind in ("", "application/json"):
            values = json.loads(body.decode())
        else:
            raise RequestError(415, f"Content-Type {kind!a}: must be application/json or a URL-encoded form")
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        what = "a URL-encoded form" if "form" in kind else "JSON"
        raise RequestError(400, f"the body is not {what}: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(400, f"the body is {type(values).__name__}: must be an object with {', '.join(fields)}")
    values = {name: value for name, value in values.items() if value is not None}
    for name, value in values.items():
        if name not in fields:
            raise RequestError(400, f"{name[:50]!a}: there is no such field; the fields are {', '.join(fields)}")
        if not isinstance(value, fields[name]) or (isinstance(value, bool) and fields[name] is not bool):
            raise RequestError(400, f"{name}: is {type(value).__name__}, must be {_NAMES[fields[name]]}")
    return values


def _from_form(value: str, kind: Any) -> Any:
    """A value of a form, whose values are strings."""
    if kind is bool and value.lower() in ("true", "1", "false", "0"):
        return value.lower() in ("true", "1")
    return int(value) if kind is int and value.isdecimal() and len(value) < 10 else value


def texts_of(values: Mapping[str, Any], name: str) -> list[str]:
    """The texts of a field. Raises: RequestError if it is missing, or one is not a text."""
    if name not in values:
        raise RequestError(400, f"{name}: is missing")
    texts = [values[name]] if isinstance(values[name], str) else values[name]
    for i, text in enumerate(texts):
        place = name if isinstance(values[name], str) else f"{name}[{i}]"
        if not isinstance(text, str):
            raise RequestError(400, f"{place}: is {type(text).__name__}, must be a string")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(400, f"{place}: has half of a surrogate pair, which is not text") from None
    return texts


def within(name: str, value: int, least: int, most: int, hint: str = "") -> int:
    """The value. Raises: RequestError if it is outside the limits."""
    if not least <= value <= most:
        raise RequestError(400, f"{name}={value}: must be {least} to {most}{hint}")
    return value
