"""Checkpoints of `transformers`' Trainer: the optimizer's state into and out of them."""

import json
import shutil
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from parity_tests.support.conversion import VARIANTS, random_model
from parity_tests.support.trainer import batch, measure, train_there, write_model
from parity_tests.support.trajectories import PARAMETER_BOUND
from twinax import TransformerConfig, convert
from twinax.backend.errors import ConversionError
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.checkpoint import MOMENTS, Checkpoint, Training, checksum
from twinax.convert.optimizers.adam import from_torch_optimizer, to_torch_optimizer
from twinax.convert.optimizers.trainer import FILES, parameter_groups, training_arguments, unsupported_training
from twinax.convert.port import flax_specs
from twinax.flax_transformer import Transformer
from twinax.flax_transformer.unused_parameters import without_gradient
from twinax.torch_reference.losses import cross_entropy
from twinax.torch_reference.optimizers import make_optimizer
from twinax.torch_reference.step import Batch, train_step

SETTINGS = {"optimizer": "adamw", "schedule": "linear", "learning_rate": 2e-3, "warmup_updates": 4, "clip_norm": 1.0}
SETTINGS |= {"total_updates": 30, "first_update": 0, "weight_decay": 0.01}


def training_of(checkpoint, update=7, **settings):
    """The checkpoint with a run and random moments."""
    training = TrainingConfig(**SETTINGS | settings)
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), model=checkpoint.config, training=training)
    rng = np.random.default_rng(0)
    moments = (
        {name: rng.random(spec.shape).astype(spec.dtype) for name, spec in flax_specs(run.model, True).items()}
        for _ in MOMENTS
    )
    return replace(checkpoint, training=Training(run, update, 0, (0, update), update, *moments))


