"""What goes wrong with what a user gives: one line each, that says what, where and what to do."""


class ConfigError(ValueError):
    """A config field has a value that it may not have."""


class ConversionError(ValueError):
    """Arrays or settings that do not fit the model; the message lists every one, of very many the first."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the text says which and why."""


class DataError(ValueError):
    """A corpus, a tokenizer or a tracker cannot be used; the text says which and why."""


class RunError(ValueError):
    """A run cannot begin or go on in its directory; the text says why and what to do."""
