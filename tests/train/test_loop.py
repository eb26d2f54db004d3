"""The training loop in one process: the run directory, resuming, and errors."""

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import threading
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flax import nnx
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import PreTrainedTokenizerFast

from twinax import TransformerConfig, convert, flax_transformer
from twinax.backend.errors import CheckpointError, DataError, RunError
from twinax.configs.data import BatchConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.training import TrainingConfig
from twinax.train.checkpointing.checkpoints import folder_of, read_checkpoint, read_run
from twinax.train.checkpointing.run_directory import locked, prepare_again
from twinax.train.loop import evaluate, loop
from twinax.train.loop.loop import train
from twinax.train.loop.warm_start import settings_of
from twinax.train.processes.process_group import ProcessGroup
from twinax.train.tracking.metrics import read_metrics

MODEL = TransformerConfig.preset(
    "small", d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1, max_length=16
)
QUIET = Console(quiet=True)
pytestmark = pytest.mark.usefixtures("shared_programs")


def run_of(corpus, **loop_settings):
    return RunConfig(
        corpus=corpus,
        tokenizer=TokenizerConfig(kind="word", vocab_size=50),
        batches=BatchConfig(tokens=70, shapes=1),
        model=MODEL,
        training=TrainingConfig(schedule="constant", learning_rate=1e-2, warmup_updates=3, label_smoothing=0.1),
        loop=LoopConfig(**{"updates": 8, "validate_every": 4, "translations": 4, **loop_settings}),
    )


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """(outcome, directory, run) of a completed run."""
    directory, run = tmp_path_factory.mktemp("runs") / "a", run_of(corpus, average=2, checkpoint_every=3)
    return train(run, directory, QUIET), directory, run


def arrays(directory):
    return {name: np.asarray(a) for name, a in read_checkpoint(directory).state.params.items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name])


def test_the_run_directory(finished):
    outcome, directory, _ = finished
    assert (outcome.update, outcome.stopped_by) == (8, None)
    assert {p.name for p in directory.iterdir()} == {
        *("config.json", "data.json", "tokenizer", "checkpoints", "averaged"),
        *("metrics.jsonl", "tensorboard", "loss.png", "lock"),
    }
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["4", "6", "8"]
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_reads_the_metrics(finished, tmp_path):
    """Updates that a resumed run repeats are there once."""
    _, directory, run = finished
    copy = shutil.copytree(directory, tmp_path / "r")
    shutil.rmtree(copy / "checkpoints" / "8")
    train(run, copy, QUIET)
    records = read_metrics(directory)
    losses = {r["update"]: r["loss"] for r in records if "loss" in r}
    bleu = {r["update"]: r["validation"]["bleu"] for r in records if "validation" in r and "averaged" not in r}
    for folder in (directory, copy):
        board = EventAccumulator(str(folder / "tensorboard"))
        board.Reload()
        for name, expected in (("training/loss", losses), ("validation/bleu", bleu)):
            events = board.Scalars(name)
            assert [event.step for event in events] == [*expected]
            assert {event.step: event.value for event in events} == pytest.approx(expected)


def test_metrics(finished):
    outcome, directory, _ = finished
    records = read_metrics(directory)
    updates = [r for r in records if "loss" in r]
    assert [r["update"] for r in updates] == list(range(1, 9))
    places = [(r["epoch"], r["batch"]) for r in updates]
    assert places == sorted(set(places))
    assert places[0] == (0, 0)
    assert updates[0]["learning_rate"] == pytest.approx(1e-2 / 3)
    validation_records = [r for r in records if "validation" in r]
    assert [(r["update"], r.get("averaged")) for r in validation_records] == [(4, None), (8, None), (8, [4, 8])]
    for record in validation_records:
        validation = record["validation"]
        assert validation["perplexity"] == pytest.approx(np.exp(validation["loss"]))
        assert 0 <= validation["bleu"] <= 100
        assert len(validation["samples"]) == 3
        assert validation["samples"][0][0].upper() == validation["samples"][0][1]  # source and reference
    assert outcome.validation == validation_records[-1]["validation"]