@pytest.fixture
def resumable(directories, tmp_path):
    """A directory for Trainer, and the checkpoint that was written to it."""
    checkpoint = training_of(convert.load(directories / "BART"))
    convert.save(checkpoint, tmp_path / "checkpoint-7", layout="bart")
    return tmp_path / "checkpoint-7", checkpoint


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
def test_a_training_goes_to_trainer_and_back(tmp_path):
    """`make trainer` has all families, and 50 updates per part."""
    handover = measure("BART, untied, scaled", tmp_path, 4, weight_decay=0.1)
    assert handover.ok, handover
    assert handover.moments < 1e-10


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A BART in float64 without dropout."""
    folder = tmp_path_factory.mktemp("start")
    with warnings.catch_warnings(action="ignore"):
        write_model("BART", folder)
    return convert.load(folder)


UPDATES = {  # settings -> gradient_accumulation_steps
    "a clipped batch": ({"weight_decay": 0.1, "clip_norm": 0.1}, 1),
    "micro-batches with label smoothing": ({"accumulation": 5, "label_smoothing": 0.1}, 5),
    "smoothing over the others": ({"accumulation": 5, "label_smoothing": 0.2, "smoothing": "others"}, 5),
    "micro-batches": ({"accumulation": 5}, 1),
    "means of micro-batches": ({"accumulation": 5, "reduction": "parts"}, 5),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UPDATES)
def test_trainer_makes_the_same_updates(case, start, tmp_path):
    """Two updates of the PyTorch twin and two of Trainer, from the same state; what Trainer saves is read back."""
    settings, steps = UPDATES[case]
    checkpoint = training_of(start, **{"clip_norm": None, **settings})
    run = checkpoint.training.run
    assert training_arguments(run)["gradient_accumulation_steps"] == steps
    convert.save(checkpoint, tmp_path / "checkpoint-7", layout="bart")
    train_there(tmp_path / "checkpoint-7", start, run, tmp_path / "out", 9)
    result = convert.load(tmp_path / "out" / "checkpoint-9", run=run)
    model = checkpoint.to_torch()
    optimizer = make_optimizer(model, run.training)
    optimizer.load_state_dict(to_torch_optimizer(checkpoint.training, model))
    for number in (7, 8):
        tensors = Batch(*(torch.from_numpy(np.array(array)) for array in batch(run, number)))
        train_step(model, optimizer, run.training, number, tensors)
    count, *moments = from_torch_optimizer(optimizer.state_dict(), run, model)
    assert (result.training.update, result.training.count) == (9, count)
    actual = (result.arrays, result.training.exp_avg, result.training.exp_avg_sq)
    for arrays, expected in zip(actual, (Checkpoint.of(model).arrays, *moments), strict=True):
        assert all(np.abs(arrays[name] - array).max() < PARAMETER_BOUND for name, array in expected.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_the_parameters_is_trainer_s(name):
    """The class and its rule of weight decay are the oracle; tables are fixed where they are no parameters."""
    from transformers import Trainer

    model = random_model(name)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    decayed = Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model)
    expected = [n for n in trained if n in decayed], [n for n in trained if n not in decayed]
    assert parameter_groups(sorted(trained)) == expected
    assert all(expected)


def test_a_directory_is_read_back(resumable, tmp_path):
    path, checkpoint = resumable
    result = convert.load(path, run=checkpoint.training.run)
    assert result.tensors.keys() == checkpoint.tensors.keys()
    assert all(a.tobytes() == checkpoint.tensors[name].tobytes() for name, a in result.tensors.items())
    assert replace(result.training, exp_avg={}, exp_avg_sq={}) == replace(
        checkpoint.training, exp_avg={}, exp_avg_sq={}
    )
    assert convert.load(path).skipped == ("optimizer.pt",)
    state = json.loads((path / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (7, 30)


def test_the_command_writes_and_reads(resumable, tmp_path, command):
    path, checkpoint = resumable
    run = tmp_path / "run.json"
    run.write_text(checkpoint.training.run.to_json())
    code, out, err = command("convert", path, tmp_path / "7", "--run", run)
    assert (code, err) == (0, "")
    assert "adamw after 7 updates: bit-identical" in " ".join(out.split())
    code, out, err = command(
        "convert", tmp_path / "7", tmp_path / "again", "--layout", "bart", "--run", tmp_path / "no"
    )
    assert (code, err) == (2, f"twinax: --run {tmp_path / 'no'}: there is no such run or file\n")
    code, out, err = command("convert", tmp_path / "7", tmp_path / "again", "--layout", "bart")
    assert (code, err) == (0, "")
    assert "lr_scheduler_type='linear'" in "".join(out.split())
    contents = [torch.load(folder / "optimizer.pt") for folder in (path, tmp_path / "again")]
    assert contents[0]["param_groups"] == contents[1]["param_groups"]
    code, out, _ = command("convert", path, tmp_path / "weights.pt")
    assert code == 0
    assert "optimizer.pt ignored: pass --run" in " ".join(out.split())
    assert command("convert", tmp_path / "7", tmp_path / "bare", "--layout", "bart", "--weights-only")[0] == 0
    assert not {*FILES} & {file.name for file in (tmp_path / "bare").iterdir()}


SCHEDULES = {
    "constant": {"schedule": "constant", "warmup_updates": 0},
    "constant_with_warmup": {"schedule": "constant"},
    "linear": {},
    "polynomial": {"final_learning_rate": 1e-4},
    "cosine": {"schedule": "cosine"},
    "cosine_with_min_lr": {"schedule": "cosine", "final_learning_rate": 1e-4},
    "inverse_sqrt": {"schedule": "noam", "learning_rate": 0.5},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first_update", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_trainer_s_schedule_goes_on_with_the_same_rates(name, first_update, directories, tmp_path):
    """The scheduler of `transformers`, in the state that was written, has the run's rates from there on."""
    from transformers import get_scheduler

    from twinax.formulas.schedules import learning_rate

    checkpoint = training_of(convert.load(directories / "BART"), **SCHEDULES[name], first_update=first_update)
    convert.save(checkpoint, tmp_path / "new", layout="bart")
    run = checkpoint.training.run
    arguments = training_arguments(run)
    assert arguments["lr_scheduler_type"] == name
    parameters = [[nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(1))]]
    optimizer = torch.optim.AdamW([{"params": group} for group in parameters], lr=arguments["learning_rate"])
    scheduler = get_scheduler(
        name, optimizer, arguments["warmup_steps"], arguments["max_steps"], arguments.get("lr_scheduler_kwargs")
    )
    state = torch.load(tmp_path / "new" / "optimizer.pt")
    optimizer.load_state_dict(
        {"state": {}, "param_groups": [g | {"params": [i]} for i, g in enumerate(state["param_groups"])]}
    )
    scheduler.load_state_dict(torch.load(tmp_path / "new" / "scheduler.pt"))
    for update in range(7, 27):
        expected = float(learning_rate(update, run.training, run.model.d_model, np))
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected] * 2, rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_each_setting_has_its_argument(start):
    settings = {"optimizer": "adamw", "schedule": "inverse_sqrt", "learning_rate": 3e-3, "warmup_updates": 7}
    settings |= {"beta1": 0.8, "beta2": 0.95, "eps": 1e-7, "weight_decay": 0.03, "clip_norm": 0.7}
    settings |= {"label_smoothing": 0.2, "accumulation": 4, "total_updates": 90}
    assert training_arguments(training_of(start, **settings).training.run) == {
        "learning_rate": 3e-3,
        "lr_scheduler_type": "inverse_sqrt",
        "warmup_steps": 7,
        "max_steps": 90,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-7,
        "weight_decay": 0.03,
        "max_grad_norm": 0.7,
        "label_smoothing_factor": 0.2,
        "gradient_accumulation_steps": 4,
    }
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), model=start.config, training=TrainingConfig())
    assert training_arguments(run)["max_grad_norm"] == 0
    longer = replace(run, loop=replace(run.loop, updates=70))
    assert [training_arguments(r)["max_steps"] for r in (run, longer)] == [-1, 70]


