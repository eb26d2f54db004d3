"""How the commands say that something cannot be used."""


class UsageError(Exception):
    """What a person gave to the command cannot be used; the text is the one line that they see."""
