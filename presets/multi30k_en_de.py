"""English to German on Multi30k (Elliott et al. 2016): 29,000 image captions, downloaded from the hub.

    twinax train multi30k_both
    twinax train multi30k_en_de --init-from runs/multi30k_both

Offline, and the settings: see multi30k_de_en. BLEU on test_2016 is 39.3, or 39.6 if case is ignored (13a, beam 5, seed
0), after 31 and 81 minutes on one core of an AMD EPYC: docs/results.md. Without --init-from it was not measured.
"""

from dataclasses import replace

from ..configs.run import RunConfig
from . import multi30k_de_en


def config() -> RunConfig:
    """The config of the run."""
    run = multi30k_de_en.config()
    return replace(run, corpus=replace(run.corpus, src_column="en", tgt_column="de"))