@pytest.mark.parametrize("smoothing", ["all", "others"])
def test_the_label_smoother_has_the_same_gradients(smoothing):
    from transformers.trainer_pt_utils import LabelSmoother

    training = TrainingConfig(label_smoothing=0.3, smoothing=smoothing)
    model = TransformerConfig.preset("tiny", src_vocab_size=11, tgt_vocab_size=11)
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), model=model, training=training)
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 0, 0, 0]])
    total, tokens = cross_entropy(logits, labels, model.pad_id, training)
    (gradient,) = torch.autograd.grad(total / tokens, logits)
    smoother = LabelSmoother(training_arguments(run)["label_smoothing_factor"], ignore_index=-100)
    loss = smoother({"logits": logits}, torch.where(labels == model.pad_id, -100, labels))
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient, rtol=1e-5, atol=1e-8)


def test_the_settings_without_effect_are_no_obstacle(start):
    """The rule of clipping without clipping, of smoothing without smoothing, and the reduction of one micro-batch."""
    for settings, idle in (
        ({"clip_norm": None}, {"clip_rule": "optax", "smoothing": "others_but_padding"}),
        ({"label_smoothing": 0.1}, {"reduction": "parts"}),
    ):
        runs = [training_of(start, **settings, **others).training.run for others in ({}, idle)]
        assert training_arguments(runs[0]) == training_arguments(runs[1])


@pytest.mark.parametrize("name", ["Marian, untied", "BART", "T5"])
def test_every_parameter_has_a_gradient(name, directories):
    """`without_gradient` is about those that have none; Trainer's optimizer would not decay them."""
    assert without_gradient(convert.load(directories / name).config) == set()


UNWRITABLE = {  # message -> settings
    "schedule='step': transformers' Trainer has no such schedule": {"schedule": "step", "step_updates": 3},
    "optimizer='adam': transformers' Trainer has weight decay as adamw": {"optimizer": "adam"},
    "decayed='all': transformers' Trainer decays neither norms nor biases": {"decayed": "all"},
    "clip_rule='optax': transformers' Trainer clips gradients as torch does": {"clip_rule": "optax"},
    "reduction='sum': transformers' Trainer divides the loss by the number of tokens": {"reduction": "sum"},
    "reduction='parts': with label smoothing, transformers' Trainer divides the loss": {
        "reduction": "parts",
        "accumulation": 2,
        "label_smoothing": 0.1,
    },
    "smoothing='others_but_padding': transformers' Trainer smooths over padding too": {
        "label_smoothing": 0.1,
        "smoothing": "others_but_padding",
    },
}


@pytest.mark.parametrize("message", UNWRITABLE)
def test_of_a_run_that_trainer_cannot_continue_the_weights_are_written(message, start, tmp_path):
    checkpoint = training_of(start, **UNWRITABLE[message])
    assert unsupported_training(checkpoint, convert.family("bart")).startswith(message)
    convert.save(checkpoint, tmp_path / "new", layout="bart")
    assert not {*FILES} & {file.name for file in (tmp_path / "new").iterdir()}
    assert checksum(convert.load(tmp_path / "new").arrays) == checksum(checkpoint.arrays)


