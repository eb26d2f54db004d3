"""A run whose files are damaged, or whose loss diverges: what is kept, repeated and printed."""

import gc
import io
import json
import os
import re
import resource
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from twinax import TransformerConfig, convert
from twinax.backend.errors import CheckpointError, DamagedCheckpointError, RunError
from twinax.configs.data import BatchConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.module import named_arrays
from twinax.train.checkpointing import checkpoints
from twinax.train.checkpointing.checkpoints import Checkpoints, folder_of, read_checkpoint
from twinax.train.loop.loop import train
from twinax.train.loop.warm_start import read_initial_weights
from twinax.train.tracking.metrics import FILE, read_metrics

pytestmark = [
    pytest.mark.usefixtures("shared_programs"),
    pytest.mark.filterwarnings("ignore"),  # orbax leaves coroutines unawaited where a file is damaged
]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects():
    """Exclude what other files have left in memory from the searches for cycles below."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leftovers(earlier_objects):
    """The coroutines end here, where their warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """(directory, run) of a completed run with the checkpoints 6 and 8, of which the last is the best."""
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
    run = RunConfig(
        corpus=corpus,
        tokenizer=TokenizerConfig(kind="word", vocab_size=50),
        batches=BatchConfig(tokens=70, shapes=1),
        model=TransformerConfig.preset("small", **sizes, max_length=16),
        training=TrainingConfig(schedule="constant", learning_rate=1e-2, warmup_updates=3),
        loop=LoopConfig(updates=8, validate_every=2, translations=0),
    )
    directory = tmp_path_factory.mktemp("runs") / "run"
    train(run, directory, QUIET)
    return directory, run


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run's directory, which a test may damage."""
    return shutil.copytree(finished[0], tmp_path / "run")


def resume(run, directory):
    """Runs the same command; returns what it prints."""
    text = io.StringIO()
    train(run, directory, Console(file=text, width=1000))
    return text.getvalue()


def arrays(directory):
    return {name: np.asarray(array).tobytes() for name, array in read_checkpoint(directory).state.params.items()}


