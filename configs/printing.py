"""Text that may come from a file, for a terminal."""


def escape(text: str) -> str:
    """The text with escapes for line breaks, for control characters and for what cannot be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_lines(text: str) -> str:
    """As `escape`, but with its line breaks."""
    return "\n".join(map(escape, text.split("\n")))
