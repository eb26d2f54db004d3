"""Where the arrays of a run are: the table of names, and the same training on eight devices."""

import os
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey

from twinax import TransformerConfig
from twinax.backend.errors import ConfigError
from twinax.configs.sharding import ShardingConfig
from twinax.convert.port import flax_specs
from twinax.train.step.partitioning import Placement, partition

ROOT = str(Path(__file__).parents[2])  # of parity_tests
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
CONFIGS = {
    "sinusoids": TransformerConfig.preset("tiny", **ONE_LAYER),
    "T5": TransformerConfig.preset("t5_small", **ONE_LAYER),
    "learned": TransformerConfig.preset("tiny", positions="learned", norm="rms_norm", ffn_gate=True, **ONE_LAYER),
}
# name -> sizes of its dimensions that the axes divide, by letters: D d_model, H heads times width, F feed-forward, V, N
SIZES = {
    "src_embedding.embedding": "VD",
    "decoder.layers.0.cross_attention.q_proj.kernel": "DH",
    "encoder.layers.0.self_attention.v_proj.bias": "H",
    "decoder.layers.0.self_attention.out_proj.kernel": "HD",
    "encoder.layers.0.feed_forward.inner_proj.kernel": "DF",
    "encoder.layers.0.feed_forward.gate_proj.kernel": "DF",
    "decoder.layers.0.feed_forward.outer_proj.kernel": "FD",
    "output.proj.kernel": "DV",
    "output.bias": "V",
    "encoder.relative_positions.embedding": "-N",
    "encoder.layers.0.feed_forward.outer_proj.bias": "",
    "encoder.layers.0.self_attention.out_proj.bias": "",
    "decoder.final_norm.scale": "",
    "tgt_input.positions.table": "",
}
AXES = {"D": "fsdp", "H": "tensor", "F": "tensor", "V": "tensor", "N": "tensor", "-": None}


@pytest.mark.parametrize("name", SIZES)
def test_each_dimension_has_its_axis(name):
    """A parameter, and its moment in the optimizer's state."""
    for path in ((DictKey(name),), (GetAttrKey("optimizer"), GetAttrKey("mu"), DictKey(name))):
        assert partition(path) == PartitionSpec(*(AXES[letter] for letter in SIZES[name]))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_matrix_is_divided(config):
    specs = flax_specs(config)
    assert len(specs) > 20
    for name, spec in specs.items():
        axes = partition((DictKey(name),))
        assert len(axes) in (0, len(spec.shape)), name
        if len(spec.shape) == 2 and not name.endswith("positions.table"):
            assert {*axes} & {"fsdp", "tensor"}, name
            assert "fsdp" in axes or "relative_positions" in name


def test_counts_are_everywhere():
    for path in ((GetAttrKey("update"),), (GetAttrKey("optimizer"), GetAttrKey("count"))):
        assert partition(path) == PartitionSpec()


