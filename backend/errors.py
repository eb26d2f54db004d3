"""The exceptions for wrong inputs. Each message states what is wrong, where, and what to do."""


class ConfigError(ValueError):
    """A config field has an invalid value."""


class ConversionError(ValueError):
    """Arrays or settings do not fit the model; the message lists them all."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message states what needs it, and how to install it."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message states which one, and why."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is damaged, so that an earlier one of the run can replace it."""


class NotFiniteError(ValueError):
    """A model's outputs are NaN; the message states for which input, `row` its index in the batch."""

    def __init__(self, message: str, row: int = 0):
        super().__init__(message)
        self.row = row


class DataError(ValueError):
    """A corpus, a tokenizer or a tracker cannot be used; the message states which one, and why."""


class RunError(ValueError):
    """A run cannot start or resume in its directory; the message states why, and what to do."""