def flip(path):
    """Flips a bit in the middle of each file with arrays; orbax does not read all of them."""
    for file in path.rglob("d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def truncate(path):
    (path / "_METADATA").write_bytes((path / "_METADATA").read_bytes()[:100])


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_newest_checkpoint_is_set_aside_and_its_updates_are_repeated(damage, finished, copy):
    directory, run = finished
    damage(copy / "checkpoints" / "8" / "state")
    output = resume(run, copy)
    (line,) = (line for line in output.splitlines() if "it is now in" in line)
    assert line.endswith(f"it is now in {copy / 'damaged' / '8'}")
    assert "resuming from the checkpoint before it, update 6" in output
    assert (copy / "damaged" / "8" / "state").is_dir()
    assert read_metrics(copy) == read_metrics(directory)
    assert arrays(copy / "checkpoints" / "8") == arrays(directory / "checkpoints" / "8")


def test_a_second_damaged_checkpoint_of_the_same_update_is_kept_too(finished, copy):
    _, run = finished
    for _ in range(2):
        flip(copy / "checkpoints" / "8" / "state")
        resume(run, copy)
    assert sorted(path.name for path in (copy / "damaged").iterdir()) == ["8", "8-2"]


def test_the_only_checkpoint_stays_where_it_is(finished, copy):
    _, run = finished
    shutil.rmtree(copy / "checkpoints" / "6")
    flip(copy / "checkpoints" / "8" / "state")
    with pytest.raises(CheckpointError, match=r"checkpoints/8: .*; the run has no earlier checkpoint to resume from$"):
        resume(run, copy)
    assert (copy / "checkpoints" / "8" / "state").is_dir()
    assert not (copy / "damaged").exists()


def test_what_may_not_be_read_is_not_damaged(finished, copy, monkeypatch):
    _, run = finished

    def refuse(*arguments):
        raise ValueError("PERMISSION_DENIED: Error reading local file")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.restore", refuse)
    with pytest.raises(CheckpointError, match="PERMISSION_DENIED"):
        resume(run, copy)
    assert not (copy / "damaged").exists()


def test_the_reason_may_be_in_a_cause_and_no_folder_is_left(finished, copy, monkeypatch):
    """orbax wraps the errors of tensorstore; a checkpoint that cannot be moved stays."""
    _, run = finished

    def refuse(*arguments):
        raise ValueError("Error reading checkpoint") from ValueError("PERMISSION_DENIED [os_error_code='13']")

    with monkeypatch.context() as patches:
        patches.setattr("orbax.checkpoint.StandardCheckpointer.restore", refuse)
        with pytest.raises(CheckpointError, match=r"checkpoints/8: cannot be read: Permission denied$"):
            resume(run, copy)
    with monkeypatch.context() as patches:  # as for a user who may not read it
        patches.setattr("os.access", lambda path, mode: path.name != "checksums.json")
        (copy / "checkpoints" / "8" / "run" / "config.json").write_text("{")
        with pytest.raises(
            CheckpointError, match=r"checkpoints/8/run/checksums.json: cannot be read: Permission denied$"
        ):
            resume(run, copy)
    flip(copy / "checkpoints" / "8" / "state")

    def fail(self, target):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.rename", fail)
    with pytest.raises(CheckpointError, match=r"it cannot be moved to .*/damaged/8: Permission denied$"):
        resume(run, copy)
    assert not (copy / "damaged").exists()
    assert (copy / "checkpoints" / "8" / "state").is_dir()


def test_a_damaged_earlier_checkpoint_does_not_prevent_an_average(finished, copy):
    _, run = finished
    run = replace(run, loop=replace(run.loop, average=2))
    flip(copy / "checkpoints" / "6" / "state")
    output = resume(run, copy)
    assert f"it is now in {copy / 'damaged' / '6'}" in output
    assert "average of 8: validation loss" in output
    average, last = (copy / name / "8" for name in ("averaged", "checkpoints"))
    assert arrays(average) == arrays(last)


def test_the_last_checkpoint_is_averaged_from_memory(finished, copy, monkeypatch):
    """It is never set aside, even if it is damaged after it was written."""
    _, run = finished
    restore, restored = Checkpoints.restore, []

    def once(self, like, update):
        if update in restored:
            raise DamagedCheckpointError("damaged")
        restored.append(update)
        return restore(self, like, update)

    monkeypatch.setattr(Checkpoints, "restore", once)
    output = resume(replace(run, loop=replace(run.loop, average=2)), copy)
    assert "average of 6, 8: validation loss" in output
    assert restored == [8, 6]
    assert not (copy / "damaged").exists()


def test_leftovers_of_a_killed_save_and_deletion_are_removed(finished, copy):
    _, run = finished
    for leftover in ("9.orbax-checkpoint-tmp/state", "deleted/4/state"):
        (copy / "checkpoints" / leftover).mkdir(parents=True)
    resume(run, copy)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["6", "8"]


class Jax:
    """JAX in one of two processes."""

    def __getattr__(self, name):
        return (lambda: 2) if name == "process_count" else getattr(jax, name)


def test_one_of_several_processes_moves_nothing(finished, copy, monkeypatch):
    """Others may have read the checkpoint."""
    _, run = finished
    flip(copy / "checkpoints" / "8" / "state")
    monkeypatch.setattr(checkpoints, "jax", Jax())
    with pytest.raises(
        CheckpointError, match=rf"; move {copy}/checkpoints/8 away to resume from the checkpoint before"
    ):
        resume(run, copy)
    assert (copy / "checkpoints" / "8" / "state").is_dir()


def test_what_is_missing_is_damaged_not_forbidden(finished, copy):
    directory, run = finished
    file = next((copy / "checkpoints" / "8" / "state").rglob("d/*"))
    file.unlink()
    file.symlink_to(copy / "nowhere")
    assert "resuming from the checkpoint before it, update 6" in resume(run, copy)
    assert arrays(copy / "checkpoints" / "8") == arrays(directory / "checkpoints" / "8")


def test_other_files_of_a_checkpoint_that_cannot_be_read(finished, copy, tmp_path):
    config = copy / "checkpoints" / "6" / "run" / "config.json"
    config.write_text(json.dumps({"run_schema_version": 7}))
    with pytest.raises(CheckpointError, match=r"config\.json: damaged or edited"):
        read_checkpoint(copy / "checkpoints" / "6")
    config.with_name("checksums.json").unlink()
    with pytest.raises(CheckpointError, match="run_schema_version=7: this twinax reads"):
        read_checkpoint(copy / "checkpoints" / "6")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        read_checkpoint(tmp_path)
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="is a run without a checkpoint; to train it, run: twinax train"):
        folder_of(copy)