def test_validation_is_the_cross_entropy_of_the_held_out_pairs(finished):
    _, directory, run = finished
    checkpoint = read_checkpoint(directory / "checkpoints" / "8")
    state = checkpoint.state
    twin = flax_transformer.Transformer.from_arrays(checkpoint.run.model, {**state.buffers, **state.params})
    model = convert.to_torch(twin)
    lines = [Path(path).read_text().splitlines() for path in (run.corpus.src, run.corpus.tgt)]
    out = np.random.default_rng([0, 80]).permutation(80)[:10]
    total, tokens = 0.0, 0
    for i in out:
        src = [*checkpoint.tokenizers.src.encode([lines[0][i]])[0], 2]
        tgt = checkpoint.tokenizers.tgt.encode([lines[1][i]])[0]
        logits = model(torch.tensor([src]), torch.tensor([[1, *tgt]])).detach().numpy()[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= log_probs[range(len(tgt) + 1), [*tgt, 2]].sum()
        tokens += len(tgt) + 1
    validation = [r["validation"] for r in read_metrics(directory) if "validation" in r and "averaged" not in r][-1]
    assert validation["loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_a_checkpoint_has_everything(finished):
    _, directory, _ = finished
    for folder in ("checkpoints/4", "averaged/8"):
        checkpoint = read_checkpoint(directory / folder)
        assert checkpoint.run.model.src_vocab_size == checkpoint.tokenizers.src.vocab_size == 20
        assert int(checkpoint.state.update) == int(folder[-1])
        batches = len([r for r in read_metrics(directory) if r.get("epoch") == 0 and "loss" in r])
        assert checkpoint.state.position.tolist() == list(divmod(int(folder[-1]), batches))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / folder / "run" / "tokenizer")
        assert tokenizer.encode("a b H", add_special_tokens=False) == checkpoint.tokenizers.src.encode(["a b H"])[0]


def test_averaged_parameters_are_the_mean(finished):
    _, directory, _ = finished
    parts = [arrays(directory / "checkpoints" / update) for update in ("4", "8")]
    for name, mean in arrays(directory / "averaged" / "8").items():
        np.testing.assert_allclose(mean, (parts[0][name] + parts[1][name]) / 2, rtol=1e-6, atol=1e-7)


def test_a_finished_run_stays_as_it_is_and_goes_on_where_more_is_asked(finished, corpus, tmp_path):
    outcome, directory, run = finished
    records = read_metrics(directory)
    assert train(run, directory, QUIET) == outcome
    assert read_metrics(directory) == records
    part = tmp_path / "part"
    train(run_of(corpus, updates=5), part, QUIET)
    train(run_of(corpus, updates=8), part, QUIET)
    losses = [[r["loss"] for r in read_metrics(d) if "loss" in r] for d in (part, directory)]
    assert losses[0] == losses[1]
    assert_equal(arrays(part / "checkpoints" / "8"), arrays(directory / "checkpoints" / "8"))


def test_a_signal_saves_and_ends(corpus, tmp_path, monkeypatch, capsys, finished):
    original = loop._Loop._step

    def step(self, padded):
        if self.update == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, padded)

    monkeypatch.setattr(loop._Loop, "_step", step)
    run, handler = run_of(corpus), signal.getsignal(signal.SIGTERM)
    outcome = train(run, tmp_path / "r")
    assert (outcome.update, outcome.stopped_by) == (5, signal.SIGTERM)
    lines = {"stopping after this update; a second signal ends the process now", "device: cpu"}
    assert lines < {*capsys.readouterr().err.splitlines()}
    assert signal.getsignal(signal.SIGTERM) is handler
    assert int(read_checkpoint(tmp_path / "r" / "checkpoints" / "5").state.update) == 5
    monkeypatch.undo()
    with monkeypatch.context() as patches:  # before the first update, when nothing is new to save
        patches.setattr(loop._Loop, "_repeat_validations", lambda self: os.kill(os.getpid(), signal.SIGINT))
        outcome = train(run, tmp_path / "r", QUIET)
    assert (outcome.update, outcome.stopped_by) == (5, signal.SIGINT)
    assert train(run, tmp_path / "r", QUIET).update == 8
    losses = [[r["loss"] for r in read_metrics(d) if "loss" in r] for d in (tmp_path / "r", finished[1])]
    assert losses[0] == losses[1]


