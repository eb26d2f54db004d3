"""Both directions of Multi30k with one model, whose weights multi30k_de_en and multi30k_en_de can start from.

    twinax train multi30k_both
    twinax train multi30k_en_de --init-from runs/multi30k_both

Bidirectional training (Ding et al. 2021): every pair is also trained on with source and target swapped. The language of
the source determines that of the translation. The learning rate stays constant after warm-up, because training goes on
in one direction. Takes 31 minutes on one core of an AMD EPYC. Offline: see multi30k_de_en.
"""

from dataclasses import replace

from ..configs.run import LoopConfig, RunConfig
from . import multi30k_en_de


def config() -> RunConfig:
    """The config of the run."""
    run = multi30k_en_de.config()
    return replace(
        run,
        both_directions=True,
        training=replace(run.training, schedule="constant"),
        loop=LoopConfig(updates=8000, validate_every=2000),
    )