def test_the_command_says_why_the_optimizer_is_omitted(directories, tmp_path, command):
    """Trainer does not decay T5's positions."""
    convert.save(training_of(convert.load(directories / "T5")), tmp_path / "a.pt")
    code, out, err = command("convert", tmp_path / "a.pt", tmp_path / "new", "--layout", "t5")
    text = " ".join(out.replace("│", " ").split())
    assert (code, err) == (0, "")
    assert "omitted, with the run and its 7 updates: weight_decay=0.01: transformers' Trainer does not decay" in text
    assert "TrainingArguments" not in text
    assert not {*FILES} & {file.name for file in (tmp_path / "new").iterdir()}


def test_a_model_that_begins_here_goes_to_trainer(tmp_path, command):
    """Its directory forces EOS at the end of the longest translation, and the run's model does not."""
    sizes = {"src_vocab_size": 31, "tgt_vocab_size": 31, "d_model": 8, "num_heads": 2, "d_ff": 12, "max_length": 9}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    kind = {"norm_placement": "pre", "final_norm": True, "positions": "sinusoidal_half", "output_bias": "stored"}
    config = TransformerConfig(**sizes, **layers, **kind, shared_embeddings=True, tied_output=True)
    checkpoint = training_of(Checkpoint.of(Transformer(config, rngs=nnx.Rngs(0))))
    convert.save(checkpoint, tmp_path / "a.pt")
    code, out, err = command("convert", tmp_path / "a.pt", tmp_path / "new", "--layout", "pegasus")
    assert (code, err) == (0, ""), err
    assert "adamw after 7 updates: bit-identical after reading back" in " ".join(out.replace("│", " ").split())
    assert {*FILES} <= {file.name for file in (tmp_path / "new").iterdir()}
    code, out, err = command("convert", tmp_path / "a.pt", tmp_path / "weights.pt", "--weights-only")
    assert "7 updates: --weights-only converts the weights alone" in " ".join(out.replace("│", " ").split())


def test_the_command_says_that_a_learned_output_bias_is_the_reason(start, tmp_path, command):
    """What is read back has a stored bias, which would be no reason."""
    config = start.config.replace(output_bias="learned")
    convert.save(training_of(replace(start, config=config)), tmp_path / "a.pt")
    code, out, err = command("convert", tmp_path / "a.pt", tmp_path / "new", "--layout", "bart")
    text = " ".join(out.replace("│", " ").split())
    assert (code, err) == (0, "")
    assert "7 updates: output_bias='learned': BartForConditionalGeneration does not train its output bias" in text


def test_without_torch_the_optimizer_is_omitted(start, tmp_path, monkeypatch):
    checkpoint = training_of(start)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "writing it needs PyTorch, which is not installed" in unsupported_training(
        checkpoint, convert.family("bart")
    )
    convert.save(checkpoint, tmp_path / "new", layout="bart")
    assert not {*FILES} & {file.name for file in (tmp_path / "new").iterdir()}


OTHER_RUNS = {
    r"checkpoint-7: schedule='step': transformers' Trainer has no such": {"schedule": "step", "step_updates": 1000},
    r"checkpoint-7: reduction='sum': transformers' Trainer divides": {"reduction": "sum"},
    r"optimizer.pt: decayed='all': transformers' Trainer decays neither": {"decayed": "all"},
    r"has optimizer='adamw', and the run has 'adam'": {"optimizer": "adam"},
    r"optimizer.pt: has beta2=0.98, and the run has 0.999 \(--training.beta2\)$": {"beta2": 0.999},
    r"has weight_decay=0.01, and the run has 0.0 \(--training.weight-decay\)": {"weight_decay": 0.0},
    r"scheduler.pt: has the base learning rate 0.002, and the run's schedule 0.003; set its": {"learning_rate": 3e-3},
    r"scheduler.pt: has the learning rate of update 7 0.0017.*, and the run's schedule 0.0018": {"total_updates": 60},
}


