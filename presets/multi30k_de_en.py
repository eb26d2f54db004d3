"""German to English on Multi30k (Elliott et al. 2016): 29,000 image captions, downloaded from the hub.

    twinax train multi30k_de_en

Offline, with local files: `twinax train multi30k_de_en --src train.de --tgt train.en --valid-src val.de
--valid-tgt val.en`. Model sizes from "Good for Misconceived Reasons" (Wu et al. 2021): 4+4 layers of width 128.
BLEU on test_2016 is 43.2, lowercased 43.5 (13a, beam size 5, mean of three seeds), after about 80 minutes on one core
of an AMD EPYC: docs/results.md.
"""

from ..configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from ..configs.run import LoopConfig, RunConfig
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig


def config() -> RunConfig:
    """The config of the run."""
    return RunConfig(
        corpus=CorpusConfig(dataset="bentrevett/multi30k", src_column="de", tgt_column="en", valid_split="validation"),
        tokenizer=TokenizerConfig(split="bytes", vocab_size=6000),
        batches=BatchConfig(tokens=1024),
        model=TransformerConfig.preset(
            "small",
            d_model=128,
            num_heads=4,
            d_ff=256,
            num_encoder_layers=4,
            num_decoder_layers=4,
            embedding_dropout=0.15,
            residual_dropout=0.15,
        ),
        training=TrainingConfig(
            label_smoothing=0.1,
            optimizer="adamw",
            weight_decay=0.1,
            schedule="cosine",
            learning_rate=3e-3,
            warmup_updates=1600,
            clip_norm=1.0,
        ),
        loop=LoopConfig(epochs=40, validate_every=2000),
    )
