"""Data order, seeds and validation metrics of a run, against numpy, nnx.Rngs and sacreBLEU."""

import fcntl
import json
from dataclasses import replace

import numpy as np
import pytest
import sacrebleu
import torch
from flax import nnx
from rich.console import Console

from twinax import TransformerConfig, convert, flax_transformer
from twinax.backend.errors import RunError
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.training import TrainingConfig
from twinax.formulas.decoding import Decoded
from twinax.train.checkpointing.checkpoints import read_checkpoint
from twinax.train.checkpointing.run_directory import locked, prepare_again, prepare_in
from twinax.train.data.buckets import plan_epoch
from twinax.train.data.prepare import prepare
from twinax.train.loop import evaluate
from twinax.train.loop.loop import train
from twinax.train.processes.process_group import ProcessGroup
from twinax.train.step.partitioning import Placement
from twinax.train.step.programs import Programs
from twinax.train.tracking.metrics import read_metrics, validations

QUIET = Console(quiet=True)
pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Sentences of 2 to 24 words, in several shapes of batches."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    sentences = [" ".join(rng.choice(list("abcdefgh"), rng.integers(2, 25))) for _ in range(160)]
    for name, text in (("src", "\n".join(sentences)), ("tgt", "\n".join(sentences).upper())):
        (folder / name).write_text(text + "\n")
    return RunConfig(
        corpus=CorpusConfig(src=str(folder / "src"), tgt=str(folder / "tgt"), held_out=20),
        tokenizer=TokenizerConfig(kind="word", vocab_size=50),
        batches=BatchConfig(tokens=70, shapes=6),
        model=TransformerConfig.preset(
            "small", d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1, max_length=32
        ),
        training=TrainingConfig(schedule="constant", learning_rate=1e-30, warmup_updates=0, seed=1),
        loop=LoopConfig(epochs=3),
    )


@pytest.fixture
def one_shape(run):
    """The same in batches of one shape."""
    return replace(run, batches=BatchConfig(tokens=640, shapes=1))


def pairs_of(batches, epoch):
    """Source rows of each batch of an epoch, without padding."""
    start = epoch * batches.per_epoch
    epoch_batches = (batches[i].arrays for i in range(start, start + batches.per_epoch))
    return [[row[row != 0].tolist() for row in batch.src_tokens if (row != 0).any()] for batch in epoch_batches]


def flat(batches):
    return sorted(tuple(row) for batch in batches for row in batch)


def test_epochs_and_seeds_have_orders_of_their_own(run):
    """Every epoch and seed has every pair once, in an order of its own, with different pairs per batch."""
    batches = prepare(run).batches()
    other_batches = prepare(replace(run, training=replace(run.training, seed=2))).batches()
    orders = [pairs_of(batches, 0), pairs_of(batches, 1), pairs_of(batches, 2), pairs_of(other_batches, 0)]
    assert all(flat(order) == flat(orders[0]) for order in orders)
    for i, order in enumerate(orders):
        for earlier_order in orders[:i]:
            assert sum(a == b for a, b in zip(order, earlier_order, strict=True)) <= 1
            assert {frozenset(map(tuple, batch)) for batch in order} != {
                frozenset(map(tuple, b)) for b in earlier_order
            }
    assert pairs_of(prepare(run).batches(), 1) == orders[1]


def test_shapes_follow_each_other_at_random(run):
    """Neither sorted nor in runs: neighbors differ about as often as in a random order of the same shapes.

    In the first epoch, shapes begin one after the other.
    """
    batches = prepare(run).batches()
    for epoch in range(1, 4):
        numbers = np.array(batches.plan(epoch).buckets)
        rng = np.random.default_rng(0)
        random_changes = [np.mean(np.diff(rng.permutation(numbers)) != 0) for _ in range(200)]
        changes = np.mean(np.diff(numbers) != 0)
        assert np.quantile(random_changes, 0.005) <= changes <= np.quantile(random_changes, 0.995)


