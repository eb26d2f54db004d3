"""What is wrong with a Transformer: questions that need no second model to compare with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..torch_reference.losses import cross_entropy
from . import checks, hugging_face, state_checks
from .audit_report import Answer, Audit
from .subject import AuditError, Forward, Subject, make_subject
from .twins import cache_answer, known_mistakes, twin

Progress = Callable[[str, int, int], None]
_FINITE = "Are the outputs finite?"
_CAUSAL = "Is it causal, in evaluation?"
_PADDING = "Is padding of the source without effect?"
_TARGET_PADDING = "Is padding of the target without effect?"


def audit(
    module: nn.Module,
    *,
    vocab_size: int | tuple[int, int] | None = None,
    pad_id: int | None = None,
    special_ids: tuple[int, ...] = (),
    max_length: int | None = None,
    forward: Forward | None = None,
    cached: Forward | None = None,
    dropout: float | None = None,
    loss: checks.Loss | None = None,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Audit:
    """Examines a PyTorch encoder-decoder of anybody's; the module itself is not changed.

    It is called as `module(sources (B, S), targets (B, T))` with ids and returns scores (B, T, V); `forward` says how
    where it is called otherwise, and makes the masks that it needs. A `transformers` model is known, with its sizes
    and its cache.

    `vocab_size`: tokens, or source's and target's. `special_ids`: not drawn, beside padding. `cached`: as `forward`,
    computed token by token. `dropout`: the rate that was asked for everywhere. `loss`: (logits (B, T, V), labels
    (B, T)) -> a mean, with padding ignored.

    Raises:
        AuditError: sizes are missing, or the module does not take or return what is said.
    """
    if (known := hugging_face.sizes(module)) is not None:
        vocab_size = vocab_size or known.vocab_size
        pad_id = known.pad_id if pad_id is None else pad_id
        special_ids = special_ids or known.special_ids
        max_length = max_length or known.max_length
        if forward is None and pad_id is not None:
            forward, cached = hugging_face.forward(pad_id), cached or hugging_face.cached(pad_id)
    if vocab_size is None or pad_id is None:
        raise AuditError(f"{type(module).__name__}: give vocab_size and pad_id")
    sizes = (vocab_size, vocab_size) if isinstance(vocab_size, int) else vocab_size
    with torch.inference_mode(False):
        subject = make_subject(
            module, forward, sizes, pad_id, special_ids=special_ids, max_length=max_length, seed=seed
        )
        cache = partial(state_checks.cache_changes_nothing, subject, cached)
        answers = _examine(subject, cache, dropout, loss, progress)
    return Audit(type(module).__name__, answers, (), subject.dtype_name, subject.dtype_reason)


def audit_config(
    config: TransformerConfig,
    *,
    name: str,
    arrays: Mapping[str, Any] | None = None,
    training: TrainingConfig | None = None,
    cache: bool = True,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Audit:
    """Examines a model of ours, of given weights (by Flax name) or of random ones, and names known mistakes.

    What is measured is the PyTorch twin, and the cache of the Flax one, which is compiled: without `cache` it is not
    asked for.
    """
    if config.dropout_generator != "counter":
        config = config.replace(dropout_generator="counter")  # which the PyTorch twin has
    module, forward = twin(config, arrays, seed)
    special = tuple(i for i in (config.bos_id, config.eos_id, config.decoder_start_id) if i is not None)
    vocabularies = config.src_vocab_size, config.tgt_vocab_size
    subject = make_subject(
        module, forward, vocabularies, config.pad_id, special_ids=special, max_length=config.max_length, seed=seed
    )
    how = cache_answer if cache else lambda *_: Answer(None, "not asked")
    trained = training or TrainingConfig()

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total, tokens = cross_entropy(logits, labels, config.pad_id, trained)
        return total / tokens

    answers = _examine(subject, lambda: how(config, module, seed), None, loss, progress)
    mistakes = known_mistakes(config, training)
    return Audit(name, answers, mistakes, subject.dtype_name, subject.dtype_reason)


def assert_healthy(module: nn.Module, **arguments: Any) -> None:
    """For a test: `audit`, with its arguments. Raises: AssertionError with what was found."""
    found = audit(module, **arguments)
    assert found.ok, str(found)


def _examine(
    subject: Subject, cache: Callable[[], Answer], dropout: float | None, loss: checks.Loss | None, progress: Progress
) -> tuple[Answer, ...]:
    """The questions, one after the other."""
    found: dict[str, Answer] = {}

    def unseen() -> bool:
        return all(found[question].ok for question in (_CAUSAL, _PADDING, _TARGET_PADDING))

    questions: dict[str, Callable[[], Answer]] = {
        _FINITE: lambda: checks.is_finite(subject),
        _CAUSAL: lambda: checks.is_causal(subject, training=False),
        "Is it causal, in training?": lambda: checks.is_causal(subject, training=True),
        "Does each target position see itself and what is before it?": lambda: checks.sees_the_past(subject),
        "Does the output depend on the source?": lambda: checks.sees_the_source(subject),
        _PADDING: lambda: checks.ignores_padding(subject),
        _TARGET_PADDING: lambda: checks.ignores_padding(subject, target=True),
        "Are the sentences of a batch independent, in evaluation?": lambda: checks.keeps_sentences_apart(
            subject, False
        ),
        "Are the sentences of a batch independent, in training?": lambda: checks.keeps_sentences_apart(subject, True),
        "May a target be longer or shorter than its source?": lambda: checks.takes_any_lengths(subject),
        "Does an empty source give numbers?": lambda: checks.stays_finite(subject),
        "Are attention weights of masked keys zero?": lambda: checks.hides_masked_keys(subject, unseen()),
        "Does every parameter receive a gradient?": lambda: state_checks.reaches_every_parameter(subject),
        "Does decoding with a cache equal decoding without?": cache,
        "Can cross entropy fall to zero?": lambda: checks.cross_entropy_is_free(subject),
        "Does the loss go from zero to log V, whatever the padding?": lambda: checks.loss_is_right(subject, loss),
        "Does dropout obey its setting?": lambda: state_checks.dropout_obeys(subject, dropout),
        "Does training compute what evaluation does, dropout aside?": lambda: state_checks.trains_what_it_evaluates(
            subject
        ),
        "Does evaluation change nothing and draw nothing?": lambda: state_checks.evaluation_changes_nothing(subject),
    }
    for number, (question, ask) in enumerate(questions.items(), 1):
        try:
            answer = ask()
        except Exception as error:  # the module's own, on inputs that it does not take
            said = f"it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            answer = Answer(False, said, "", "This could not be measured.")
        found[question] = replace(answer, question=question)
        progress(question, number, len(questions))
        if question == _FINITE and not answer.ok:
            break  # NaN would fail nearly every other question, for this one cause
    return tuple(found.values())
