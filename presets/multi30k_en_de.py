"""English to German on Multi30k (Elliott et al. 2016): 29,000 image captions, downloaded from the hub.

    twinax train multi30k_en_de

Offline, and the settings: see multi30k_de_en. BLEU on test_2016 is 40.5, lowercased 40.9 (13a, beam size 5, mean of
three seeds), after about 85 minutes on one core of an AMD EPYC: docs/results.md.
"""

from dataclasses import replace

from ..configs.run import RunConfig
from . import multi30k_de_en


def config() -> RunConfig:
    """The config of the run."""
    run = multi30k_de_en.config()
    return replace(run, corpus=replace(run.corpus, src_column="en", tgt_column="de"))
