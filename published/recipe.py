"""What a published system's recipe holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..configs.data import TokenizerConfig
from ..configs.decoding import DecodingConfig
from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig

Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published system as configs: what its code computes, how it trains and decodes, and what repairs it.

    Vocabularies come from a corpus; where nothing is said they have 10,000 tokens, or the 30,000 that leftover allows.
    """

    model: TransformerConfig  # as published
    repairs: Fields  # fields of the model that differ in the repaired one
    breaks: Mapping[str, str]  # field of a repair -> where the mistake is, and what it breaks
    training: TrainingConfig  # as published
    training_repairs: Fields = field(default_factory=dict)
    tokenizer: TokenizerConfig
    run: Callable[[bool], RunConfig]  # (as published) -> its whole training
    decoding: DecodingConfig | None  # None: none was published
    decoded_as: Fields = field(default_factory=dict)  # fields of the model that differ while it decodes
    decoded_wrongly: Fields = field(default_factory=dict)  # and those that differ by mistake
    start_tokens_counted: int = 0  # start tokens that its longest length includes

    def as_decoded(
        self, model: TransformerConfig, *, as_published: bool
    ) -> tuple[TransformerConfig, DecodingConfig] | None:
        """(a model as the system's own decoding computes it, that decoding); None where none was published.

        The decoder does not mask padding that it generated. `max_length` counts generated tokens.
        """
        if self.decoding is None:
            return None
        wrongly = self.decoded_wrongly if as_published else {}
        changed = model.replace(**{**self.decoded_as, **wrongly})
        longest = min(self.decoding.max_length or model.max_length, model.max_length) - self.start_tokens_counted
        return changed, replace(self.decoding, max_length=longest)
