"""Validation: loss in nats per token, perplexity, BLEU, and sample translations."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...configs.decoding import DecodingConfig
from ...configs.execution import ExecutionConfig
from ...configs.schema import TransformerConfig
from ...configs.training import TrainingConfig
from ...flax_transformer.decode import generate
from ...flax_transformer.model import Transformer
from ...formulas.padding import pad
from ..data.buckets import plan_epoch
from ..data.dataset import pad_rows
from ..data.prepare import PreparedRun, buckets_of
from ..processes.process_group import ProcessGroup
from ..step.losses import cross_entropy
from ..step.partitioning import Placement
from ..step.programs import Programs
from ..step.step import Arrays, abstract_state

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


class _Loss(NamedTuple):
    """The name of the program of a batch shape."""

    bucket: int


class Validation:
    """Measures parameters on the validation pairs of a run."""

    def __init__(self, prepared: PreparedRun, placement: Placement, group: ProcessGroup, programs: Programs):
        self._prepared, self._placement, self._group, self._programs = prepared, placement, group, programs
        run, valid = prepared.run, prepared.valid
        self._buckets = buckets_of(run, valid.lengths, _SHAPES)
        self._plan = plan_epoch(valid.lengths, self._buckets, 0, 0)
        self._loss: Any = make_validation_loss(run.model, run.execution)

    @property
    def shapes(self) -> int:
        """Number of batch shapes for which the loss is compiled."""
        return len({*self._plan.buckets})

    def compile_in_advance(self) -> None:
        """Begin to compile the loss of each batch shape."""
        for number in dict.fromkeys(self._plan.buckets):
            self._add(number)

    def _add(self, number: int) -> None:
        src_length, tgt_length, sentences = self._buckets[number]
        rows = self._placement.rows(sentences, 1).total
        batch = self._placement.abstract_rows(rows, src_length, tgt_length)[:3]
        state = abstract_state(self._prepared.run.model, self._prepared.run.training)
        arrays = self._placement.abstract({**state.buffers, **state.params})
        self._programs.add(_Loss(number), lambda: self._loss.lower(arrays, *batch).compile())

    def measure(self, arrays: Arrays) -> dict[str, Any]:
        """Loss (nats per token, without smoothing) and perplexity; BLEU and samples if the run sets `translations`."""
        total, tokens = 0.0, 0
        for rows, number in zip(self._plan.batches, self._plan.buckets, strict=True):
            padded = pad_rows(self._prepared.valid, rows, self._buckets[number], self._prepared.run.model.pad_id)
            src, tgt, labels, _ = self._placement.split(padded, self._prepared.run.model.pad_id, 1)
            if not self._programs.is_ready(_Loss(number)):
                self._add(number)
                self._programs.seconds(_Loss(number))  # waits
                self._group.barrier("the programs are compiled")
            part, count = self._programs[_Loss(number)](arrays, src, tgt, labels)
            total, tokens = total + float(part), tokens + int(count)
        loss = total / tokens
        scores: dict[str, Any] = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
        return scores | (self._translate(arrays) if self._prepared.run.loop.translations else {})

    def _translate(self, arrays: Arrays) -> dict[str, Any]:
        """BLEU of greedy translations of the first pairs, and sample translations."""
        from sacrebleu import corpus_bleu

        run, valid, tokenizers = self._prepared.run, self._prepared.valid, self._prepared.tokenizers
        references = self._prepared.references[: run.loop.translations]
        rows = range(len(references))
        sources = valid.sources(rows)
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
