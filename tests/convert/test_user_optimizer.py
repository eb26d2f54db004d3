"""A user's own AdamW in a .pt file: its parameters are identified by order and shape, or by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from twinax import TransformerConfig, convert
from twinax.backend.errors import ConversionError
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.arrays.frameworks import from_torch
from twinax.convert.checkpoint import Checkpoint
from twinax.convert.formats.file_layouts import to_named, trained_rules
from twinax.convert.optimizers.user_optimizer import order_of
from twinax.convert.port import flax_specs
from twinax.convert.rules import translate
from twinax.parity.functions import random_arrays

TINY = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
NN = TransformerConfig.preset("small", num_encoder_layers=1, num_decoder_layers=1, d_model=16, d_ff=20, num_heads=2)
PUBLISHED = TransformerConfig.published("leftover", as_published=False).replace(
    num_encoder_layers=1, num_decoder_layers=1, d_model=16, d_ff=20, num_heads=2
)
LAYOUTS = {"twinax": TINY, "torch_nn": NN, "leftover": PUBLISHED}


def module_of(tensors, buffers):
    """A module with these tensors, registered in their order."""
    root = nn.Module()
    for name, array in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        tensor = torch.from_numpy(np.array(array))
        if name in buffers:
            module.register_buffer(leaf, tensor)
        else:
            module.register_parameter(leaf, nn.Parameter(tensor))
    return root


def by_dimensions(named):
    return [[p for n, p in named if p.ndim >= 2], [p for n, p in named if p.ndim < 2]]


def by_name(named):
    no_decay = [n for n, _ in named if "bias" in n or "norm" in n]
    return [[p for n, p in named if n in no_decay], [p for n, p in named if n not in no_decay]]


def saved(path, layout, make_groups, *, names=False, **settings):
    """Write the file of a model after two updates; returns (run, module, optimizer)."""
    config = LAYOUTS[layout]
    arrays = random_arrays(config, 0)
    tensors = to_named(arrays, config, layout)
    trained = {target for rule in trained_rules(config, layout) for target in rule.target}
    module = module_of(tensors, tensors.keys() - trained)
    groups = make_groups(list(module.named_parameters()))
    decays = [0.01 * any(p.ndim > 1 for p in group) for group in groups]
    if names:
        groups = [[(n, p) for n, p in module.named_parameters() if any(p is q for q in group)] for group in groups]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": d} for group, d in zip(groups, decays, strict=True)],
        lr=1e-3, betas=(0.9, 0.98), eps=1e-9,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    training = TrainingConfig(
        **{
            "optimizer": "adamw",
            "weight_decay": 0.01,
            "schedule": "constant",
            "learning_rate": 1e-3,
            "warmup_updates": 0,
        }
        | settings
    )
    tokenizer = TokenizerConfig(joint=config.shared_embeddings)
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), tokenizer=tokenizer, model=config, training=training)
    return run, module, optimizer


def check(path, layout, run, module, optimizer):
    """The oracle is the optimizer in memory, which knows its parameters themselves."""
    checkpoint = convert.load(path, run=run)
    training = checkpoint.training
    assert (training.update, training.count, training.position) == (2, 2, (0, 2))
    rules, specs = trained_rules(run.model, layout), flax_specs(run.model, trained_only=True)
    weights = translate(rules, {name: checkpoint.arrays[name] for name in specs}, specs)
    for key in ("exp_avg", "exp_avg_sq"):
        moments = translate(rules, getattr(training, key), specs)
        for name, parameter in module.named_parameters():
            assert weights[name].tobytes() == from_torch(parameter).tobytes()
            assert moments[name].tobytes() == from_torch(optimizer.state[parameter][key]).tobytes(), name
    return checkpoint


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make_groups", [by_dimensions, by_name])
def test_two_groups(layout, make_groups, tmp_path):
    if layout == "leftover" and make_groups is by_name:
        return  # its gains are gamma and beta in modules that are called norms
    checkpoint = check(tmp_path / "a.pt", layout, *saved(tmp_path / "a.pt", layout, make_groups))
    (note,) = checkpoint.optimizer_notes
    assert note.startswith("its parameters are in the order of the state dict (groups")


def test_one_group(tmp_path):
    def make(named):
        return [[p for _, p in named]]

    arguments = saved(tmp_path / "a.pt", "twinax", make, decayed="all")
    assert "(one group)" in check(tmp_path / "a.pt", "twinax", *arguments).optimizer_notes[0]
    run = replace(arguments[0], training=replace(arguments[0].training, decayed="matrices"))
    with pytest.raises(
        ConversionError, match=r"weight_decay=0.01 for .*, and the run has 0.0; set --training.weight-dec"
    ):
        convert.load(tmp_path / "a.pt", run=run)


def test_names_need_no_assumption(tmp_path):
    """In an order that no rule has."""

    def make(named):
        return [group[::-1] for group in by_dimensions(named)]

    arguments = saved(tmp_path / "a.pt", "twinax", make, names=True)
    assert check(tmp_path / "a.pt", "twinax", *arguments).optimizer_notes == ()


def test_another_order_is_refused(tmp_path):
    def make(named):
        return [sorted(group, key=lambda p: p.numel()) for group in by_dimensions(named)]

    run, _, _ = saved(tmp_path / "a.pt", "twinax", make)
    with pytest.raises(
        ConversionError, match=r"parameters, in no usual order of the model's \d+; pass named_parameters"
    ):
        convert.load(tmp_path / "a.pt", run=run)


def test_an_ambiguous_order_is_refused():
    """Before the first update, there are no shapes that tell two rules apart."""
    shapes = {"a.weight": (2, 2), "b.bias": (2, 2), "c.gain": (2,)}
    groups = [{"params": [0, 1]}, {"params": [2]}]
    with pytest.raises(ConversionError, match=r"fit groups: at least 2 dim.* as well as groups: neither bias nor norm"):
        order_of(groups, {}, [*shapes], [*shapes], shapes)
    moments = {i: {"exp_avg": torch.zeros(shape)} for i, shape in enumerate([(2, 2), (2,), (2, 2)])}
    assert order_of(groups, moments, [*shapes], [*shapes], shapes)[0] == (["a.weight", "c.gain"], ["b.bias"])


def test_the_command(tmp_path, command):
    run, _, optimizer = saved(tmp_path / "a.pt", "twinax", by_dimensions, learning_rate=5e-4)
    (tmp_path / "run.json").write_text(run.to_json())
    code, out, err = command("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--run", tmp_path / "run.json")
    text = " ".join(out.split())
    assert (code, err) == (0, "")
    assert "adamw after 2 updates: bit-identical" in text
    assert "its learning rate 0.001 is" in text.replace("│ │ │ ", "")
    state = torch.load(tmp_path / "b.pt")["optimizer"]["state"]
    assert sorted(float(e["exp_avg"].abs().max()) for e in state.values()) == pytest.approx(
        sorted(float(e["exp_avg"].abs().max()) for e in optimizer.state.values())
    )


def state_of(optimizer_type, content):
    """The state of another optimizer after an update of the same parameters."""
    state, groups = content["optimizer"]["state"], content["optimizer"]["param_groups"]
    parameters = [[nn.Parameter(torch.zeros_like(state[i]["exp_avg"])) for i in group["params"]] for group in groups]
    optimizer = optimizer_type([{"params": members} for members in parameters])
    for parameter in (parameter for members in parameters for parameter in members):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    content["optimizer"] = optimizer.state_dict()


REFUSALS = {
    r"without amsgrad; those of Adam and AdamW": lambda content: state_of(torch.optim.RAdam, content),
    r"without betas; those of Adam and AdamW": lambda content: state_of(torch.optim.SGD, content),
    r"has exp_avg bfloat16\[.* which is float32\[": lambda content: [
        entry.update(exp_avg=entry["exp_avg"].bfloat16()) for entry in content["optimizer"]["state"].values()
    ],
    r"has no optimizer; looked for": lambda content: content.pop("optimizer"),
    r"is not the state dict of an optimizer": lambda content: content.update(optimizer=[]),
    r"has beta2=0.5, and the run has 0.98": lambda content: [
        group.update(betas=(0.9, 0.5)) for group in content["optimizer"]["param_groups"]
    ],
    r"has different|different step counts": lambda content: content["optimizer"]["state"][0].update(
        step=torch.tensor(9.0)
    ),
    r"in no usual order": lambda content: content["optimizer"]["state"][0].update(exp_avg=torch.zeros(2)),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_does_not_fit_is_one_line(message, tmp_path):
    run, _, _ = saved(tmp_path / "a.pt", "twinax", by_dimensions)
    content = torch.load(tmp_path / "a.pt")
    REFUSALS[message](content)
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=message) as error:
        convert.load(tmp_path / "a.pt", run=run)
    assert str(error.value).startswith(f"{tmp_path / 'a.pt'}: ")
    assert "\n" not in str(error.value)


def test_another_model_is_refused(tmp_path):
    run, _, _ = saved(tmp_path / "a.pt", "twinax", by_dimensions)
    run = replace(run, model=run.model.replace(norm_eps=1e-3))
    with pytest.raises(ConversionError, match=r"norm_eps=.*: the run's model has 0.001"):
        convert.load(tmp_path / "a.pt", TINY, run=run)


def test_a_file_of_twinax_has_its_own_run(tmp_path):
    run, _, _ = saved(tmp_path / "a.pt", "twinax", by_dimensions)
    convert.save(Checkpoint(TINY, random_arrays(TINY, 0)), tmp_path / "b.pt")
    with pytest.raises(ConversionError, match=r"b\.pt: twinax wrote it"):
        convert.load(tmp_path / "b.pt", run=run)
