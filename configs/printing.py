"""Escaping of untrusted text for a terminal."""


def escape(text: str) -> str:
    """The text with line breaks, control characters and unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_lines(text: str) -> str:
    """As `escape`, but keeps line breaks."""
    return "\n".join(map(escape, text.split("\n")))