def test_a_run_of_an_earlier_version_keeps_its_order(run, tmp_path):
    """Its data.json does not say that shapes begin one after the other."""
    (tmp_path / ".data.json.twinax-0.json").touch()  # of a start that was killed
    with locked(tmp_path, print):
        prepared, _ = prepare_in(tmp_path, run, None, print, ProcessGroup())
    assert prepare_again(tmp_path, run, print).batches().plan(0).buckets == prepared.batches().plan(0).buckets
    data = json.loads((tmp_path / "data.json").read_text())
    assert data.pop("gradual") is True
    (tmp_path / "data.json").write_text(json.dumps(data))
    earlier = prepare_again(tmp_path, run, print)
    expected = plan_epoch(prepared.train.lengths, prepared.buckets, run.training.seed, 0)
    assert earlier.batches().plan(0).buckets == expected.buckets != prepared.batches().plan(0).buckets


class Recorder:
    """A tracker that records its calls."""

    def __init__(self):
        self.logged, self.flushed, self.closed = [], 0, 0

    def log(self, update, numbers):
        self.logged.append((update, dict(numbers)))

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed += 1


def test_the_loop_reads_the_order_of_its_seed(one_shape, tmp_path):
    """Batch checksums in metrics.jsonl differ per seed and epoch; initial weights are those of nnx.Rngs(seed).

    A tracker receives the numbers of these records.
    """
    run = replace(one_shape, loop=LoopConfig(epochs=2, translations=0))
    checksums, weights = {}, {}
    for seed in (1, 2):
        seed_run = replace(run, training=replace(run.training, seed=seed))
        tracker, directory = Recorder(), tmp_path / str(seed)
        train(seed_run, directory, QUIET, trackers=[tracker])
        records = [record for record in read_metrics(directory) if "checksum" in record]
        losses = [
            (update, numbers["training/loss"]) for update, numbers in tracker.logged if "training/loss" in numbers
        ]
        assert losses == [(record["update"], record["loss"]) for record in records]
        validation_losses = {update: n["validation/loss"] for update, n in tracker.logged if "validation/loss" in n}
        assert validation_losses == {update: v["loss"] for update, v in validations(read_metrics(directory)).items()}
        assert (tracker.closed, tracker.flushed > 1) == (1, True)
        checksums[seed] = [[r["checksum"] for r in records if r["epoch"] == epoch] for epoch in (0, 1)]
        checkpoint = read_checkpoint(tmp_path / str(seed))
        weights[seed] = {name: np.asarray(array) for name, array in checkpoint.state.params.items()}
        model = flax_transformer.Transformer(checkpoint.run.model, rngs=nnx.Rngs(seed))
        for name, array in flax_transformer.named_arrays(model, nnx.Param).items():
            np.testing.assert_allclose(weights[seed][name], array, rtol=0, atol=1e-20)
    orders = [order for seed in checksums for order in checksums[seed]]
    assert len({tuple(order) for order in orders}) == 4
    assert all(len(order) == len(orders[0]) > 2 for order in orders)
    assert not np.array_equal(weights[1]["src_embedding.embedding"], weights[2]["src_embedding.embedding"])


