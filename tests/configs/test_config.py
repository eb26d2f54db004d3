"""The config schema: accepted values, error messages and the JSON round trip."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax import TransformerConfig, flax_transformer, torch_reference
from twinax.configs import SCHEMA_VERSION, ConfigError, schema
from twinax.formulas.position_tables import POSITION_TABLES
from twinax.presets.models import PRESETS

SMALL = {"src_vocab_size": 11, "tgt_vocab_size": 13}
HINTS = get_type_hints(TransformerConfig)
LITERALS = [f.name for f in fields(TransformerConfig) if get_origin(HINTS[f.name]) is Literal]


@given(
    st.fixed_dictionaries(
        {name: st.sampled_from(get_args(HINTS[name])) for name in LITERALS}
        | {
            "d_model": st.integers(4, 9),
            "num_heads": st.just(1),
            "head_dim": st.none() | st.integers(1, 5),
            "mask_value": st.just("exact") | st.floats(-1e30, -1e-30),
            "norm_eps": st.floats(1e-12, 1.0),
            "bos_id": st.none() | st.integers(0, 12),
            "residual_dropout": st.floats(0, 0.99) | st.just(0),
        }
    )
)
def test_json_round_trip(values):
    config = TransformerConfig(**SMALL, **values)
    copy = TransformerConfig.from_json(config.to_json())
    assert copy == config
    assert copy.to_json() == config.to_json()
    assert json.loads(config.to_json())["schema_version"] == SCHEMA_VERSION
    assert hash(copy) == hash(config)


DROPPED = [f.name for f in fields(TransformerConfig) if f.name.endswith(("dropout", "layerdrop"))]


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
@pytest.mark.parametrize("name", DROPPED)
def test_every_rate_is_a_probability(name, rate):
    with pytest.raises(ConfigError, match=f"^{name}={rate}: a dropout rate must be at least 0 and below 1"):
        TransformerConfig(**SMALL, **{name: rate})


def test_there_are_seven_rates():
    assert len(DROPPED) == 7


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = TransformerConfig.preset(name)
    assert TransformerConfig.from_json(config.to_json()) == config
    assert TransformerConfig.preset(name, d_ff=7).d_ff == 7


def test_base_and_big_have_the_paper_s_sizes():
    """Vaswani et al. 2017, table 3: parameters in millions, with the shared vocabulary of 37,000."""
    for preset, millions in (("base", 65), ("big", 213)):
        from twinax.convert.port import flax_specs

        shapes = [spec.shape for spec in flax_specs(TransformerConfig.preset(preset), trained_only=True).values()]
        count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes) / 1e6
        assert abs(count - millions) < 3.5


WRONG = [
    ({"d_model": 0}, "d_model=0: must be at least 1"),
    ({"d_model": -8}, "d_model=-8: must be at least 1"),
    ({"d_model": 8.0}, "d_model=8.0: must be a whole number"),
    ({"d_model": "8"}, "d_model='8': must be a whole number"),
    ({"d_model": True}, "d_model=True: must be a whole number"),
    ({"d_model": None}, "d_model=None: must be a whole number"),
    (
        {"d_model": 12, "num_heads": 5},
        "num_heads=5: d_model=12 is not divisible by it; choose a divisor or set head_dim",
    ),
    ({"d_model": 12, "num_heads": 4, "decoder_num_heads": 5}, "decoder_num_heads=5: d_model=12 is not divisible"),
    ({"norm": "batch_norm"}, "norm='batch_norm': must be one of 'layer_norm', 'rms_norm', 'sample_std_norm'"),
    ({"norm_eps": 0}, "norm_eps=0.0: must be a finite number above 0"),
    ({"norm_eps": float("nan")}, "norm_eps=nan: must be a finite number above 0"),
    ({"final_norm": 1}, "final_norm=1: must be True or False"),
    ({"cross_attention_residual": "none"}, "cross_attention_residual='none': must be one of 'add', 'query_only'"),
    ({"mask_value": float("-inf")}, "mask_value=-inf: must be 'exact' or a negative number"),
    ({"mask_value": 1}, "mask_value=1.0: must be 'exact' or a negative number"),
    ({"mask_value": "none"}, "mask_value='none': must be a number or 'exact'"),
    ({"attention_dropout": 1}, "attention_dropout=1.0: a dropout rate must be at least 0 and below 1"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1: a dropout rate"),
    ({"residual_dropout": float("nan")}, "residual_dropout=nan: a dropout rate"),
    ({"shared_embeddings": True}, "shared_embeddings=True: needs equal vocabularies, but src_vocab_size=11"),
    ({"eos_id": 13}, "eos_id=13: must be below tgt_vocab_size=13"),
    ({"pad_id": 11}, "pad_id=11: must be below src_vocab_size=11"),
    ({"pad_id": -1}, "pad_id=-1: must be at least 0"),
    (
        {"position_table_length": 9, "max_length": 8, "position_offset": 2},
        "position_table_length=9: must be at least 10",
    ),
    (
        {"positions": "sinusoidal_half_t2t", "d_model": 3, "num_heads": 1},
        "positions='sinusoidal_half_t2t': needs d_model",
    ),
    (
        {"relative_positions": "shared", "relative_position_buckets": 3},
        "relative_position_buckets=3: must be at least 4, 2 for each side of a token",
    ),
    (
        {"relative_positions": "per_layer", "relative_position_max_distance": 16},
        "relative_position_max_distance=16: must be above 16, which is half of relative_position_buckets",
    ),
    ({"norm": "sample_std_norm", "d_model": 1, "num_heads": 1}, "norm='sample_std_norm': needs d_model of at least 2"),
    ({"param_dtype": "float8"}, "param_dtype='float8': must be one of 'float64'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[m.split(":")[0] for _, m in WRONG])
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ConfigError) as error:
        TransformerConfig(**(SMALL | changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the config is not JSON"),
        ("[]", "the config is a JSON list, not an object"),
        ('{"src_vocab_size": 3}', "schema_version=None: this twinax reads version 1"),
        ('{"schema_version": 2}', "schema_version=2: this twinax reads version 1"),
        ('{"schema_version": 1, "src_vocab_size": 3}', "config fields tgt_vocab_size are missing"),
        ('{"schema_version": 1, "src_vocab_size": 3, "tgt_vocab_size": 3, "heads": 3}', "unknown config fields heads"),
    ],
)
def test_a_wrong_file_is_named(text, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        TransformerConfig.from_json(text)


def test_unknown_names():
    with pytest.raises(ConfigError, match="no field 'heads'"):
        TransformerConfig(**SMALL).replace(heads=3)
    with pytest.raises(ConfigError, match="choose one of tiny, small, base, big"):
        TransformerConfig.preset("huge")


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        TransformerConfig(**SMALL).d_model = 3


def test_registries_have_the_names_of_the_schema():
    """Fails if a value is validated but not implemented, or the reverse, in either framework."""
    for package in (flax_transformer, torch_reference):
        attention, layers, model, initializers = (
            getattr(package, name) for name in ("attention", "layers", "model", "initializers")
        )
        tables = {
            schema.ScoreScaling: attention.SCORE_SCALINGS,
            schema.EncoderMask: attention.ENCODER_MASKS,
            schema.DecoderMask: attention.DECODER_MASKS,
            schema.CrossMask: attention.CROSS_MASKS,
            schema.Norm: layers.NORMS,
            schema.NormPlacement: layers.NORM_PLACEMENTS,
            schema.EmbeddingNorm: layers.EMBEDDING_NORMS,
            schema.EmbeddingScale: layers.EMBEDDING_SCALES,
            schema.EmbeddingPadding: layers.EMBEDDING_PADDINGS,
            schema.PositionCounting: layers.POSITION_COUNTINGS,
            schema.CrossAttentionResidual: layers.RESIDUALS,
            schema.Activation: layers.ACTIVATIONS,
            schema.DecoderStart: model.DECODER_STARTS,
            schema.LogitScale: model.LOGIT_SCALES,
            schema.OutputActivation: model.OUTPUT_ACTIVATIONS,
            schema.LinearInit: initializers.LINEAR_INITS,
            schema.EmbeddingInit: initializers.EMBEDDING_INITS,
        }
        for names, table in tables.items():
            assert set(get_args(names)) == set(table)
    assert set(POSITION_TABLES) | {"learned", "stored", "none"} == set(get_args(schema.Positions))


def test_configs_need_neither_jax_nor_torch():
    code = "import sys; from twinax import TransformerConfig; TransformerConfig.preset('base').to_json(); "
    code += "assert not {'torch', 'flax', 'optax'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