def test_a_run_goes_on_from_what_was_a_file_of_pytorch(finished, tmp_path):
    """The optimizer state passes through `torch.optim` and then safetensors."""
    _, directory, run = finished
    copy = shutil.copytree(directory, tmp_path / "r")
    shutil.rmtree(copy / "averaged")
    shutil.rmtree(copy / "checkpoints" / "8")
    convert.save(convert.load(copy / "checkpoints" / "4"), tmp_path / "a.pt")
    convert.save(convert.load(tmp_path / "a.pt"), tmp_path / "a.safetensors")
    shutil.rmtree(copy / "checkpoints" / "4")
    convert.save(convert.load(tmp_path / "a.safetensors"), copy / "checkpoints" / "4")
    assert train(run, copy, QUIET).update == 8
    assert_equal(arrays(copy / "checkpoints" / "8"), arrays(directory / "checkpoints" / "8"))


def test_a_checkpoint_of_another_program_resumes_in_a_later_epoch(finished, tmp_path):
    """It does not know the epochs and counts all batches in epoch 0; no other position is accepted."""
    _, directory, run = finished
    longer = replace(run, loop=replace(run.loop, updates=9, average=1))
    checkpoint = convert.load(directory / "checkpoints" / "8")
    for position in ((0, 8), (1, 2)):
        copy = shutil.copytree(directory, tmp_path / str(position))
        shutil.rmtree(copy / "checkpoints" / "8")
        training = replace(checkpoint.training, position=position)
        convert.save(replace(checkpoint, training=training), copy / "checkpoints" / "8")
    assert train(longer, tmp_path / "(0, 8)", QUIET).update == 9
    last = [record for record in read_metrics(tmp_path / "(0, 8)") if "loss" in record][-1]
    assert (last["update"], last["epoch"], last["batch"]) == (9, 1, 1)
    with pytest.raises(CheckpointError, match=r"8: has update, epoch and batch \[8, 1, 2\], but .* give \[8, 1, 1\]"):
        train(longer, tmp_path / "(1, 2)", QUIET)


def test_the_advice_on_warm_up_can_be_followed(corpus, tmp_path, monkeypatch):
    """In the directory that it names, because the run's own keeps its settings; without the updates."""
    monkeypatch.setattr("twinax.train.loop.loop._Loop", lambda *arguments: SimpleNamespace(go=lambda: None))
    run, output = run_of(corpus, updates=2, validate_every=2), StringIO()
    long = replace(run, training=replace(run.training, warmup_updates=9))
    train(long, tmp_path / "a", Console(file=output, width=500))
    assert output.getvalue().startswith(f"run: {tmp_path / 'a'}\nfirst pair: ")
    advice = re.search(r"warm-up is 9 updates .* start another one with (.*)", output.getvalue())
    flags = shlex.split(advice[1])
    assert flags == ["--training.warmup-updates", "1", "--out", str(tmp_path / "a-2")]
    output.truncate(0)
    followed = replace(run, training=replace(run.training, warmup_updates=int(flags[1])))
    train(followed, Path(flags[3]), Console(file=output, width=500))
    with pytest.raises(RunError, match=r"was started with other settings: training.warmup_updates=1 and not 9"):
        train(followed, tmp_path / "a", QUIET)
    assert "warm-up is" not in output.getvalue()


class Others(ProcessGroup):
    """This process, as the first of two."""

    count = 2

    def __init__(self):
        self.agreed = []

    def barrier(self, name, value=None):
        self.agreed.append((name, value))


