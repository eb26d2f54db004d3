"""Mistakes in loss, train step, optimizer, schedule and the bookkeeping of the training loop."""

from parity_tests.mutations.planting import Mutation

_LOSSES = ("tests/test_losses.py",)
_STEP = ("tests/test_step.py",)
_OPTIMIZERS = ("tests/test_optimizers.py",)
_BOOKS = ("tests/test_bookkeeping.py",)
_LOOP = ("tests/test_loop.py",)
_TRAJECTORY = ("parity_tests/test_trajectories.py",)
_PRECISION = ("parity_tests/test_precision.py",)
_SCAN = ("tests/test_execution.py::test_the_same_loss_and_gradients",)
_REMAT = ("tests/test_execution.py::test_rematerialization_keeps_less",)
_FUSED = ("tests/test_execution.py::test_fused_attention_is_as_accurate_as_the_formula",)
_DEVICES = ("tests/test_partitioning.py::test_eight_devices_are_one",)

TRAINING = (
    Mutation(
        "padding counts in the loss",
        "train.losses.cross_entropy",
        "keep = labels != pad_id",
        "keep = labels == labels",
        _LOSSES,
    ),
    Mutation(
        "smoothing shared by V - 1 where V is meant",
        "formulas.label_smoothing.over_all",
        "share = smoothing / vocab_size",
        "share = smoothing / (vocab_size - 1)",
        _LOSSES,
    ),
    Mutation(
        "smoothing shared by V - 1 where V - 2 is meant",
        "formulas.label_smoothing.over_others_but_padding",
        "smoothing / _others(vocab_size - 2)",
        "smoothing / _others(vocab_size - 1)",
        _LOSSES,
    ),
    Mutation(
        "the entropy of the label is not subtracted",
        "formulas.label_smoothing._entropy",
        "return -sum(",
        "return 0 * -sum(",
        _LOSSES,
    ),
    Mutation(
        "gradient of the loss without its label",
        "train.losses._backward",
        "q = jnp.where(token == labels[..., None], target.label, q)",
        "q = jnp.where(token == labels[..., None], 1.0, q)",
        _LOSSES,
    ),
    Mutation(
        "parameters are divided along fsdp where they are used",
        "train.partitioning.Placement.gather",
        'None if a == "fsdp" else a',
        "a",
        _DEVICES,
    ),
    Mutation(
        "the new state is wherever XLA puts it",
        "train.partitioning.Placement.keep",
        "self.shardings(tree)",
        "jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec()), tree)",
        _DEVICES,
    ),
    Mutation(
        "the checksum of a batch does not depend on the places of its rows",
        "train.processes.exchange.checksum",
        'np.asarray(numbers, "<i4")',
        'np.zeros(len(numbers), "<i4")',
        ("tests/test_processes.py::test_checksums_of_shares_add_up",),
    ),
    Mutation(
        "a process that hangs is waited for",
        "train.processes.hub.Hub._check_positions",
        "now - min(waiting) > BEHIND",
        "now - min(waiting) > 1000",
        ("tests/test_processes.py::test_a_process_that_fails_ends_the_others_with_one_line",),
    ),
    Mutation(
        "scanned layers share the first layer's dropout",
        "flax_transformer.execution._run_in_scan",
        "site.site = number",
        "pass",
        _SCAN,
    ),
    Mutation(
        "scanned layers run in reverse",
        "flax_transformer.execution._run_in_scan",
        "(stacked, jnp.asarray(numbers)))[0]",
        "(stacked, jnp.asarray(numbers)), reverse=True)[0]",
        _SCAN,
    ),
    Mutation(
        "remat of all products keeps them",
        "flax_transformer.execution",
        "jax.checkpoint_policies.dots_with_no_batch_dims_saveable",
        "jax.checkpoint_policies.everything_saveable",
        _REMAT,
    ),
    Mutation(
        "a fully masked row of fused attention attends to everything",
        "flax_transformer.fused_attention.fused_attention",
        "return jnp.where(mask.any(-1)[:, 0, :, None, None], heads, 0)",
        "return heads",
        _FUSED,
    ),
    Mutation(
        "fused attention without its biases",
        "flax_transformer.fused_attention.fused_attention",
        "bias=bias if bias is None else bias.astype(q.dtype)",
        "bias=None",
        _FUSED,
    ),
    Mutation(
        "a label outside the vocabulary counts from the end",
        "train.losses._forward",
        "labels = jnp.where(labels < 0, z.shape[-1], labels)",
        "labels = labels",
        _LOSSES,
    ),
    Mutation(
        "the loss in bfloat16",
        "train.losses._forward",
        "z = at_least_float32(logits) - largest[..., None]",
        "z = logits - largest[..., None].astype(logits.dtype)",
        _PRECISION,
    ),
    Mutation(
        "gradients are means of the micro-batches",
        "train.step._accumulate",
        '_per_token(gradients, tokens) if config.reduction == "parts" else gradients',
        "_per_token(gradients, tokens)",
        _STEP,
    ),
    Mutation(
        "micro-batches are contiguous rows",
        "train.step._accumulate",
        "a.reshape(sentences // parts, parts, *a.shape[1:]).swapaxes(0, 1)",
        "a.reshape(parts, sentences // parts, *a.shape[1:])",
        ("parity_tests/test_published.py::test_updates_as_published[annotated_transformer]", *_STEP),
    ),
    Mutation(
        "a loss that is not finite changes the weights",
        "train.step.make_train_step",
        "applied = (tokens > 0) & jnp.isfinite(norm) & jnp.isfinite(loss)",
        "applied = tokens > 0",
        _STEP,
    ),
    Mutation(
        "a batch of padding counts as an update",
        "train.step.make_train_step",
        "applied = (tokens > 0) & jnp.isfinite(norm)",
        "applied = jnp.isfinite(norm)",
        _STEP,
    ),
    Mutation(
        "the state is not donated",
        "train.step.make_train_step",
        "jax.jit(step, donate_argnums=0)",
        "jax.jit(step)",
        _STEP,
    ),
    Mutation(
        "dropout of every update is the first's",
        "train.step._accumulate",
        "DropoutKey(state.seed, state.update, part.rows)",
        "DropoutKey(state.seed, 0, part.rows)",
        _TRAJECTORY,
    ),
    Mutation(
        "clipping as optax' where torch's is meant",
        "train.optimizers",
        '"torch": lambda norm, bound: jnp.minimum(1, bound / (norm + 1e-6)),',
        '"torch": lambda norm, bound: jnp.minimum(1, bound / norm),',
        _OPTIMIZERS,
    ),
    Mutation(
        "norms and biases are decayed",
        "train.optimizers",
        'not name.endswith((".scale", ".bias"))',
        'not name.endswith(".scale")',
        _OPTIMIZERS,
    ),
    Mutation(
        "L2 in place of decoupled decay",
        "train.optimizers.make_optimizer",
        'if config.optimizer == "adam" else',
        'if config.optimizer in ("adam", "adamw") else',
        _OPTIMIZERS,
    ),
    Mutation(
        "betas exchanged",
        "train.optimizers.make_optimizer",
        "config.beta1, config.beta2, config.eps",
        "config.beta2, config.beta1, config.eps",
        _OPTIMIZERS,
    ),
    Mutation(
        "a parameter without gradient is decayed",
        "train.optimizers.make_optimizer",
        "and name not in undecayed for name in params",
        "for name in params",
        _OPTIMIZERS,
    ),
    Mutation(
        "warm-up counts from 0 whatever is asked for",
        "formulas.schedules.learning_rate",
        "numbers.asarray(update, float) + config.first_update",
        "numbers.asarray(update, float)",
        _OPTIMIZERS,
    ),
    Mutation(
        "noam without the model's width",
        "formulas.schedules.noam",
        "config.learning_rate * d_model**-0.5 *",
        "config.learning_rate *",
        _OPTIMIZERS,
    ),
    Mutation(
        "cosine ends at zero",
        "formulas.schedules._to_final",
        "rate = config.final_learning_rate + span",
        "rate = 0 * config.final_learning_rate + span",
        _OPTIMIZERS,
    ),
    Mutation(
        "first weights of one seed",
        "train.loop._Loop._first_state",
        "nnx.Rngs(self.run.training.seed)",
        "nnx.Rngs(0)",
        _BOOKS,
    ),
    Mutation(
        "references and translations exchanged in BLEU",
        "train.evaluate.Validation._translate",
        "texts, [references], lowercase",
        "references, [texts], lowercase",
        _BOOKS,
    ),
    Mutation(
        "BLEU without the run's lower-casing",
        "train.evaluate.Validation._translate",
        "lowercase=run.tokenizer.lowercase",
        "lowercase=False",
        _BOOKS,
    ),
    Mutation(
        "validation loss is a mean of batches",
        "train.evaluate.Validation.measure",
        "total, tokens = total + float(part), tokens + int(count)",
        "total, tokens = total + float(part) / int(count), tokens + 1",
        ("tests/test_bookkeeping.py::test_the_loss_of_validation_is_a_mean_over_tokens",),
    ),
    Mutation(
        "averages in the parameters' own dtype",
        "train.checkpointing.checkpoints.average",
        "(on_host(a).astype(np.float64) for a in arrays)",
        "(np.asarray(a) for a in arrays)",
        _PRECISION,
    ),
    Mutation(
        "the average is a sum",
        "train.checkpointing.checkpoints.average",
        "(total / len(arrays))",
        "(total / 1)",
        _PRECISION,
    ),
    Mutation(
        "the worst checkpoint counts as the best",
        "train.tracking.metrics.best_update",
        "min(",
        "max(",
        ("tests/test_loop.py::test_of_a_run_the_averaged_then_the_best_then_the_last_checkpoint_counts",),
    ),
)
