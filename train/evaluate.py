"""Validation: loss in nats per token, perplexity, BLEU, and sample translations."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..configs.decoding import DecodingConfig
from ..configs.execution import ExecutionConfig
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..flax_transformer.decode import generate
from ..flax_transformer.model import Transformer
from ..formulas.padding import pad
from .data.buckets import plan_epoch
from .data.dataset import pad_rows
from .data.prepare import PreparedRun, buckets_of
from .losses import cross_entropy
from .partitioning import Placement
from .processes.team import Team
from .step import Arrays

_SHAPES = 4  # batch shapes for the loss; few, because each is compiled
_BLOCK = 100  # sentences per decoding batch
_SAMPLES = 3  # translations to show


def make_validation_loss(
    config: TransformerConfig, execution: ExecutionConfig
) -> Callable[[Arrays, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The jitted (sum of losses in nats without smoothing, tokens) of a batch: arrays, sources, targets, labels."""
    without_smoothing = TrainingConfig()

    def loss(arrays: Arrays, src: jax.Array, tgt: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = Transformer.from_arrays(config, arrays, execution)(src, tgt)
        return cross_entropy(logits, labels, config.pad_id, without_smoothing)

    return jax.jit(loss)


class Validation:
    """Measures parameters on the validation pairs of a run."""

    def __init__(self, prepared: PreparedRun, placement: Placement, team: Team):
        self._prepared, self._placement, self._team = prepared, placement, team
        run, valid = prepared.run, prepared.valid
        self._buckets = buckets_of(run, valid.lengths, _SHAPES)
        self._plan = plan_epoch(valid.lengths, self._buckets, 0, 0)
        self._loss: Any = make_validation_loss(run.model, run.execution)
        self._programs: dict[tuple[int, ...], Any] = {}  # the compiled loss of each batch shape

    @property
    def shapes(self) -> int:
        """Number of batch shapes for which the loss is compiled."""
        return len({*self._plan.buckets})

    def measure(self, arrays: Arrays) -> dict[str, Any]:
        """Loss (nats per token, without smoothing) and perplexity; BLEU and samples if the run sets `translations`."""
        total, tokens = 0.0, 0
        for rows, number in zip(self._plan.batches, self._plan.buckets, strict=True):
            padded = pad_rows(self._prepared.valid, rows, self._buckets[number], self._prepared.run.model.pad_id)
            src, tgt, labels, _ = self._placement.split(padded, self._prepared.run.model.pad_id, 1)
            shape = (*src.shape, *tgt.shape)
            if shape not in self._programs:
                self._programs[shape] = self._loss.lower(arrays, src, tgt, labels).compile()
                self._team.agree("the programs are compiled")
            part, count = self._programs[shape](arrays, src, tgt, labels)
            total, tokens = total + float(part), tokens + int(count)
        loss = total / tokens
        scores: dict[str, Any] = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
        return scores | (self._translate(arrays) if self._prepared.run.loop.translations else {})

    def _translate(self, arrays: Arrays) -> dict[str, Any]:
        """BLEU of greedy translations of the first pairs, and sample translations."""
        from sacrebleu import corpus_bleu

        run, valid, tokenizers = self._prepared.run, self._prepared.valid, self._prepared.tokenizers
        rows = range(min(run.loop.translations, len(valid)))
        sources, references = valid.sources(rows), self._prepared.references[: len(rows)]
        model = Transformer.from_arrays(run.model, {name: jnp.asarray(a) for name, a in arrays.items()})
        longest = max(len(ids) for ids in valid.targets(rows))
        # Untrained models never emit EOS: 1.5 times the longest reference is a sufficient limit.
        decoding = DecodingConfig(max_length=min(run.model.max_length, longest * 3 // 2))
        size = min(_BLOCK, len(rows))
        size += -size % self._placement.shares
        full_blocks = [*sources, *[sources[-1]] * (-len(rows) % size)]
        src = pad(full_blocks, run.model.pad_id)
        divide = self._placement.divide
        blocks = [
            generate(model, src[i : i + size], decoding, put=divide).sentences() for i in range(0, len(src), size)
        ]
        best = [hypotheses[0] if hypotheses else [] for block in blocks for hypotheses in block][: len(rows)]
        texts = tokenizers.tgt.decode(best)
        unspaced = run.tokenizer.split == "unspaced"
        bleu = corpus_bleu(
            texts, [references], lowercase=run.tokenizer.lowercase, tokenize="char" if unspaced else "13a", force=True
        )
        sample_sources = [list(ids) for ids in sources[:_SAMPLES]]
        samples = zip(tokenizers.src.decode(sample_sources), references, texts, strict=False)
        return {"bleu": bleu.score, "samples": [list(sample) for sample in samples]}