def test_a_process_with_others_agrees_and_stops_with_them(finished, tmp_path, monkeypatch):
    """They hear of a signal with the update after it; the programs of all are compiled before they are called."""
    _, _, run = finished
    original = loop._Loop._step

    def step(self, padded):
        assert "compilation" not in {thread.name.partition("_")[0] for thread in threading.enumerate()}
        if self.update == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, padded)

    monkeypatch.setattr(loop._Loop, "_step", step)
    group, quiet_run = Others(), replace(run, loop=replace(run.loop, translations=0, average=1))
    outcome = train(quiet_run, tmp_path / "r", QUIET, group=group)
    assert (outcome.update, outcome.stopped_by) == (6, signal.SIGTERM)
    names = [name for name, _ in group.agreed]
    validation = evaluate.Validation(prepare_again(tmp_path / "r", run, print), None, group, None)
    # one for the exchange, one per shape of a batch
    assert names.count("the programs are compiled") == 1 + 1 + validation.shapes
    values = dict(group.agreed)
    assert values["run"]["new"] is True
    assert values["checkpoint"] == []
    assert values[next(name for name in names if name.startswith("lock"))] == (tmp_path / "r" / "lock").read_text()
    again, metrics = Others(), (tmp_path / "r" / "metrics.jsonl").read_bytes()
    again.id = 1
    train(quiet_run, tmp_path / "r", QUIET, group=again)
    assert dict(again.agreed)["checkpoint"] == [6]
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == metrics  # the first process writes them
    moved = replace(run, corpus=replace(run.corpus, src=str(tmp_path / "src")))
    assert loop._comparable(moved) == loop._comparable(run)  # whose ids are compared in its directory


def test_what_begins_another_run_is_refused(finished, corpus, tmp_path):
    _, directory, run = finished
    other_run = replace(run, training=replace(run.training, learning_rate=2e-2))
    with pytest.raises(
        RunError, match=r"was started with other settings: training.learning_rate=0.02 and not 0.01; choose"
    ):
        train(other_run, directory, QUIET)
    lines = Path(corpus.src).read_text().splitlines()
    (tmp_path / "src").write_text("\n".join(["h", *lines[1:]]) + "\n")
    other_corpus_run = replace(run, corpus=replace(corpus, src=str(tmp_path / "src")))
    with pytest.raises(RunError, match="was started with another corpus"):
        train(other_corpus_run, directory, QUIET)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"is not empty \(thesis.tex\); choose another directory"):
        train(run, tmp_path / "full", QUIET)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be used as a run directory"):
        train(run, tmp_path / "file", QUIET)
    assert int(read_checkpoint(directory).state.update) == 8


def test_what_the_corpus_decided_stays(corpus, tmp_path):
    """Omitted flags resume with the run's own values; a cosine schedule cannot be extended."""
    cosine = TrainingConfig(schedule="cosine", learning_rate=1e-2, warmup_updates=1)
    open_run = replace(run_of(corpus, updates=4, translations=0), batches=BatchConfig(shapes=1), training=cosine)
    train(replace(open_run, batches=BatchConfig(tokens=70, shapes=1)), tmp_path, QUIET)
    assert train(open_run, tmp_path, QUIET).update == 4
    saved_run = read_run(tmp_path)
    assert (saved_run.batches.tokens, saved_run.training.total_updates) == (70, 4)
    for run in (open_run, saved_run):
        for updates in (3, 6):
            longer_run = replace(run, loop=replace(run.loop, updates=updates))
            with pytest.raises(
                RunError, match=f"cannot be trained for {updates} updates: its cosine schedule ends at update 4"
            ):
                train(longer_run, tmp_path, QUIET)


def test_a_directory_in_use_is_refused(finished):
    _, directory, run = finished
    with locked(directory, print):  # not the first process that has it
        pass
    with (directory / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"is in use by another process \(process \d+ on \S+\); wait"):
            train(run, directory, QUIET)


