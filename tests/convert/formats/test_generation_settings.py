"""The meaning of each setting of generation_config.json, as literal fields of `DecodingConfig`."""

import json
import shutil

import pytest

from twinax import TransformerConfig, convert
from twinax.configs.decoding import DecodingConfig
from twinax.convert.arrays.dtypes import to_dtype
from twinax.convert.checkpoint import CONFIG, GENERATION
from twinax.convert.formats.generation import end_ids, generation_of

MODEL = TransformerConfig.preset("tiny", max_length=40, pad_id=0, eos_id=2, forced_eos_id=None)
# what `generate` does without settings
NOTHING = {"beam_size": 1, "max_length": 20, "forbidden_ids": (), "allow_padding": True, "force_end": False}

# settings -> fields besides those of NOTHING; `generate` counts the start token in max_length and min_length
ROWS = {
    "num_beams": ({"num_beams": 6}, {"beam_size": 6}),
    "diverse beam search": (
        {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.5},
        {"beam_size": 6, "beam_groups": 3, "diversity_penalty": 0.5},
    ),
    "no diverse beam search": (
        {"num_beams": 6, "num_beam_groups": 1, "diversity_penalty": 0.0},
        {"beam_size": 6, "beam_groups": 1, "diversity_penalty": 0.0},
    ),
    "length_penalty": ({"length_penalty": 0.6}, {"length_exponent": 0.6}),
    "early_stopping": ({"early_stopping": True}, {"early_stopping": True}),
    "no early_stopping": ({"early_stopping": False}, {"early_stopping": False}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram_size": 2}),
    "renormalize_logits": ({"renormalize_logits": True}, {"renormalize": True}),
    "max_length": ({"max_length": 24}, {"max_length": 23}),
    "max_length beyond the model": ({"max_length": 512}, {"max_length": 40}),
    "max_length of the start": ({"max_length": 1}, {"max_length": 1}),
    "max_new_tokens": ({"max_new_tokens": 24}, {"max_length": 24}),
    "max_new_tokens before max_length": ({"max_new_tokens": 7, "max_length": 24}, {"max_length": 7}),
    "min_length": ({"min_length": 5}, {"min_length": 5}),
    "min_length of nothing": ({"min_length": 0}, {"min_length": 1}),
    "min_new_tokens": ({"min_new_tokens": 5}, {"min_length": 6}),
    "min_new_tokens before min_length": ({"min_new_tokens": 2, "min_length": 9}, {"min_length": 3}),
    "bad_words_ids": ({"bad_words_ids": [[7], [9]]}, {"forbidden_ids": (7, 9)}),
    "words of several tokens": (
        {"bad_words_ids": [[7], [9, 8, 7], [3, 4]]},
        {"forbidden_ids": (7,), "forbidden_sequences": ((9, 8, 7), (3, 4))},
    ),
    "suppress_tokens": ({"suppress_tokens": [7, 9]}, {"forbidden_ids": (7, 9)}),
    "both": ({"bad_words_ids": [[7]], "suppress_tokens": [9]}, {"forbidden_ids": (7, 9)}),
    "padding": ({"bad_words_ids": [[0]]}, {"forbidden_ids": (0,), "allow_padding": False}),
    "EOS": ({"bad_words_ids": [[2], [7]]}, {"forbidden_ids": (7,)}),
}


@pytest.mark.parametrize("file", [GENERATION, CONFIG])
@pytest.mark.parametrize("row", ROWS)
def test_a_setting_has_its_meaning(row, file):
    """In generation_config.json, or in config.json if that is the only file."""
    settings, fields = ROWS[row]
    documents = {CONFIG: {"num_beams": 99}, GENERATION: settings} if file == GENERATION else {CONFIG: settings}
    generation = generation_of(documents, MODEL, "x")
    assert generation is not None
    assert generation.fields == NOTHING | fields
    assert (generation.file, generation.settings) == (file, settings)
    DecodingConfig(**generation.fields)


def test_an_end_is_forced_if_the_model_has_one():
    generation = generation_of({CONFIG: {"num_beams": 2}}, MODEL.replace(forced_eos_id=2), "x")
    assert generation is not None
    assert generation.fields == {**NOTHING, "force_end": True, "beam_size": 2}


def test_a_directory_without_settings_has_the_defaults_of_generate():
    assert generation_of({}, MODEL, "x") is None
    for documents in (
        {CONFIG: {"d_model": 8, "num_beams": None}},
        {CONFIG: {"num_beams": 4}, GENERATION: {"eos_token_id": 2}},
        {CONFIG: {"num_beams": 4}, GENERATION: {"eos_token_id": [2]}},
    ):
        generation = generation_of(documents, MODEL, "x")
        assert generation is not None
        assert (generation.fields, generation.settings) == (NOTHING, {})
        assert generation.defaults == {"num_beams": 1, "max_new_tokens": 20}


def test_another_family_keeps_them(directories, tmp_path):
    """T5 v1.1 and mT5 are the same architecture."""
    source = shutil.copytree(directories / "T5 v1.1, Flan-T5", tmp_path / "t5")
    stated = {"num_beams": 3, "length_penalty": 0.7, "bad_words_ids": [[5]], "max_new_tokens": 11}
    document = json.loads((source / GENERATION).read_text())
    (source / GENERATION).write_text(json.dumps(document | stated))
    checkpoint = convert.load(source)
    convert.save(checkpoint, tmp_path / "mt5", layout="mt5")
    again = convert.load(tmp_path / "mt5")
    before, after = (generation_of(c.documents, c.config, "x") for c in (checkpoint, again))
    assert before is not None
    assert after is not None
    assert (after.fields, after.settings, before.settings) == (before.fields, stated, stated)


@pytest.mark.parametrize("layout", ["t5", "mt5"])
def test_what_ends_a_translation_is_kept(directories, tmp_path, layout):
    """With a change of the weights' type, or of the family: `generate` stops at each of these ids."""
    source = shutil.copytree(directories / "T5 v1.1, Flan-T5", tmp_path / "t5")
    document = json.loads((source / GENERATION).read_text())
    checkpoint = convert.load(source)
    ends = [checkpoint.config.eos_id, 5]
    (source / GENERATION).write_text(json.dumps(document | {"eos_token_id": ends}))
    checkpoint = to_dtype(convert.load(source), "float16", layout)
    convert.save(checkpoint, tmp_path / "new", layout=layout)
    assert json.loads((tmp_path / "new" / GENERATION).read_text())["eos_token_id"] == ends
    other = checkpoint.config.replace(eos_id=6)
    assert end_ids(checkpoint.documents, checkpoint.config) == {"eos_token_id": ends}
    assert end_ids(checkpoint.documents, other) == end_ids({}, other) == {}
