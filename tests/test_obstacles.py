"""Unsupported directories: each error gives the reason; the oracle is the installed `transformers`."""

import json

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from twinax import convert
from twinax.convert.hugging_face import LAYOUTS, family
from twinax.convert.obstacles import OBSTACLES, obstacle

COMPOSED = ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder")  # have no default config


def config_json(name, architectures):
    """config.json of a new model of a family."""
    return json.loads(CONFIG_MAPPING[name](architectures=[architectures]).to_json_string())


def test_every_encoder_decoder_is_read_or_has_its_obstacle():
    names = [name for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if name not in COMPOSED]
    encoder_decoders = {name for name in names if config_json(name, "X").get("is_encoder_decoder")}
    model_types = {family(layout).model_type for layout in LAYOUTS}
    assert model_types < encoder_decoders
    assert encoder_decoders - model_types <= {*OBSTACLES}
    assert not model_types & {*OBSTACLES}
    assert {*OBSTACLES} <= {*CONFIG_MAPPING.keys()}


@pytest.mark.parametrize(
    ("name", "names", "message"),
    [
        ("gpt2", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "is a decoder-only model (GPT2LMHeadModel)"),
        ("llama", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "is a decoder-only model (LlamaForCausalLM)"),
        ("distilbert", MODEL_FOR_MASKED_LM_MAPPING_NAMES, "is not an encoder-decoder (DistilBertForMaskedLM)"),
    ],
)
def test_what_is_no_encoder_decoder(name, names, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(name, names[name])))
    with pytest.raises(convert.ConversionError) as error:
        convert.load(tmp_path)
    message = f"model_type={name!r} {message}; twinax supports encoder-decoders only; supported: marian"
    assert message in str(error.value)


def test_the_reason_of_a_known_obstacle():
    assert obstacle({"model_type": "led"}) == (
        "cannot be read, because twinax does not support attention that is restricted to blocks or windows"
    )
    for settings in ({}, {"model_type": "new", "is_encoder_decoder": True}):
        assert obstacle(settings) == "is not a family that twinax supports"
    assert obstacle({"model_type": ["t5"], "architectures": 3}).startswith("is not an encoder-decoder; twinax supports")