def test_bad_data_leaves_nothing_behind(corpus, tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        train(run_of(replace(corpus, src="nowhere")), tmp_path / "r", QUIET)
    assert not (tmp_path / "r").exists()


def test_a_loss_that_is_not_finite_ends_with_its_batch(finished, tmp_path):
    """The batch is that of the plan, whatever rows of it and of padding this process computes."""
    _, _, run = finished
    training = replace(run.training, learning_rate=1e38, warmup_updates=0, accumulation=4)
    diverging_run = replace(run, training=training)
    with pytest.raises(RunError, match=r"update \d+: .* is not finite .*its batch is in .*batch-\d+.npz"):
        train(diverging_run, tmp_path / "r", QUIET)
    (path,) = (tmp_path / "r").glob("batch-*.npz")
    last_update = max(r["update"] for r in read_metrics(tmp_path / "r"))
    assert path.name == f"batch-{last_update + 1}.npz"
    batch = prepare_again(tmp_path / "r", diverging_run, print).batches()[last_update].arrays
    assert len(batch.labels) % 4
    assert_equal(dict(np.load(path)), batch._asdict())


def test_of_a_run_the_averaged_then_the_best_then_the_last_checkpoint_counts(finished, tmp_path):
    _, directory, _ = finished
    copy = shutil.copytree(directory, tmp_path / "r")
    assert folder_of(copy) == copy / "averaged" / "8"
    assert folder_of(copy / "checkpoints" / "4") == copy / "checkpoints" / "4"
    shutil.copytree(copy / "checkpoints" / "8", copy / "checkpoints" / "9")  # training has gone on
    assert folder_of(copy).parent == copy / "checkpoints"
    shutil.rmtree(copy / "checkpoints" / "9")
    shutil.rmtree(copy / "averaged")
    losses = {r["update"]: r["validation"]["loss"] for r in read_metrics(copy) if "validation" in r}
    assert folder_of(copy) == copy / "checkpoints" / str(min((4, 8), key=losses.get))
    log = copy / "metrics.jsonl"
    records = [r for r in read_metrics(copy) if r["update"] != 8]
    log.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert folder_of(copy) == copy / "checkpoints" / "4"
    log.unlink()
    assert folder_of(copy) == copy / "checkpoints" / "8"


def test_another_average_takes_the_place_of_the_first(finished, tmp_path):
    _, directory, run = finished
    copy = shutil.copytree(directory, tmp_path / "r")
    assert train(replace(run, loop=replace(run.loop, average=3)), copy, QUIET).validation is not None
    assert [r["averaged"] for r in read_metrics(copy) if "averaged" in r] == [[4, 8]]  # the third does not exist
    train(replace(run, loop=replace(run.loop, average=1)), copy, QUIET)
    longer_run = replace(run, loop=replace(run.loop, updates=10, validate_every=1, average=2))
    one = train(longer_run, copy, QUIET)
    assert [r["averaged"] for r in read_metrics(copy) if "averaged" in r] == [[4, 8], [9, 10]]
    assert one.update == 10
    parts = [arrays(copy / "checkpoints" / update) for update in ("9", "10")]
    for name, mean in arrays(copy / "averaged" / "10").items():
        np.testing.assert_allclose(mean, (parts[0][name] + parts[1][name]) / 2, rtol=1e-6, atol=1e-7)
    shutil.rmtree(copy / "averaged")  # as if killed before it was there
    train(longer_run, copy, QUIET)
    assert (copy / "averaged" / "10").is_dir()
    shutil.copytree(directory / "checkpoints" / "8", copy / "checkpoints" / "8", dirs_exist_ok=True)
    train(replace(longer_run, loop=replace(longer_run.loop, average=3)), copy, QUIET)
    assert read_metrics(copy)[-1]["averaged"] == [8, 9, 10]


def test_a_full_disk(finished, corpus, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

    monkeypatch.setattr(loop.Checkpoints, "wait", lambda self: None)
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", full)
    with pytest.raises(CheckpointError, match="a checkpoint cannot be written: RESOURCE_EXHAUSTED"):
        train(run_of(corpus), tmp_path / "r", QUIET)


def test_weights_to_start_from(finished, corpus, tmp_path):
    _, directory, _ = finished
    tuning_run = replace(run_of(corpus, updates=1, validate_every=1, translations=0), init_from=str(directory))
    frozen_run = replace(tuning_run, training=replace(tuning_run.training, learning_rate=1e-30))
    train(frozen_run, tmp_path / "ours", QUIET)
    assert_equal(arrays(tmp_path / "ours"), arrays(directory))
    tokenizer = (tmp_path / "ours" / "tokenizer" / "tokenizer.json").read_text()
    assert tokenizer == (directory / "tokenizer" / "tokenizer.json").read_text()
    shutil.rmtree(tmp_path / "ours" / "checkpoints")  # as if killed before the first checkpoint
    (tmp_path / "ours" / "metrics.jsonl").unlink()
    train(frozen_run, tmp_path / "ours", QUIET)
    assert_equal(arrays(tmp_path / "ours"), arrays(directory))
    moved_directory = directory.rename(directory.with_name("away"))
    train(frozen_run, tmp_path / "ours", QUIET)  # with a checkpoint, init_from is not read again
    moved_directory.rename(directory)
    with pytest.raises(CheckpointError, match=r"do not fit the model; .* \(16,\) but should be \(17,\)"):
        train(replace(frozen_run, model=frozen_run.model.replace(d_ff=17)), tmp_path / "wider", QUIET)
    other_model = frozen_run.model.replace(final_norm=False)
    with pytest.raises(CheckpointError, match=r"do not fit the model; \S+final_norm\S+ is .* but should be absent"):
        train(replace(frozen_run, model=other_model), tmp_path / "wider", QUIET)
    with pytest.raises(CheckpointError, match="there is no such file or directory for the initial weights"):
        train(replace(frozen_run, init_from="nowhere"), tmp_path / "none", QUIET)
    assert not (tmp_path / "wider").exists()


def test_initial_weights_bring_the_tokenizer_that_their_run_has_saved(finished, corpus, tmp_path):
    """Not that of the file which the run has once loaded."""
    _, directory, _ = finished
    loaded = shutil.copy(directory / "tokenizer" / "tokenizer.json", tmp_path)
    brief_run = run_of(corpus, updates=1, validate_every=1, translations=0)
    train(replace(brief_run, tokenizer=TokenizerConfig(load=(str(loaded),))), tmp_path / "a", QUIET)
    Path(loaded).unlink()
    model, tokenizer = settings_of(tmp_path / "a")
    assert (model.d_model, tokenizer) == (8, TokenizerConfig(vocab_size=tokenizer.vocab_size))
    tuning_run = replace(brief_run, init_from=str(tmp_path / "a"), model=model, tokenizer=tokenizer)
    train(tuning_run, tmp_path / "b", QUIET)
    saved = [(path / "tokenizer" / "tokenizer.json").read_text() for path in (tmp_path / "a", tmp_path / "b")]
    assert saved[0] == saved[1]


def test_two_tokenizers_that_a_run_has_loaded_are_not_joint(finished, monkeypatch):
    _, directory, run = finished
    model = run.model.replace(shared_embeddings=False, tied_output=False)
    separate_run = replace(run, model=model, tokenizer=TokenizerConfig(load=("a", "b")))
    monkeypatch.setattr("twinax.train.loop.warm_start.read_run", lambda path: separate_run)
    assert settings_of(directory)[1] == TokenizerConfig(joint=False)


def test_weights_of_hugging_face_to_start_from(finished, corpus, tmp_path):
    _, directory, _ = finished
    checkpoint = read_checkpoint(directory)
    size = checkpoint.tokenizers.src.vocab_size
    sizes = {"src_vocab_size": size, "tgt_vocab_size": size, "d_model": 8, "num_heads": 2, "d_ff": 16}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "max_length": 16}
    embeddings = {"shared_embeddings": True, "tied_output": True, "embedding_padding": "frozen"}
    model = TransformerConfig(**sizes, **embeddings, output_bias="stored", positions="sinusoidal_half")
    twin = flax_transformer.Transformer(model, rngs=nnx.Rngs(0))
    convert.save(convert.Checkpoint.of(twin), tmp_path / "hf", layout="marian")
    run = run_of(corpus, updates=1, validate_every=1, translations=0)
    run = replace(run, init_from=str(tmp_path / "hf"), model=convert.load(tmp_path / "hf").config)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json, or source\.spm, .*; pass one by --tokenizer\.load"):
        train(run, tmp_path / "r", QUIET)
    for path in (directory / "tokenizer").iterdir():
        (tmp_path / "hf" / path.name).write_bytes(path.read_bytes())
    frozen_run = replace(run, training=replace(run.training, learning_rate=1e-30))
    train(frozen_run, tmp_path / "r", QUIET)
    twins = convert.load(tmp_path / "hf").arrays
    for name, array in arrays(tmp_path / "r").items():
        np.testing.assert_allclose(array, twins[name], rtol=1e-6, atol=1e-25)


def test_no_other_thread_traces_while_grain_is_imported(corpus, tmp_path, monkeypatch):
    """The import replaces `builtins.__import__`, so that a module that JAX imports while it traces is not found."""
    steps, programs = [], loop.Programs
    monkeypatch.setattr(loop, "import_module", steps.append)
    monkeypatch.setattr(loop, "Programs", lambda **options: steps.append("programs") or programs(**options))
    train(run_of(corpus, updates=1), tmp_path / "r", QUIET)
    assert steps == ["grain", "programs"]
