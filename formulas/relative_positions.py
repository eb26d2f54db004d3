"""Buckets of relative positions, in whole numbers, so that both frameworks and every device have the same ones."""

from functools import lru_cache

import numpy as np
from jaxtyping import Int


@lru_cache(maxsize=32)
def relative_position_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> Int[np.ndarray, " P"]:
    """The bucket of each relative position, a key's index minus its query's, from -max_distance to max_distance.

    With n buckets per side and e = n // 2, a distance d < e has bucket d; a greater one has bucket
    e + floor((n - e) · log(d / e) / log(max_distance / e)), at most n - 1. If bidirectional, each side has half of the
    buckets, earlier keys first; otherwise all later keys have bucket 0.

    Source: Raffel et al. 2020, section 2.1; Mesh TensorFlow `_relative_position_bucket`.
    """
    n = num_buckets // 2 if bidirectional else num_buckets
    exact, steps = n // 2, n - n // 2
    buckets, step = [*range(exact)], 0
    for distance in range(exact, max_distance + 1):
        # the formula without logarithms, whose rounding differs between libraries and devices
        while step + 1 < steps and distance**steps >= exact ** (steps - step - 1) * max_distance ** (step + 1):
            step += 1
        buckets.append(exact + step)
    sides = np.array(buckets)
    return np.concatenate([sides[::-1], n + sides[1:] if bidirectional else np.zeros(max_distance, sides.dtype)])
