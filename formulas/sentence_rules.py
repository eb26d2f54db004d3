"""What a translation of a particular sentence must be: a prefix, and lengths in proportion to the source."""

import math
from collections.abc import Sequence

import numpy as np

from ..configs.decoding import DecodingConfig
from ..configs.schema import TransformerConfig

FREE, NO_END = -1, -2  # any token that the settings allow; any but EOS


def sentence_rules(
    config: DecodingConfig, model: TransformerConfig, keep: np.ndarray, prefixes: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """For each sentence and n, the id of a forced token, FREE or NO_END, (B, longest n + 1); (B, 0) without rules.

    `keep` (B, S): the mask of the sources' tokens. A prefix follows the model's forced first token. With ratios, a
    translation has at least ⌈min_length_ratio · S⌉ and at most ⌈max_length_ratio · S⌉ tokens, unless its prefix is
    longer; S is the number of tokens of the source.

    Raises:
        ValueError: there is another number of prefixes, one has an id that cannot be generated, or is too long.
    """
    longest = config.max_length or model.max_length
    prefixes = [()] * len(keep) if prefixes is None else prefixes
    if len(prefixes) != len(keep):
        raise ValueError(f"prefixes: {len(prefixes)} for {len(keep)} sentences; pass one for each, empty for none")
    has_ratio = config.min_length_ratio > 0 or config.max_length_ratio is not None
    if not has_ratio and model.forced_bos_id is None and not any(len(prefix) for prefix in prefixes):
        return np.zeros((len(keep), 0), np.int32)
    rules = np.full((len(keep), longest + 1), FREE, np.int32)
    first = 1
    if model.forced_bos_id is not None and (longest > 1 or not config.force_end):  # else EOS is forced
        rules[:, 1], first = model.forced_bos_id, 2
    for i, (prefix, tokens) in enumerate(zip(prefixes, keep.sum(1).tolist(), strict=True)):
        end = first + len(prefix)
        if len(prefix) and end > longest:
            size = len(prefix)
            raise ValueError(f"prefixes[{i}]: has {size} tokens, and a translation has at most {longest} with EOS")
        ids = np.asarray(prefix, np.int64).reshape(-1)
        if ((ids < 0) | (ids >= model.tgt_vocab_size) | np.isin(ids, [model.eos_id, model.pad_id])).any():
            last_id = model.tgt_vocab_size - 1
            raise ValueError(f"prefixes[{i}]: has an id that is EOS, padding or outside 0 to {last_id}")
        least = min(math.ceil(config.min_length_ratio * tokens), longest)
        rules[i, end : max(least, end)] = NO_END
        if config.max_length_ratio is not None:
            last = max(math.ceil(config.max_length_ratio * tokens), end)
            rules[i, last : last + 1] = model.eos_id
        rules[i, first:end] = ids
    return rules
