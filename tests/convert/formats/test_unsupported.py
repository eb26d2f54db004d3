"""Directories of other families: each error states the setting that is the obstacle; the oracle is `transformers`."""

import json

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from twinax import convert
from twinax.convert.formats.hugging_face import LAYOUTS, family
from twinax.convert.identify.families import UNSUPPORTED, unsupported_settings
from twinax.convert.identify.unreadable import UnreadableError

pytestmark = pytest.mark.newest

COMPOSED = ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder", "rag")  # have no default config
SUPPORTED = tuple(family(layout).model_type for layout in LAYOUTS)


def config_json(name, architectures="X", **settings):
    """config.json of a new model of a family."""
    return json.loads(CONFIG_MAPPING[name](architectures=[architectures], **settings).to_json_string())


def obstacle_of(settings, folder):
    """The obstacle in a directory with these settings."""
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnreadableError) as error:
        convert.load(folder)
    assert "\n" not in str(error.value)
    return error.value.unsupported


def test_every_encoder_decoder_is_read_or_refused_by_name(tmp_path):
    names = {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES} - {*COMPOSED}
    assert {*SUPPORTED} < names
    assert not {*SUPPORTED} & {*UNSUPPORTED}
    for name in names - {*SUPPORTED}:
        obstacle = obstacle_of(config_json(name), tmp_path)
        assert f"model_type={name!r}" in f"{obstacle.what}, {obstacle.why}"
        assert "twinax compare" in obstacle.hint or "docs/families.md" in obstacle.hint


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("led", "attention_window=[512, 256]"),
        ("longt5", "encoder_attention_type='local', local_radius=127"),
        ("bigbird_pegasus", "attention_type='block_sparse', block_size=64"),
        ("pegasus_x", "block_size=512"),
        ("switch_transformers", "num_experts=8"),
        ("nllb-moe", "num_experts=128"),
        ("prophetnet", "ngram=2"),
        ("t5gemma", "encoder.rope_parameters={"),
        ("t5gemma2", "encoder.text_config.rope_parameters={"),
        ("mvp", "use_prompt=False, prompt_length=100"),
        ("fsmt", "langs=['en', 'de']"),
    ],
)
def test_the_obstacle_names_the_setting(name, settings, tmp_path):
    changes = {"attention_window": [512, 256]} if name == "led" else {}
    obstacle = obstacle_of(config_json(name, **changes), tmp_path)
    assert obstacle.what == f"a Hugging Face model of model_type={name!r}"
    assert obstacle.why.startswith("twinax does not support ")
    assert f" ({settings}" in obstacle.why


def test_two_families_in_one_model(tmp_path):
    encoder, decoder = AutoConfig.for_model("bert"), AutoConfig.for_model("gpt2")
    both = CONFIG_MAPPING["encoder-decoder"](encoder=encoder.to_dict(), decoder=decoder.to_dict())
    obstacle = obstacle_of(json.loads(both.to_json_string()), tmp_path)
    assert "encoder.model_type='bert', decoder.model_type='gpt2'" in obstacle.why


@pytest.mark.parametrize(
    ("name", "names", "kind"),
    [
        ("gpt2", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "a decoder-only model"),
        ("llama", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "a decoder-only model"),
        ("qwen3", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "a decoder-only model"),
        ("bert", MODEL_FOR_MASKED_LM_MAPPING_NAMES, "an encoder-only model"),
        ("distilbert", MODEL_FOR_MASKED_LM_MAPPING_NAMES, "an encoder-only model"),
    ],
)
def test_what_is_no_encoder_decoder(name, names, kind, tmp_path):
    obstacle = obstacle_of(config_json(name, names[name]), tmp_path)
    assert obstacle.what == kind
    assert obstacle.why.startswith(f"model_type={name!r}, architectures={names[name]!r}, and twinax reads")


def test_a_quantized_model_is_refused_before_its_weights_are_read(bart):
    settings = json.loads((bart / "config.json").read_text())
    quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    (bart / "model.safetensors").write_bytes(b"")
    obstacle = obstacle_of(settings | {"quantization_config": quantization}, bart)
    assert obstacle.what == "a quantized Hugging Face model of model_type='bart'"
    values = "quantization_config.quant_method='bitsandbytes', quantization_config.load_in_8bit=True"
    assert obstacle.why == values
    assert "dequantize()" in obstacle.hint


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "a directory whose config.json is not of a Hugging Face model"),
        ({"model_type": "new", "is_encoder_decoder": True}, "a Hugging Face model of model_type='new'"),
        ({"model_type": ["t5"], "architectures": 3}, "not an encoder-decoder of text"),
        ({"model_type": "x\ny" * 99, "architectures": [3, "a\nb"]}, "not an encoder-decoder of text"),
        ({"model_type": "t5", "quantization_config": [1]}, "a quantized Hugging Face model of model_type='t5'"),
        ({"model_type": "encoder-decoder", "decoder": 3}, "a Hugging Face model of model_type='encoder-decoder'"),
    ],
)
def test_settings_of_any_type(settings, kind, tmp_path):
    assert obstacle_of(settings, tmp_path).what == kind
    assert unsupported_settings({"model_type": "t5"}, SUPPORTED) is None


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 242043056\n"
UNREAD = {"pytorch_model.bin": POINTER, "flax_model.msgpack": b"", "model-00001-of-00002.safetensors": POINTER}


@pytest.mark.parametrize("name", UNREAD)
def test_weights_that_are_not_read_are_no_obstacle(name, bart):
    """`transformers` reads model.safetensors, whatever is beside it."""
    expected = convert.checksum(convert.load(bart).arrays)
    (bart / name).write_bytes(UNREAD[name])
    assert convert.checksum(convert.load(bart).arrays) == expected
    AutoModelForSeq2SeqLM.from_pretrained(bart)


def test_a_damaged_shard_of_the_index_is_an_obstacle(bart):
    """A shard that the index does not list is not read."""
    model, stale = AutoModelForSeq2SeqLM.from_pretrained(bart), bart / "model-00001-of-00009.safetensors"
    (bart / "model.safetensors").unlink()
    model.save_pretrained(bart, max_shard_size="5KB")
    stale.write_bytes(POINTER)
    assert convert.load(bart).layout == "bart"
    shard = sorted(path for path in bart.glob("model-*") if path != stale)[1]
    shard.write_bytes(POINTER)
    with pytest.raises(UnreadableError) as error:
        convert.load(bart)
    assert error.value.unsupported.what == f"a directory whose {shard.name} is a git-lfs pointer"
