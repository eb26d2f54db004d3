"""Mistakes in what a run does after a kill, a signal, damage on disk, or a loss that is not finite."""

from parity_tests.mutations.planting import Mutation

_LOOP, _RECOVERY, _METRICS = "tests/test_loop.py::", "tests/test_recovery.py::", "tests/test_metrics.py::"
_SIGNALS = "tests/test_signals.py::"
_WAY_BACK = (f"{_RECOVERY}test_the_command_of_the_way_back_trains",)
_HEALTHY = ("tests/test_divergence.py",)
_TWO_SIGNALS = (f"{_SIGNALS}test_a_signal_is_answered_at_once_and_a_second_one_ends",)
_INTERRUPTED = (f"{_SIGNALS}test_what_a_second_signal_interrupts",)
_STOPPED = (f"{_LOOP}test_a_signal_saves_and_ends",)
_NOT_FINITE = (f"{_LOOP}test_a_loss_that_is_not_finite_ends_with_its_batch",)
_REFUSED = ("tests/test_step.py::test_a_gradient_that_is_not_finite_is_refused_and_named",)
_DAMAGED = (f"{_RECOVERY}test_a_damaged_newest_checkpoint_is_set_aside_and_its_updates_are_repeated",)
_DAMAGED_METRICS = (f"{_RECOVERY}test_damaged_metrics_are_named_and_kept_and_the_best_checkpoint_is_not_forgotten",)
_LEFTOVERS = (f"{_RECOVERY}test_leftovers_of_a_killed_save_and_deletion_are_removed",)
_PREPARED = ("tests/test_bookkeeping.py::test_a_run_of_an_earlier_version_keeps_its_order",)
_START = (f"{_LOOP}test_weights_to_start_from",)
_OTHER_PROGRAM = (f"{_LOOP}test_a_checkpoint_of_another_program_resumes_in_a_later_epoch",)
_OTHER_AVERAGE = (f"{_LOOP}test_another_average_takes_the_place_of_the_first",)
_GOES_ON = (f"{_LOOP}test_a_finished_run_stays_as_it_is_and_goes_on_where_more_is_asked",)

