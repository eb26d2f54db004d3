"""SCAN (Lake and Baroni 2018): from commands such as "jump around left twice" to sequences of actions.

    twinax train scan --dataset tasks_train_simple.txt --out runs/scan

The official files, also .gz: tasks_train_simple.txt, tasks_train_length.txt, tasks_train_addprim_jump.txt, and
tasks_test_… for `twinax evaluate --dataset`. Exact match on the three splits, with greedy decoding and one seed each:
99.8%, 0.3%, 0.1%, after 14 to 18 minutes on one core of an Intel Xeon: docs/results.md.
"""

from ..configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from ..configs.run import LoopConfig, RunConfig
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig


def config() -> RunConfig:
    """The config of the run."""
    return RunConfig(
        corpus=CorpusConfig(dataset="tasks_train_simple.txt"),
        tokenizer=TokenizerConfig(kind="word", joint=False),
        batches=BatchConfig(tokens=2048, shapes=4),
        model=TransformerConfig.preset(
            "small",
            d_model=128,
            num_heads=8,
            d_ff=256,
            num_encoder_layers=2,
            num_decoder_layers=2,
            shared_embeddings=False,
        ),
        training=TrainingConfig(schedule="cosine", learning_rate=1e-3, warmup_updates=400, clip_norm=1.0),
        loop=LoopConfig(updates=4000, validate_every=1000),
    )
