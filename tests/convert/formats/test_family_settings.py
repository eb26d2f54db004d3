"""config.json of each family: defaults, old versions, and the conversion of a config back to settings."""

from typing import get_args, get_type_hints

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from twinax import TransformerConfig, convert
from twinax.convert.formats.hugging_face import LAYOUTS, family
from twinax.convert.layouts.canonical import canonical
from twinax.convert.layouts.hugging_face_settings import ACTIVATIONS, BART_LIKE

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_defaults_are_those_of_transformers(layout):
    """A field missing from config.json has the default of its family's config class."""
    entry = family(layout)
    reference = getattr(transformers, entry.architecture).config_class().to_dict()
    for name, value in {**entry.tables.defaults, **entry.defaults}.items():
        if name in reference and name not in ("dtype", *entry.tables.fallbacks):
            assert reference[name] == value, name
        elif name.endswith("_token_id"):
            assert value is None, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_setting_that_transformers_writes_is_known(layout, tmp_path):
    entry = family(layout)
    settings = getattr(transformers, entry.architecture).config_class().to_dict()
    assert entry.config(settings, "float32").d_model == settings["d_model"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_that_follow_from_others_are_those_of_transformers(layout):
    """`hidden_size`, `dense_act_fn` and so on, which are accepted if they do not contradict."""
    entry = family(layout)
    kind = getattr(transformers, entry.architecture).config_class
    for name, table in entry.tables.values.items():
        for value in table:
            reference = kind(**{name: value})
            for repeated, (other, function) in entry.tables.repeated.items():
                assert getattr(reference, repeated) == function(getattr(reference, other)), (repeated, value)
    for repeated in entry.tables.repeated:
        with pytest.raises(convert.ConversionError, match=f"{repeated}='other': contradicts "):
            entry.config({repeated: "other"}, "float32")


# fields in config.json of `transformers` 3 and 4 that today's config.json lacks
OLD = {
    "marian": {"_num_labels": 3, "add_bias_logits": False, "add_final_layer_norm": False, "bad_words_ids": [[58100]],
               "classif_dropout": 0.0, "normalize_before": False, "normalize_embedding": False, "num_beams": 6,
               "num_hidden_layers": 12, "static_position_embeddings": True, "torch_dtype": "float32"},
    "bart": {"add_final_layer_norm": False, "extra_pos_embeddings": 2, "forced_bos_token_id": 0, "length_penalty": 2.0,
             "do_blenderbot_90_layernorm": False, "xla_device": None,
             "force_bos_token_to_be_generated": True, "gradient_checkpointing": False, "no_repeat_ngram_size": 3,
             "normalize_before": False, "normalize_embedding": True, "task_specific_params": {"x": {"num_beams": 4}}},
    "mbart": {"add_final_layer_norm": True, "normalize_before": True, "normalize_embedding": True, "output_past": True,
              "static_position_embeddings": False, "tokenizer_class": "MBart50Tokenizer", "_name_or_path": "x"},
    "m2m100": {"early_stopping": True, "max_length": 200, "num_beams": 5, "tokenizer_class": "M2M100Tokenizer"},
    "pegasus": {"add_bias_logits": False, "add_final_layer_norm": True, "extra_pos_embeddings": 0,
                "force_bos_token_to_be_generated": False, "normalize_before": True, "normalize_embedding": False,
                "static_position_embeddings": True, "length_penalty": 0.6},
    "blenderbot": {"add_bias_logits": False, "add_final_layer_norm": True, "do_blenderbot_90_layernorm": True,
                   "encoder_no_repeat_ngram_size": 3, "extra_layer_norm": False, "extra_pos_embeddings": 0,
                   "layernorm_variant": "prelayernorm", "length_penalty": 0.65, "max_length": 60, "min_length": 20,
                   "normalize_before": True, "normalize_embedding": False, "static_position_embeddings": False,
                   "unk_token_id": 3},
    "t5": {"n_positions": 512, "output_past": True, "tie_word_embeddings": True, "initializer_factor": 1.0,
           "task_specific_params": {"x": {"prefix": "x"}}},
    "mt5": {"tokenizer_class": "T5Tokenizer", "architectures": ["MT5ForConditionalGeneration"], "n_positions": 512},
    "umt5": {"tokenizer_class": "T5Tokenizer", "scalable_attention": True, "num_hidden_layers": 8},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_of_old_versions_are_known(layout):
    assert family(layout).config(OLD[layout], "float32") == family(layout).config({}, "float32").replace(
        forced_bos_id=OLD[layout].get("forced_bos_token_id")
    )


def test_every_value_of_ours_can_be_written():
    hints = get_type_hints(TransformerConfig)
    written = {
        "activation": [*ACTIVATIONS.values()],
        "embedding_scale": [fields["embedding_scale"] for fields in BART_LIKE.values["scale_embedding"].values()],
        "logit_scale": [f["logit_scale"] for f in family("t5").tables.values["scale_decoder_outputs"].values()],
    }
    for field, values in written.items():
        assert set(values) == set(get_args(hints[field]))


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_and_config_are_inverse(layout, data):
    """Settings -> config -> settings -> config: the same config, whatever the family's settings."""
    tables = family(layout).tables
    sizes = ("layers", "ffn", "d_ff", "d_kv", "positions")
    small = st.integers(1, 8)
    values = {name: data.draw(small, name) for name in tables.names if any(size in name for size in sizes)}
    values |= {name: data.draw(st.sampled_from([1, 2, 4]), name) for name in tables.names if "heads" in name}
    values |= {name: data.draw(st.floats(0, 0.9), name) for name in tables.names if "drop" in name}
    values |= {name: data.draw(st.integers(0, 8), name) for name in tables.names if name.endswith("_token_id")}
    values |= {name: data.draw(st.sampled_from(list(table)), name) for name, table in tables.values.items()}
    values |= {"d_model": 8, "vocab_size": 9, tables.dropout[0]: 0.25}
    values["tie_word_embeddings"] = data.draw(st.booleans())
    if layout == "marian":
        values["share_encoder_decoder_embeddings"] = shared = data.draw(st.booleans())
        values["decoder_vocab_size"] = 9 if shared else 11
    config = family(layout).config(values, "float32")
    assert family(layout).config(family(layout).settings(config), "float32") == config == canonical(config)


def test_the_preset_is_t5_small():
    """The defaults of `transformers`' T5 are those of t5-small, whose files set the start of the decoder."""
    settings = transformers.T5Config(decoder_start_token_id=0).to_dict()
    config = canonical(TransformerConfig.preset("t5_small"))
    expected = family("t5").config(settings, "float32")
    assert expected == config.replace(linear_init=expected.linear_init, embedding_init=expected.embedding_init)
    assert family("t5").config(family("t5").settings(config), "float32") == expected


def test_marian_s_vocabularies_must_agree_where_shared():
    with pytest.raises(convert.ConversionError, match="decoder_vocab_size=9, vocab_size=8: must be equal"):
        family("marian").config({"vocab_size": 8, "decoder_vocab_size": 9}, "float32")