RECOVERY = (
    Mutation(
        "the first healthy checkpoint is named in place of the last",
        "train.divergence.last_healthy",
        "return max((u for u",
        "return min((u for u",
        _HEALTHY,
    ),
    Mutation(
        "the losses after a checkpoint describe it",
        "train.divergence.last_healthy",
        "u - _WINDOW < n <= u",
        "u < n <= u + _WINDOW",
        _HEALTHY,
    ),
    Mutation(
        "the last losses count in their own noise",
        "train.divergence._rises",
        "pairwise(losses[:-_LAST])",
        "pairwise(losses)",
        _HEALTHY,
    ),
    Mutation(
        "the command after a divergence starts from the run's best checkpoint",
        "train.divergence.describe_way_back",
        'str(directory / "checkpoints" / str(update))',
        "str(directory)",
        _WAY_BACK,
    ),
    Mutation(
        "the batch after the one that is not finite is saved",
        "train.loop._Loop._record",
        "self.prepared.batches()[pending.update - 1]",
        "self.prepared.batches()[pending.update]",
        _NOT_FINITE,
    ),
    Mutation(
        "a refused update changes the moments",
        "train.step.TrainStep._update",
        "optimizer=keep(moments, state.optimizer)",
        "optimizer=moments",
        _REFUSED,
    ),
    Mutation(
        "one signal that arrives twice ends the process",
        "train.signals.StopSignals._watch",
        "now - first < _SAME",
        "now < first",
        _TWO_SIGNALS,
    ),
    Mutation(
        "a signal that arrives twice interrupts what is saved",
        "train.signals.StopSignals._catch",
        "time.monotonic() - self._time > _SAME",
        "time.monotonic() > self._time",
        _INTERRUPTED,
    ),
    Mutation(
        "the exit status of a second signal is the signal",
        "train.signals.StopSignals._watch",
        "os._exit(128 + number)",
        "os._exit(number)",
        _TWO_SIGNALS,
    ),
    Mutation(
        "the handlers of signals outlive the training",
        "train.signals.StopSignals.__exit__",
        "signal.signal(number, handler)",
        "pass",
        _STOPPED,
    ),
    Mutation(
        "after a validation, messages about a signal still name it",
        "train.signals.StopSignals.during",
        "self._work = before",
        "self._work = work",
        _INTERRUPTED,
    ),
    Mutation(
        "a stopped run does not save",
        "train.loop._Loop.go",
        "self._save()",
        "pass",
        _STOPPED,
    ),
    Mutation(
        "a run stops at its next checkpoint alone",
        "train.loop._Loop._updates",
        "if save_due or not self._continues():",
        "if save_due:",
        _STOPPED,
    ),
    Mutation(
        "a validation before which the run was killed is left out",
        "train.loop._Loop.go",
        "self._validate_if_due()",
        "pass",
        (f"{_RECOVERY}test_updates_without_a_line_are_named",),
    ),
    Mutation(
        "a repeated validation is one of the newest update",
        "train.loop._Loop._repeat_validations",
        "self._report(state, {}, update)",
        "self._report(state, {})",
        _DAMAGED_METRICS,
    ),
    Mutation(
        "a position that does not match the corpus is accepted",
        "train.loop._Loop._resume_position",
        "if position not in (expected,",
        "if position[0] not in (expected[0],",
        _OTHER_PROGRAM,
    ),
    Mutation(
        "an epoch of a resumed run starts where it goes on",
        "train.data.dataset.Batches.resume",
        "epoch: index - number",
        "epoch: index",
        ("tests/test_bpe_dropout.py::test_batches_of_a_resumed_run_are_the_same",),
    ),
    Mutation(
        "the first epoch of a resumed run does not begin gradually",
        "train.checkpointing.run_directory.prepare_again",
        "first_run.model, say, is_gradual)",
        "first_run.model, say, False)",
        _PREPARED,
    ),
    Mutation(
        "a damaged checkpoint stays where it is",
        "train.checkpointing.checkpoints.Checkpoints.restore_newest",
        "self._set_aside(newest, error, say)",
        "say(str(error))",
        _DAMAGED,
    ),
    Mutation(
        "a checkpoint that was set aside is listed",
        "train.checkpointing.checkpoints.Checkpoints._set_aside",
        "self._manager.reload()",
        "pass",
        _DAMAGED,
    ),
    Mutation(
        "a checkpoint that may not be read is damaged",
        "train.checkpointing.checkpoints._reading",
        "re.search(_NOT_DAMAGE, _text(error))",
        "re.search(_NOT_DAMAGE, str(error))",
        (f"{_RECOVERY}test_the_reason_may_be_in_a_cause_and_no_folder_is_left",),
    ),
    Mutation(
        "half-written checkpoints of a killed run stay",
        "train.checkpointing.checkpoints.Checkpoints.__init__",
        "cleanup_tmp_directories=True",
        "cleanup_tmp_directories=False",
        _LEFTOVERS,
    ),
    Mutation(
        "half-deleted checkpoints of a killed run stay",
        "train.checkpointing.checkpoints.Checkpoints.wait",
        "self._remove_deleted()",
        "pass",
        _LEFTOVERS,
    ),
    Mutation(
        "the best validation counts among those without a better one",
        "train.milestones.Milestones._out_of_patience",
        "update > best",
        "update >= best",
        (f"{_METRICS}test_the_best_has_the_least_loss_or_the_most_bleu",),
    ),
    Mutation(
        "an average of earlier checkpoints is not repeated",
        "train.loop._Loop._average",
        'records[-1]["averaged"] == updates and exists',
        "exists",
        _OTHER_AVERAGE,
    ),
    Mutation(
        "an average without its files is not repeated",
        "train.loop._Loop._average",
        'records[-1]["averaged"] == updates and exists',
        'records[-1]["averaged"] == updates',
        _OTHER_AVERAGE,
    ),
    Mutation(
        "records of updates that are repeated stay",
        "train.tracking.metrics.MetricsLog.__init__",
        'for record in records if record["update"] <= update]',
        "for record in records]",
        _DAMAGED,
    ),
    Mutation(
        "the record of the checkpoint's own update is left out",
        "train.tracking.metrics.MetricsLog.__init__",
        'record["update"] <= update]',
        'record["update"] < update]',
        _GOES_ON,
    ),
    Mutation(
        "a line that was cut off by a kill is damaged",
        "train.tracking.metrics._parse",
        'line.endswith(b"\\n") or number < len(lines)',
        "line",
        (f"{_RECOVERY}test_a_last_line_without_its_end_is_a_killed_process",),
    ),
    Mutation(
        "the second copy of damaged metrics takes the place of the first",
        "train.tracking.metrics._keep_copy",
        "if not name.exists()",
        "if name.parent.exists()",
        _DAMAGED_METRICS,
    ),
    Mutation(
        "updates at the end of the metrics are not missed",
        "train.tracking.metrics._gap",
        "pairwise((*updates, last + 1))",
        "pairwise(updates)",
        (f"{_RECOVERY}test_updates_without_a_line_are_named",),
    ),
    Mutation(
        "metrics may reach the disk after their checkpoint",
        "train.tracking.metrics.MetricsLog.flush",
        "os.fsync(self._file.fileno())",
        "pass",
        (f"{_METRICS}test_records_are_on_disk_before_their_checkpoint",),
    ),
    Mutation(
        "TensorBoard shows repeated updates twice",
        "train.tracking.tensorboard_tracker.TensorBoardTracker.__init__",
        "SessionLog.START",
        "SessionLog.STOP",
        (f"{_LOOP}test_tensorboard_reads_the_metrics",),
    ),
    Mutation(
        "a resumed run reads its initial weights",
        "train.loop.train",
        "read_initial_weights(run) if is_new else None",
        "read_initial_weights(run)",
        _START,
    ),
    Mutation(
        "initial weights are NaN if all of an array's are",
        "train.warm_start._read_weights",
        "np.isnan(array).any()",
        "np.isnan(array).all()",
        (f"{_RECOVERY}test_weights_that_are_nan",),
    ),
    Mutation(
        "initial weights keep their own dtype",
        "train.warm_start.InitialWeights.model",
        "jnp.asarray(array, config.param_dtype)",
        "jnp.asarray(array)",
        (f"{_RECOVERY}test_initial_weights_that_are_infinite_are_named",),
    ),
    Mutation(
        "initial weights may have arrays that the model has not",
        "train.warm_start.InitialWeights.check",
        "sorted({*expected_shapes, *shapes})",
        "sorted({*expected_shapes})",
        _START,
    ),
    Mutation(
        "a lock whose file was removed counts",
        "train.checkpointing.run_directory._lock",
        "return os.path.samestat(os.fstat(file.fileno()), os.stat(directory / LOCK))",
        "return os.stat(directory / LOCK) is not None",
        ("tests/test_bookkeeping.py::test_a_lock_that_another_process_has_replaced_does_not_count",),
    ),
    Mutation(
        "what a killed start left is another's",
        "train.checkpointing.run_directory._is_leftover",
        " or is_temporary(path)",
        "",
        _PREPARED,
    ),
    Mutation(
        "the lock names every process that had it",
        "train.checkpointing.run_directory.locked",
        "file.truncate(0)",
        "pass",
        (f"{_LOOP}test_a_directory_in_use_is_refused",),
    ),
    Mutation(
        "without a home a training fails",
        "train.compilation_cache.use_compilation_cache",
        "except OSError:",
        "except FileExistsError:",
        ("tests/test_compilation_cache.py::test_settings_of_the_user_take_precedence",),
    ),
)