@pytest.mark.parametrize("message", OTHER_RUNS)
def test_a_run_with_other_settings_is_refused(message, resumable):
    path, checkpoint = resumable
    run = checkpoint.training.run
    run = replace(run, training=replace(run.training, **OTHER_RUNS[message]))
    with pytest.raises(ConversionError, match=message):
        convert.load(path, run=run)


def test_another_model_is_refused(resumable):
    path, checkpoint = resumable
    run = checkpoint.training.run
    dropout = replace(run, model=run.model.replace(ffn_dropout=0.3))
    assert convert.load(path, run=dropout).config.ffn_dropout == 0.3
    with pytest.raises(ConversionError, match=r"activation='gelu': the run's model has 'relu'"):
        convert.load(path, run=replace(run, model=run.model.replace(activation="relu")))


def changed(change):
    """A function that changes optimizer.pt."""

    def apply(path):
        content = torch.load(path / "optimizer.pt")
        change(content)
        torch.save(content, path / "optimizer.pt")

    return apply


def drop_a_parameter(content):
    del content["param_groups"][1]["params"][-1], content["state"][max(content["state"])]


DAMAGE = {
    r"has no optimizer.pt, from which": lambda path: (path / "optimizer.pt").unlink(),
    r"has no scheduler.pt, from which": lambda path: (path / "scheduler.pt").unlink(),
    r"optimizer.pt: damaged, or holds more": lambda path: (path / "optimizer.pt").write_bytes(b"PK"),
    r"scheduler.pt: holds more than tensors, a .*Module": lambda path: torch.save(nn.Module(), path / "scheduler.pt"),
    r"scheduler.pt: is not the state of a schedule": lambda path: torch.save({"best": 1}, path / "scheduler.pt"),
    r"optimizer.pt: is not the state dict of an opt": lambda path: torch.save([1], path / "optimizer.pt"),
    r"has groups of \[25, 39\] parameters; of this model, they have \[25, 40\]$": changed(drop_a_parameter),
    r"has exp_avg float32\[3\] for model.shared.weight, which is float32\[31, 12\]": changed(
        lambda c: c["state"][0].update(exp_avg=torch.zeros(3))
    ),
    r"has exp_avg_sq bfloat16\[31, 12\] for model.shared.weight, which is float32\[31, 12\]": changed(
        lambda c: c["state"][0].update(exp_avg_sq=c["state"][0]["exp_avg_sq"].bfloat16())
    ),
    r"has parameters with different step counts, \[7, 8\]": changed(
        lambda c: c["state"][0].update(step=torch.tensor(8.0))
    ),
    r"has no state of 1 parameters: model.shared.weight": changed(lambda c: c["state"].pop(0)),
    r"has step, exp_avg for model.shared.weight; Adam has": changed(lambda c: c["state"][0].pop("exp_avg_sq")),
    r"has parameter groups that do not match its state": changed(lambda c: c["state"].update({99: {}})),
    r"has amsgrad=True, which twinax does not have": changed(lambda c: c["param_groups"][0].update(amsgrad=True)),
    r"has parameter groups without betas; those of Adam": changed(lambda c: c["param_groups"][0].pop("betas")),
    r"is not as Trainer writes it: not enough values": changed(lambda c: c["param_groups"][0].update(betas=(0.9,))),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_one_line(message, resumable):
    path, checkpoint = resumable
    DAMAGE[message](path)
    with pytest.raises(ConversionError, match=message) as error:
        convert.load(path, run=checkpoint.training.run)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_tables_that_trainer_trained_are_named(directories, tmp_path):
    """`transformers` 5 does not freeze the position tables of a Marian that it loads."""
    checkpoint = training_of(convert.load(directories / "Marian"))
    convert.save(checkpoint, tmp_path / "new", layout="marian")
    with warnings.catch_warnings(action="ignore"):
        model = type(random_model("Marian")).from_pretrained(tmp_path / "new")
    groups = parameter_groups([name for name, _ in model.named_parameters()])
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [parameters[name] for name in group]} for group in groups])
    torch.save(optimizer.state_dict(), tmp_path / "new" / "optimizer.pt")
    with pytest.raises(ConversionError, match=r"; with the position tables, which must be frozen: requires_grad_"):
        convert.load(tmp_path / "new", run=checkpoint.training.run)
    shutil.rmtree(tmp_path / "new")