def test_damaged_metrics_are_named_and_kept_and_the_best_checkpoint_is_not_forgotten(finished, copy):
    directory, run = finished
    path = copy / FILE
    lines = path.read_text().splitlines(keepends=True)
    (validation,) = (i for i, line in enumerate(lines) if "validation" in line and '"update": 6' in line)
    damaged = [*lines]
    damaged[1], damaged[validation] = "\0" * 20 + "\n", lines[validation][:30] + "\n"
    path.write_text("".join(damaged))
    before = path.read_bytes()
    output = resume(run, copy)
    kept = copy / "metrics-damaged.jsonl"
    assert f"{path}: lines 2, {validation + 1} cannot be read and are left out; the file as it was is {kept}" in output
    assert kept.read_bytes() == before
    expected = [json.loads(line) for i, line in enumerate(lines) if i != 1]
    assert read_metrics(copy) == expected  # the validation of update 6 was repeated
    assert folder_of(copy) == copy / "checkpoints" / folder_of(directory).name
    path.write_text("\0\n" + path.read_text())
    assert f"the file as it was is {copy / 'metrics-damaged2.jsonl'}" in resume(run, copy)
    assert kept.read_bytes() == before


def test_a_best_checkpoint_that_cannot_be_known_is_not_guessed(finished, copy, command):
    """Without the damaged line the last checkpoint would be taken; it is known again after resuming."""
    directory, run = finished
    path = copy / FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(line[:30] + "\n" if '"validation"' in line and '"update": 6' in line else line for line in lines)
    )
    number = next(i for i, line in enumerate(lines, 1) if '"validation"' in line and '"update": 6' in line)
    code, _, err = command("inspect", copy)
    assert code == 2
    assert err == (
        f"twinax: {path}: line {number} cannot be read, so the best checkpoint is not known; to repeat its validation, "
        f"run: twinax train {copy}; or name a checkpoint, such as {copy / 'checkpoints' / '8'}\n"
    )
    assert command("inspect", copy / "checkpoints" / "8")[0] == 0
    resume(run, copy)
    assert folder_of(copy) == copy / "checkpoints" / folder_of(directory).name


def test_updates_without_a_line_are_named(finished, copy):
    _, run = finished
    lines = (copy / FILE).read_text().splitlines(keepends=True)
    kept = [line for line in lines if "validation" in line or json.loads(line)["update"] not in (3, 4)]
    (copy / FILE).write_text("".join(kept))
    assert f"{copy / FILE}: has no line for update 3 and 1 other\n" in resume(run, copy)
    (copy / FILE).write_text("".join(line for line in lines if '"update": 8' not in line))
    assert f"{copy / FILE}: has no line for update 8\n" in resume(run, copy)
    assert read_metrics(copy)[-1] == json.loads(lines[-1])  # the last validation was repeated
    (copy / FILE).write_text("".join(line for line in lines if '"update": 5' not in line))
    assert f"{copy / FILE}: has no line for update 5\n" in resume(run, copy)