MODEL = TransformerConfig.preset("tiny", num_heads=8, head_dim=None, v_head_dim=None, d_ff=64, src_vocab_size=104)
MODEL = MODEL.replace(tgt_vocab_size=112, decoder_num_heads=None)
INVALID = {
    "nothing": ({"data": 0}, "data=0: must be at least 1, or -1"),
    "two rests": ({"fsdp": -1}, "data=-1, fsdp=-1, tensor=1: only one can be -1"),
    "too many": ({"data": 3}, "data=3 · fsdp=1 · tensor=1: the product must be the number of devices, 8"),
    "no rest": ({"fsdp": 3}, "data=-1 · fsdp=3 · tensor=1: the product must be the number of devices, 8"),
    "heads": ({"tensor": 8, "model": {"num_heads": 4}}, "tensor=8: does not divide num_heads=4"),
    "decoder heads": (
        {"tensor": 8, "model": {"decoder_num_heads": 4}},
        "tensor=8: does not divide decoder_num_heads=4",
    ),
    "vocabulary": ({"tensor": 2, "model": {"tgt_vocab_size": 111}}, "tensor=2: does not divide tgt_vocab_size=111"),
    "width": ({"fsdp": 8, "model": {"d_model": 36, "head_dim": 4}}, "fsdp=8: does not divide d_model=36"),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_mesh_that_does_not_fit_is_one_line(name):
    fields, message = INVALID[name]
    with pytest.raises(ConfigError) as error:
        ShardingConfig(**{n: v for n, v in fields.items() if n != "model"}).check(
            MODEL.replace(**fields.get("model", {})), 8
        )
    assert str(error.value).startswith(message)
    assert len(str(error.value).splitlines()) == 1


def test_the_rest_of_the_devices():
    assert ShardingConfig().sizes(8) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert ShardingConfig(fsdp=2, tensor=2).sizes(8) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert ShardingConfig(data=2, tensor=-1).sizes(8) == {"data": 2, "fsdp": 1, "tensor": 4}


def test_fewer_rows_than_devices_are_one_line():
    placement = Placement(AbstractMesh((4, 2, 1), ("data", "fsdp", "tensor")))
    placement.check_rows(8)
    with pytest.raises(ConfigError, match="data=4, fsdp=2: divide the rows of a batch into 8 shares, and the smallest"):
        placement.check_rows(7)


def test_nothing_is_written_for_a_mesh_that_does_not_fit(command, tmp_path, monkeypatch):
    """This process has one device."""
    monkeypatch.chdir(tmp_path)
    for name in ("src", "tgt"):
        (tmp_path / name).write_text("".join(f"{letter} b c\n" for letter in "abcdefgh" * 5))
    flags = ("train", "--src", "src", "--tgt", "tgt", "--out", "r", "--tokenizer.kind", "word")
    code, _, err = command(*flags, "--sharding.tensor", "2")
    assert (code, err) == (2, "twinax: data=-1 · fsdp=1 · tensor=2: the product must be the number of devices, 1\n")
    assert not (tmp_path / "r").exists()
    monkeypatch.setattr(Placement, "shares", 1000)
    code, _, err = command(*flags)
    assert (code, "divide the rows of a batch into 1000 shares" in err.splitlines()[-1]) == (2, True)
    assert not (tmp_path / "r").exists()


DEVICES = """
import jax, math, numpy as np, re
jax.config.update("jax_enable_x64", True)
from twinax import flax_transformer
from twinax.configs.decoding import DecodingConfig
from twinax.configs.sharding import ShardingConfig
from twinax.convert.optimizers.adam import find_adam
from twinax.flax_transformer.model import Transformer
from parity_tests.support.meshes import MODEL, TRAINING, MeshTraining

mesh = ShardingConfig(data=2, fsdp=2, tensor=2)
model = MODEL.replace(num_encoder_layers=1, num_decoder_layers=1, param_dtype="float64", compute_dtype="float64")
run, alone = (MeshTraining(sharding, model, TRAINING) for sharding in (mesh, ShardingConfig(data=1)))
program = run.step.lower(run.state, run.batch(0)).compile().as_text()
losses = [[training.update(number) for number in range(4)] for training in (run, alone)]
print(np.abs(np.subtract(*losses)).max())
# No device holds the logits of all tokens, and nothing but matrices of parameters is gathered.
gathered = re.findall(r"= \\w+\\[([\\d,]*)\\]\\S* all-gather\\(", program)
shapes = [[*map(int, shape.split(","))] for shape in re.findall(r"f64\\[([\\d,]+),112\\]", program)]
print(sum(math.prod(shape) % 9 == 0 for shape in shapes), len(gathered) > 10, {shape.count(",") for shape in gathered})
kernel = find_adam(run.state.optimizer).mu["output.proj.kernel"]
print(tuple(kernel.sharding.spec), kernel.addressable_shards[0].data.shape)
src = np.random.default_rng(0).integers(3, 100, (5, 7))
tokens = [
    flax_transformer.generate(
        Transformer.from_arrays(model, {**t.state.buffers, **t.state.params}), src, DecodingConfig(beam_size=3)
    ).tokens
    for t in (run, alone)
]
print(np.array_equal(*tokens))
"""


def test_eight_devices_are_one(forks):
    """With dropout, accumulation, label smoothing and batches that no mesh divides; decoding too."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    result = forks(f"import sys\nsys.path.append({ROOT!r})\n{DEVICES}", XLA_FLAGS=flags)
    assert result.returncode == 0, result.stderr
    loss, *rest = result.stdout.splitlines()
    assert 0 < float(loss) < 1e-10
    assert rest == ["0 True {1}", "('fsdp', 'tensor') (16, 56)", "True"]
