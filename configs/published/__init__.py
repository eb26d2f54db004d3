"""The five published systems as configs: what their code computes, how it trains, and what repairs both.

Vocabularies come from a corpus; where nothing is said they have 10,000 tokens, or the 30,000 that leftover allows.
"""

from typing import Any

from ..schema import TransformerConfig
from ..training import TrainingConfig
from . import annotated_transformer, d2l_note, jadore801120, leftover, lucky_glass

_SYSTEMS = {
    "lucky_glass": lucky_glass,
    "jadore801120": jadore801120,
    "leftover": leftover,
    "d2l_note": d2l_note,
    "annotated_transformer": annotated_transformer,
}
AS_PUBLISHED: dict[str, TransformerConfig] = {name: system.AS_PUBLISHED for name, system in _SYSTEMS.items()}
REPAIRS: dict[str, dict[str, Any]] = {name: system.REPAIRS for name, system in _SYSTEMS.items()}
TRAINING: dict[str, TrainingConfig] = {name: system.TRAINING for name, system in _SYSTEMS.items()}
TRAINING_REPAIRS: dict[str, dict[str, Any]] = {name: system.TRAINING_REPAIRS for name, system in _SYSTEMS.items()}
