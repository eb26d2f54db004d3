"""Mistakes in what a run writes to disk and reads again."""

from parity_tests.mutations.planting import Mutation

_LOOP, _CHECKSUMS = "tests/test_loop.py::", "tests/test_verification.py::"
_DIRECTORY = (f"{_LOOP}test_the_run_directory",)
_CHOICE = (f"{_LOOP}test_of_a_run_the_averaged_then_the_best_then_the_last_checkpoint_counts",)
_OTHER_RUN = (f"{_LOOP}test_what_begins_another_run_is_refused",)
_DECIDED = (f"{_LOOP}test_what_the_corpus_decided_stays",)
_OTHER_FILES = (f"{_CHECKSUMS}test_other_files_of_a_checkpoint",)

CHECKPOINTS = (
    Mutation(
        "checksums of arrays are not compared",
        "train.checkpointing.state_checksums._verify",
        "if expected is None or",
        "if expected is not None or",
        (f"{_CHECKSUMS}test_a_flipped_bit_is_refused_or_changes_nothing",),
    ),
    Mutation(
        "checksums of a checkpoint's other files are not compared",
        "train.checkpointing.state_checksums.read_checksums",
        'verify_files(folder, checksums.get("files"))',
        "pass",
        _OTHER_FILES,
    ),
    Mutation(
        "a checkpoint's other files have no checksums",
        "train.checkpointing.state_checksums.write_checksums",
        "checksums_of_files(folder)",
        "{}",
        _OTHER_FILES,
    ),
    Mutation(
        "the optimizer is missing where the weights alone are read",
        "train.checkpointing.state_checksums.verify_fields",
        " if name.startswith(prefixes)",
        "",
        (f"{_CHECKSUMS}test_weights_alone_are_verified_and_the_optimizer_is_not",),
    ),
    Mutation(
        "the last checkpoint alone is kept",
        "train.checkpointing.checkpoints.Checkpoints.__init__",
        "{max(updates), *keep(sorted(updates))}",
        "{max(updates)}",
        _DIRECTORY,
    ),
    Mutation(
        "the checkpoint before the last is not kept",
        "train.milestones.Milestones.checkpoints_to_keep",
        "updates[-2:]",
        "updates[-1:]",
        _DIRECTORY,
    ),
    Mutation(
        "the best checkpoint is not kept",
        "train.milestones.Milestones.checkpoints_to_keep",
        "[best] if best is not None else []",
        "[]",
        ("tests/test_metrics.py",),
    ),
    Mutation(
        "an average counts though the run was trained further",
        "train.checkpointing.checkpoints.folder_of",
        "averaged[-1] >= max(updates, default=0)",
        "averaged[-1] >= 0",
        _CHOICE,
    ),
    Mutation(
        "without validations the first checkpoint counts",
        "train.checkpointing.checkpoints.folder_of",
        "updates[-1] if best is None",
        "updates[0] if best is None",
        _CHOICE,
    ),
    Mutation(
        "a run goes on with another corpus",
        "train.checkpointing.run_directory.prepare_again",
        "(fingerprint := _fingerprint(prepared)) != first_fingerprint",
        '(fingerprint := _fingerprint(prepared)) == ""',
        _OTHER_RUN,
    ),
    Mutation(
        "a run goes on with other settings",
        "train.checkpointing.run_directory.prepare_again",
        "differences(comparable_run, first_run)",
        "differences(first_run, first_run)",
        _OTHER_RUN,
    ),
    Mutation(
        "a run begins in a directory with other files",
        "train.checkpointing.run_directory.prepare_in",
        "if p.name != LOCK and not _is_leftover(p)",
        "if p.name == CONFIG",
        _OTHER_RUN,
    ),
    Mutation(
        "a schedule that has ended is extended",
        "train.checkpointing.run_directory.prepare_again",
        "updates != end",
        "updates < end",
        _DECIDED,
    ),
    Mutation(
        "the tokens of a batch are determined anew",
        "train.checkpointing.run_directory._with_first_values",
        "if run.batches.tokens is None:",
        "if run.batches.tokens is ...:",
        _DECIDED,
    ),
    Mutation(
        "two processes train in one directory",
        "train.checkpointing.run_directory._lock",
        "return False",
        "return True",
        (f"{_LOOP}test_a_directory_in_use_is_refused",),
    ),
    Mutation(
        "a start that failed leaves its directory",
        "train.checkpointing.run_directory.locked",
        "(directory / LOCK).unlink()",
        "pass",
        (f"{_LOOP}test_bad_data_leaves_nothing_behind",),
    ),
)