def test_the_best_checkpoint_is_used_though_the_newest_is_damaged(finished, copy):
    rows = [json.loads(line) for line in (copy / FILE).read_text().splitlines()]
    for row in rows:
        if "validation" in row:
            row["validation"]["loss"] = 1.0 if row["update"] == 6 else 2.0
    (copy / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (copy / "checkpoints" / "8" / "run" / "config.json").write_text("{")
    (copy / "checkpoints" / "\u00b2").mkdir()  # `str.isdigit` holds
    assert folder_of(copy) == copy / "checkpoints" / "6"
    (copy / "config.json").write_text("{")  # the run's own
    assert folder_of(copy) == copy / "checkpoints" / "6"
    (copy / "checkpoints" / "6" / "run" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"^{copy}/config\.json: "):
        folder_of(copy)


@pytest.mark.parametrize(
    "change", [{"shapes": []}, {"shapes": [["a", 3, 4]]}, {"shapes": [[1, 2, 0]]}, {"ids": 3}, {"ids": "a"}]
)
def test_values_of_data_json(change, finished, copy, command):
    path = copy / "data.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, _, err = command("train", copy)
    assert code == 2
    assert f"{path}: cannot be read ({next(iter(change))} must be" in err


def test_a_pipe_does_not_hang_a_training(copy, command):
    (copy / "data.json").unlink()
    os.mkfifo(copy / "data.json")
    code, _, err = command("train", copy)
    assert code == 2
    assert f"{copy / 'data.json'}: cannot be read (is not a file)" in err


def test_a_run_that_stopped_before_its_first_checkpoint(finished, copy, command):
    shutil.rmtree(copy / "checkpoints")
    line = f"twinax: {copy}: is a run without a checkpoint; to train it, run: twinax train {copy}\n"
    assert command("inspect", copy) == (2, "", line)


def test_a_last_line_without_its_end_is_a_killed_process(finished, copy):
    directory, run = finished
    with (copy / FILE).open("a") as file:
        file.write('{"update": 9, "lo')
    assert "cannot be read" not in resume(run, copy)
    assert read_metrics(copy) == read_metrics(directory)
    assert not list(copy.glob("metrics-damaged*"))


def test_weights_that_are_nan(finished, copy, tmp_path, command):
    """One line and exit status 2, wherever the logits are computed; training does not start."""
    checkpoint = convert.load(copy)
    weights = {name: array.copy() for name, array in checkpoint.arrays.items()}
    for array in weights.values():
        array.flat[-1] = np.nan
    convert.save(replace(checkpoint, arrays=weights, training=None), tmp_path / "nan.pt")
    (tmp_path / "text").write_text("a b\n")
    texts = ("--src", tmp_path / "text", "--tgt", tmp_path / "text")
    for framework in ("flax", "torch"):
        for words in (("translate", tmp_path / "text"), ("score", *texts), ("evaluate", *texts)):
            code, out, err = command(words[0], tmp_path / "nan.pt", *words[1:], "--framework", framework)
            assert (code, out) == (2, "")
            line = "the model's logits are NaN; its weights are too large or not finite"
            place = f"{tmp_path / 'nan.pt'}, 'a b'" if words[0] != "score" else f"{texts[1]} and {texts[3]}, line 1"
            assert err.splitlines()[-1] == f"twinax: {place}: {line}"
    code, _, err = command("train", "--init-from", tmp_path / "nan.pt", "--out", tmp_path / "new", *texts)
    assert code == 2
    assert re.search(r"nan\.pt: \d+ arrays hold NaN, first .*; nothing can be trained from them$", err.strip())
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_not_finite_names_the_way_back(finished, tmp_path):
    _, run = finished
    good = replace(run, loop=replace(run.loop, updates=4))
    train(good, tmp_path / "r", QUIET)
    diverging = replace(run, training=replace(run.training, learning_rate=1e38, warmup_updates=0))
    with pytest.raises(RunError, match=r"No checkpoint with recorded losses exists: start a new run .* 5e\+37\)"):
        train(replace(diverging, loop=replace(diverging.loop, updates=9)), tmp_path / "s", QUIET)


def test_the_command_of_the_way_back_trains(finished, tmp_path, command, monkeypatch):
    """It starts from the checkpoint, with the settings of the run and half its rate."""
    from twinax.train.loop.divergence import recovery_hint

    directory, run = finished
    sentence = recovery_hint(directory, run, read_metrics(directory), [6, 8])
    prefix, words = sentence.split("to start from it: ")
    assert prefix == "The last healthy checkpoint is that of update 8; "
    arguments = words.split()[1:]
    arguments[-1] = str(tmp_path / "half")
    assert command(*arguments, "--loop.updates", "2", "--loop.validate-every", "2")[0] == 0
    new = json.loads((tmp_path / "half" / "config.json").read_text())
    old = json.loads((directory / "config.json").read_text())
    assert new["training"]["learning_rate"] == old["training"]["learning_rate"] / 2
    assert new["model"] == old["model"]
    assert new["init_from"] == str(directory / "checkpoints" / "8")
    code, _, err = command("train", directory, "--out", tmp_path / "x")
    assert code == 2
    assert "omit --out, or pass --init-from" in err
    code, _, err = command("train", directory, "--init-from", directory)
    assert code == 2
    assert "needs --out, the directory of the new run" in err


def test_a_full_disk_during_a_training_is_one_line(finished, copy, forks):
    """In a process limited to 20 kB per file."""
    code = f"""
import resource, sys
from twinax.cli.entry import main
sys.argv = ["twinax", "train", {str(copy)!r}, "--loop.updates", "12"]
sys.dont_write_bytecode = True  # or a file of bytecode would be cut short
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, {resource.RLIM_INFINITY}))
main()
"""
    result = forks(code)
    place = copy / "checkpoints"
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f"twinax: {place}: a checkpoint cannot be written: File too large; earlier checkpoints are complete: fix the "
        "cause and run the same command to resume"
    )
    assert "Traceback" not in result.stderr
    assert {"6", "8"} <= {path.name for path in place.iterdir()}


def test_initial_weights_that_are_infinite_are_named(finished, tmp_path):
    directory, run = finished
    checkpoint = convert.load(directory)
    name = min(checkpoint.arrays)
    arrays = {**checkpoint.arrays, name: np.full_like(checkpoint.arrays[name], -np.inf)}
    convert.save(replace(checkpoint, arrays=arrays, training=None), tmp_path / "x.pt")
    weights = read_initial_weights(replace(run, init_from=str(tmp_path / "x.pt")))
    expected = f"{tmp_path / 'x.pt'}: 1 of {len(arrays)} arrays hold NaN or infinite numbers, first {name}"
    assert expected in weights.notes
    model = weights.model(weights.config.replace(param_dtype="float64"))
    assert {array.dtype.name for array in named_arrays(model, nnx.Param).values()} == {"float64"}