def test_the_loss_of_validation_is_a_mean_over_tokens(run):
    """Not a mean over batches, whose token counts differ; the oracle is PyTorch, one sentence at a time."""
    data = prepare(replace(run, loop=replace(run.loop, translations=0)))
    validation, model = (
        evaluate.Validation(
            data, Placement.of(data.run.sharding, data.run.model), ProcessGroup(), Programs(in_background=False)
        ),
        data.run.model,
    )
    pairs = data.valid[0].pairs
    assert len({sum(len(pairs.targets([i])[0]) for i in rows) for rows in validation._plans[0].batches}) > 1
    transformer = flax_transformer.Transformer(model, rngs=nnx.Rngs(0))
    arrays = {name: 3 * array for name, array in flax_transformer.named_arrays(transformer).items()}
    twin = convert.to_torch(flax_transformer.Transformer.from_arrays(model, arrays)).eval()
    losses = []
    for i in range(len(pairs)):
        src, tgt = (torch.from_numpy(side([i])[0].astype(int))[None] for side in (pairs.sources, pairs.targets))
        logits = twin(src, tgt[:, :-1]).detach()[0]
        losses += torch.nn.functional.cross_entropy(logits, tgt[0, 1:], reduction="none").tolist()
    assert validation.measure(arrays)["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("lowercase", [False, True])
def test_validation_has_sacrebleu_s_figure(run, lowercase, monkeypatch):
    """The hypotheses are shorter than their references, so that swapping the two changes BLEU."""
    variant = replace(run, tokenizer=replace(run.tokenizer, lowercase=lowercase))
    data = prepare(replace(variant, loop=replace(run.loop, translations=20)))
    tokenizer, eos = data.tokenizers.tgt, data.run.model.eos_id
    sentences = [reference.split()[: max(2, len(reference.split()) * 2 // 3)] for reference in data.valid[0].references]
    texts = [" ".join([*words[:-1], "A"]) for words in sentences]
    ids = [[*row, eos] for row in tokenizer.encode(texts)]
    remaining_ids = iter(ids)

    def generate(model, src, decoding, put):
        rows = [next(remaining_ids, [eos]) for _ in src]
        longest = max(map(len, rows))
        tokens = np.array([[row + [data.run.model.pad_id] * (longest - len(row))] for row in rows])
        lengths = np.array([[len(row)] for row in rows])
        return Decoded(tokens, lengths, np.zeros(lengths.shape), np.ones(lengths.shape, bool))

    monkeypatch.setattr(evaluate, "generate", generate)
    result = evaluate.Validation(
        data, Placement.of(data.run.sharding, data.run.model), ProcessGroup(), Programs(in_background=False)
    )._translate(flax_transformer.named_arrays(flax_transformer.Transformer(data.run.model, rngs=nnx.Rngs(0))))
    hypotheses = [text.lower() if lowercase else text for text in texts]
    expected = sacrebleu.corpus_bleu(hypotheses, [data.valid[0].references], lowercase=lowercase).score
    reverse_bleu = sacrebleu.corpus_bleu(data.valid[0].references, [hypotheses], lowercase=lowercase).score
    assert result["bleu"] == pytest.approx(expected, abs=1e-9)
    assert abs(expected - reverse_bleu) > 1
    assert [sample[2] for sample in result["samples"]] == hypotheses[:3]
    assert [sample[1] for sample in result["samples"]] == data.valid[0].references[:3]
    if lowercase:
        assert sacrebleu.corpus_bleu(hypotheses, [data.valid[0].references]).score < expected - 1


def test_a_metric_that_was_not_measured(one_shape, tmp_path):
    loop = LoopConfig(updates=2, validate_every=2, translations=0)
    train(replace(one_shape, loop=loop), tmp_path / "r", QUIET)
    longer = replace(loop, updates=4, translations=4, metric="bleu")
    outcome = train(replace(one_shape, loop=longer), tmp_path / "r", QUIET)
    assert (outcome.update, "bleu" in outcome.validation) == (4, True)


def test_patience(one_shape, tmp_path):
    """With a learning rate of almost nothing."""
    run = replace(one_shape, loop=LoopConfig(updates=30, validate_every=1, patience=2, translations=0))
    outcome = train(run, tmp_path / "r", QUIET)
    assert outcome.update == 3  # the first is best, and the next two are not better
    assert sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir()) == ["1", "2", "3"]  # best and last two
    assert train(run, tmp_path / "r", QUIET).update == 3


def test_a_file_system_without_locks_is_not_another_process(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lines = []
    with locked(tmp_path / "run", lines.append):
        pass
    assert lines == [
        f"{tmp_path / 'run'}: cannot be locked (No locks available); make sure that no other process trains there"
    ]


def test_a_lock_that_another_process_has_replaced_does_not_count(tmp_path, monkeypatch):
    """The other one failed, removed its new directory, and a third made it again, after this one opened the file."""
    lock = fcntl.flock

    def replaced(file, operation):
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").touch()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(RunError, match="is in use by another process"), locked(tmp_path, print):
        pass
