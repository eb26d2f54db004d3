"""Validation: loss in nats per token, perplexity, BLEU, and sample translations."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...configs.decoding import DecodingConfig
from ...configs.execution import ExecutionConfig
from ...configs.schema import TransformerConfig
from ...configs.training import TrainingConfig
from ...flax_transformer.decoding.search import generate
from ...flax_transformer.model import Transformer
from ...formulas.padding import pad
from ..data.buckets import plan_epoch
from ..data.dataset import pad_rows
from ..data.prepare import PreparedRun, ValidationPart, buckets_of
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
        run = prepared.run
        self._buckets = buckets_of(run, np.concatenate([part.pairs.lengths for part in prepared.valid]), _SHAPES)
        self._plans = [plan_epoch(part.pairs.lengths, self._buckets, 0, 0) for part in prepared.valid]
        self._loss: Any = make_validation_loss(run.model, run.execution)

    @property
    def shapes(self) -> int:
        """Number of batch shapes for which the loss is compiled."""
        return len({*self._numbers})

    def compile_in_advance(self) -> None:
        """Begin to compile the loss of each batch shape."""
        for number in dict.fromkeys(self._numbers):
            self._add(number)

    @property
    def _numbers(self) -> list[int]:
        """The shape of each batch of validation."""
        return [number for plan in self._plans for number in plan.buckets]

    def _add(self, number: int) -> None:
        src_length, tgt_length, sentences = self._buckets[number]
        rows = self._placement.rows(sentences, 1).total
        batch = self._placement.abstract_rows(rows, src_length, tgt_length)[:3]
        state = abstract_state(self._prepared.run.model, self._prepared.run.training)
        arrays = self._placement.abstract({**state.buffers, **state.params})
        self._programs.add(_Loss(number), lambda: self._loss.lower(arrays, *batch).compile())

    def measure(self, arrays: Arrays) -> dict[str, Any]:
        """Loss (nats per token, without smoothing) and perplexity; BLEU and samples if the run sets `translations`.

        In a mixture, the same of each corpus by its name, then of all together.
        """
        parts, losses = self._prepared.valid, [self._loss_of(arrays, i) for i in range(len(self._prepared.valid))]
        loss = sum(total for total, _ in losses) / sum(tokens for _, tokens in losses)
        scores: dict[str, Any] = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
        if len(parts) > 1:
            own = zip(parts, losses, strict=True)
            scores |= {f"{part.name}/loss": total / tokens for part, (total, tokens) in own}
        return scores | (self._translate(arrays) if self._prepared.run.loop.translations else {})

    def _loss_of(self, arrays: Arrays, part: int) -> tuple[float, int]:
        """(loss in nats, number of tokens) of a part."""
        total, tokens, plan = 0.0, 0, self._plans[part]
        pairs, pad_id = self._prepared.valid[part].pairs, self._prepared.run.model.pad_id
        for rows, number in zip(plan.batches, plan.buckets, strict=True):
            padded = pad_rows(pairs, rows, self._buckets[number], pad_id)
            src, tgt, labels, _ = self._placement.split(padded, self._prepared.run.model.pad_id, 1)
            if not self._programs.is_ready(_Loss(number)):
                self._add(number)
                self._programs.seconds(_Loss(number))  # waits
                self._group.barrier("the programs are compiled")
            loss, count = self._programs[_Loss(number)](arrays, src, tgt, labels)
            total, tokens = total + float(loss), tokens + int(count)
        return total, tokens

    def _translate(self, arrays: Arrays) -> dict[str, Any]:
        """BLEU of greedy translations of the first pairs of each part, and sample translations."""
        parts = [self._translations(arrays, part) for part in self._prepared.valid]
        samples = [list(sample) for part in parts for sample in part[: -(-_SAMPLES // len(parts))]]
        scores: dict[str, Any] = {"bleu": self._bleu([sample for part in parts for sample in part]), "samples": samples}
        if len(parts) > 1:
            scores |= {
                f"{part.name}/bleu": self._bleu(own) for part, own in zip(self._prepared.valid, parts, strict=True)
            }
        return scores

    def _bleu(self, translations: Sequence[tuple[str, str, str]]) -> float:
        from sacrebleu import corpus_bleu

        config = self._prepared.run.tokenizer
        _, references, texts = zip(*translations, strict=True)
        tokenize = "char" if config.split == "unspaced" else "13a"
        return corpus_bleu([*texts], [[*references]], lowercase=config.lowercase, tokenize=tokenize, force=True).score

    def _translations(self, arrays: Arrays, part: ValidationPart) -> list[tuple[str, str, str]]:
        """(source, reference, translation) of the first pairs of a part."""
        run, valid, tokenizers = self._prepared.run, part.pairs, self._prepared.tokenizers
        references = part.references[: run.loop.translations]
        rows = range(len(references))
        sources = valid.sources(rows)
        model = Transformer.from_arrays(part.model, {name: jnp.asarray(a) for name, a in arrays.items()})
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
        return [*zip(tokenizers.src.decode([list(ids) for ids in sources]), references, texts, strict=True)]
