"""Audits of a Transformer: checks that need no second model for comparison."""

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
_PADDING = "Is source padding ignored?"
_TARGET_PADDING = "Is target padding ignored?"


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
    """Audit any PyTorch encoder-decoder; the module itself is not changed.

    The audit calls `module(sources (B, S), targets (B, T))` with ids, which returns logits (B, T, V). For a module with
    another signature, `forward` calls it and creates its masks. Sizes and cache of `transformers` models are detected.

    `vocab_size`: number of tokens, or those of source and target. `special_ids`: ids that are not sampled, besides
    padding. `cached`: as `forward`, computed token by token. `dropout`: the intended rate of every dropout site.
    `loss`: (logits (B, T, V), labels (B, T)) -> mean loss without padding.

    Raises:
        AuditError: sizes are missing, or the module has another signature or output shape.
    """
    if (defaults := hugging_face.sizes(module)) is not None:
        vocab_size = vocab_size or defaults.vocab_size
        pad_id = defaults.pad_id if pad_id is None else pad_id
        special_ids = special_ids or defaults.special_ids
        max_length = max_length or defaults.max_length
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
    """Audit a twinax model with these weights (by Flax name), or random ones, and list known mistakes of its config.

    The checks run on the PyTorch twin, except that of the cache, which compiles the Flax twin; `cache=False` skips it.
    """
    if config.dropout_generator != "counter":
        config = config.replace(dropout_generator="counter")  # the only generator of the PyTorch twin
    module, forward = twin(config, arrays, seed)
    special = tuple(i for i in (config.bos_id, config.eos_id, config.decoder_start_id) if i is not None)
    vocabularies = config.src_vocab_size, config.tgt_vocab_size
    subject = make_subject(
        module, forward, vocabularies, config.pad_id, special_ids=special, max_length=config.max_length, seed=seed
    )
    cache_check = cache_answer if cache else lambda *_: Answer(None, "not checked")
    training_config = training or TrainingConfig()

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total, tokens = cross_entropy(logits, labels, config.pad_id, training_config)
        return total / tokens

    answers = _examine(subject, lambda: cache_check(config, module, seed), None, loss, progress)
    mistakes = known_mistakes(config, training)
    return Audit(name, answers, mistakes, subject.dtype_name, subject.dtype_reason)


def assert_healthy(module: nn.Module, **arguments: Any) -> None:
    """Run `audit` in a test, with its arguments. Raises: AssertionError with the findings."""
    report = audit(module, **arguments)
    assert report.ok, str(report)


def _examine(
    subject: Subject, cache: Callable[[], Answer], dropout: float | None, loss: checks.Loss | None, progress: Progress
) -> tuple[Answer, ...]:
    """Run the checks in order; only the first if the outputs are not finite."""
    answers: dict[str, Answer] = {}

    def harmless() -> bool:
        return all(answers[question].ok for question in (_CAUSAL, _PADDING, _TARGET_PADDING))

    questions: dict[str, Callable[[], Answer]] = {
        _FINITE: lambda: checks.is_finite(subject),
        _CAUSAL: lambda: checks.is_causal(subject, training=False),
        "Is it causal, in training?": lambda: checks.is_causal(subject, training=True),
        "Does each target position see itself and all earlier ones?": lambda: checks.sees_the_past(subject),
        "Does the output depend on the source?": lambda: checks.sees_the_source(subject),
        _PADDING: lambda: checks.ignores_padding(subject),
        _TARGET_PADDING: lambda: checks.ignores_padding(subject, target=True),
        "Are the sentences of a batch independent, in evaluation?": lambda: checks.keeps_sentences_independent(
            subject, False
        ),
        "Are the sentences of a batch independent, in training?": lambda: checks.keeps_sentences_independent(
            subject, True
        ),
        "May a target be longer or shorter than its source?": lambda: checks.takes_any_lengths(subject),
        "Are outputs finite for an all-padding source?": lambda: checks.stays_finite(subject),
        "Are attention weights of masked keys zero?": lambda: checks.hides_masked_keys(subject, harmless()),
        "Does every parameter receive a gradient?": lambda: state_checks.reaches_every_parameter(subject),
        "Does decoding with a cache equal decoding without?": cache,
        "Can cross entropy fall to zero?": lambda: checks.cross_entropy_is_free(subject),
        "Does the loss range from zero to log V, with and without padding?": lambda: checks.loss_is_right(
            subject, loss
        ),
        "Does dropout use its configured rates?": lambda: state_checks.dropout_obeys(subject, dropout),
        "Do training and evaluation compute the same without dropout?": lambda: state_checks.trains_what_it_evaluates(
            subject
        ),
        "Is evaluation free of side effects and random draws?": lambda: state_checks.evaluation_changes_nothing(
            subject
        ),
    }
    for number, (question, check) in enumerate(questions.items(), 1):
        try:
            answer = check()
        except Exception as error:  # the module may raise anything on unsupported inputs
            text = f"it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            answer = Answer(False, text, "", "An exception counts as a failure.")
        answers[question] = replace(answer, question=question)
        progress(question, number, len(questions))
        if question == _FINITE and not answer.ok:
            break  # NaN would fail nearly every other check for the same reason
    return tuple(answers.values())
