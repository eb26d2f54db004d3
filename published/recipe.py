"""The recipe of a published system."""

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
    """A published system as configs: its model, training and decoding, its mistakes and their repairs.

    Vocabulary sizes depend on the corpus; the defaults are 10,000 tokens, or leftover's maximum of 30,000.
    """

    model: TransformerConfig  # as published
    repairs: Fields  # fields of the repaired model that differ
    breaks: Mapping[str, str]  # field of a repair -> location of the mistake, and its consequences
    training: TrainingConfig  # as published
    training_repairs: Fields = field(default_factory=dict)
    tokenizer: TokenizerConfig
    run: Callable[[bool], RunConfig]  # (as published) -> its complete training run
    decoding: DecodingConfig | None  # None: no decoding was published
    decoding_fields: Fields = field(default_factory=dict)  # fields of the model that differ in decoding
    decoding_mistakes: Fields = field(default_factory=dict)  # fields that differ in decoding by mistake
    counted_start_tokens: int = 0  # number of start tokens that its maximum length includes

    def as_decoded(
        self, model: TransformerConfig, *, as_published: bool
    ) -> tuple[TransformerConfig, DecodingConfig] | None:
        """(model as the system's decoding computes it, its decoding); None if no decoding was published.

        The decoder does not mask generated padding. `max_length` counts generated tokens.
        """
        if self.decoding is None:
            return None
        mistakes = self.decoding_mistakes if as_published else {}
        decoder = model.replace(**{**self.decoding_fields, **mistakes})
        longest = min(self.decoding.max_length or model.max_length, model.max_length) - self.counted_start_tokens
        return decoder, replace(self.decoding, max_length=longest)
