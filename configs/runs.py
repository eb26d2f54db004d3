"""Ready-made runs: a module each, whose docstring gives command, hardware, time and score."""

from importlib import import_module

from .run import RunConfig
from .validation import ConfigError

RUNS = ("multi30k_de_en", "multi30k_en_de", "scan")


def run_preset(name: str) -> RunConfig:
    """The run of a name in `RUNS`. Raises: ConfigError where there is none."""
    if name not in RUNS:
        raise ConfigError(f"{name}: there is no such run; known are {', '.join(RUNS)}")
    return import_module(f".{name}", __package__).config()
