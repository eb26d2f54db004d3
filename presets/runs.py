"""Ready-made runs, one per module; its docstring states command, hardware, time and score."""

from importlib import import_module

from ..backend.errors import ConfigError
from ..configs.run import RunConfig
from ..published.registry import SYSTEMS, recipe

_OWN = ("multi30k_de_en", "multi30k_en_de", "multi30k_de_en_t5", "scan")
_PUBLISHED = {f"published/{name}{variant}": (name, not variant) for name in SYSTEMS for variant in ("", ":repaired")}
RUNS = (*_OWN, *_PUBLISHED)
# A short form of `RUNS` for messages.
RUN_NAMES = f"{', '.join(_OWN)}, published/NAME or published/NAME:repaired of {', '.join(SYSTEMS)}"


def run_preset(name: str) -> RunConfig:
    """The run of a name in `RUNS`. Raises: ConfigError if there is no such name."""
    if name not in RUNS:
        raise ConfigError(f"{name}: there is no such run; choose one of {RUN_NAMES}")
    if name in _PUBLISHED:
        system, as_published = _PUBLISHED[name]
        return recipe(system, as_published=as_published)
    return import_module(f".{name}", __package__).config()
