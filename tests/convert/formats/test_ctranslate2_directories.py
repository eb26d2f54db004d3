"""CTranslate2 directories by the commands: what is written, read back, refused, and translated by the library."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import ctranslate2
import numpy as np
import pytest
import torch

import twinax
from twinax import TransformerConfig, convert, torch_reference
from twinax.configs.data import TokenizerConfig
from twinax.convert import Checkpoint, ConversionError, checksum
from twinax.convert.layouts import ctranslate2 as layout
from twinax.parity.functions import random_arrays
from twinax.train.text.tokenization import train_tokenizers

pytestmark = pytest.mark.filterwarnings("ignore")
SENTENCES = ["the cat sees a dog", "a dog sees the old cat", "the old woman sees us"]
CONFIG = TransformerConfig.preset("tiny", src_vocab_size=60, tgt_vocab_size=60, v_head_dim=None, max_length=24)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random model with a tokenizer, as a file; the vocabulary of the model is larger."""
    folder = tmp_path_factory.mktemp("models")
    config = TokenizerConfig(vocab_size=50)
    (tokenizer,) = train_tokenizers(config, SENTENCES, SENTENCES)
    tokenizer.save(folder / "tokenizer")
    files = {f"tokenizer/{path.name}": path.read_bytes() for path in (folder / "tokenizer").iterdir()}
    arrays = random_arrays(CONFIG, 0)
    convert.save(Checkpoint(CONFIG, arrays, files=files), folder / "model.safetensors")
    convert.save(Checkpoint(CONFIG, arrays), folder / "bare.safetensors")
    return folder


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_the_library_translates_and_the_commands_read_it_back(folder, command):
    code, out, _ = command("convert", "model.safetensors", "ct2", "--layout", "ctranslate2")
    assert (code, "CTranslate2 directory, layout ctranslate2" in out) == (0, True)
    assert "bit-identical after reading back" in out
    source = twinax.load("model.safetensors").source_ids(SENTENCES)
    vocabulary = json.loads((folder / "ct2" / "shared_vocabulary.json").read_text())
    assert len(vocabulary) == len({*vocabulary}) == 60
    assert vocabulary[59] == "<id 59>"
    translator = ctranslate2.Translator("ct2", compute_type="float32")
    inputs = [[vocabulary[i] for i in ids] for ids in source]
    results = translator.translate_batch(
        inputs,
        beam_size=1,
        return_end_token=True,
        min_decoding_length=0,
        max_decoding_length=24,
        suppress_sequences=[[vocabulary[CONFIG.pad_id]]],
    )
    expected = twinax.load("ct2").hypotheses(
        SENTENCES, twinax.load("ct2").decoding(force_end=False, renormalize=True), framework="torch"
    )
    for result, (hypothesis,) in zip(results, expected, strict=True):
        ids = [vocabulary.index(token) for token in result.hypotheses[0]]
        assert tuple(ids[: len(hypothesis.tokens)]) == hypothesis.tokens
    assert command("convert", "ct2", "back.safetensors")[0] == 0
    back, original = convert.load("back.safetensors"), convert.load("model.safetensors")
    assert (back.config, checksum(back.arrays), back.files) == (CONFIG, checksum(original.arrays), original.files)
    code, out, _ = command("inspect", "ct2")
    assert (code, "CTranslate2 directory" in out, "tokenizer/tokenizer.json" in out) == (0, True, True)


def test_each_side_has_its_own_tokens(folder, command):
    """By its tokenizer.json, and by scores: the library's of tokens, and the model's of their ids."""
    settings = TokenizerConfig(vocab_size=30, joint=False)
    tokenizers = train_tokenizers(settings, SENTENCES, ["die Katze sieht", "ein Hund sieht uns"])
    files, tokens = {}, []
    for side, tokenizer in zip(("source", "target"), tokenizers, strict=True):
        tokenizer.save(folder / side)
        files |= {f"{side}_tokenizer/{path.name}": path.read_bytes() for path in (folder / side).iterdir()}
        vocabulary = json.loads((folder / side / "tokenizer.json").read_text())["model"]["vocab"]
        tokens.append(sorted(vocabulary, key=vocabulary.get))
    config = CONFIG.replace(src_vocab_size=len(tokens[0]), tgt_vocab_size=len(tokens[1]), norm_eps=1e-3, bos_id=6)
    checkpoint = Checkpoint(config, random_arrays(config, 0), files=files)
    convert.save(checkpoint, "ct2", layout="ctranslate2")
    assert tokens[0] != tokens[1]
    for side, expected in zip(("source", "target"), tokens, strict=True):
        assert json.loads((folder / "ct2" / f"{side}_vocabulary.json").read_text()) == expected
    assert json.loads((folder / "ct2" / "config.json").read_text()) == {
        "add_source_bos": False,
        "add_source_eos": False,
        "bos_token": tokens[1][6],
        "decoder_start_token": "<s>",
        "eos_token": "</s>",
        "layer_norm_epsilon": 1e-3,
        "multi_query_attention": False,
        "unk_token": "<unk>",
    }
    source, target = [4, 9, 3, 2], [5, 8, 7, 2]  # 3 is the id of unknown words
    words = [tokens[0][4], tokens[0][9], "word", "</s>"]
    translator = ctranslate2.Translator("ct2", compute_type="float32")
    (scores,) = translator.score_batch([words], [[tokens[1][i] for i in target[:-1]]])
    expected = torch_reference.score(checkpoint.to_torch(), torch.tensor([source]), torch.tensor([target])).tokens[0]
    np.testing.assert_allclose(scores.log_probs, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("quantization", ["int8", "float16"])
def test_quantized_weights_are_within_their_rounding(quantization, folder, command):
    code, out, _ = command("convert", "model.safetensors", "ct2", "--layout", "ctranslate2", "--quantize", quantization)
    assert (code, f"{quantization}, largest error 0.99" in out or "largest error 1.000" in out) == (0, True)
    assert f"CTranslate2 directory, {quantization}" in command("inspect", "ct2")[1]
    original, result = convert.load("model.safetensors").arrays, convert.load("ct2").arrays
    assert 1e-5 < max(np.abs(array - original[name]).max() for name, array in result.items()) < 1e-2
    changed = {**original, "output.bias": original["output.bias"] + np.float32(0.01)}
    error = convert.formats.ctranslate2.largest_error(Checkpoint(CONFIG, changed), folder / "ct2", quantization)
    assert error > 1
    changed["output.bias"] = original["output.bias"] * np.float32(np.nan)
    error = convert.formats.ctranslate2.largest_error(Checkpoint(CONFIG, changed), folder / "ct2", quantization)
    assert error == np.inf


def test_what_is_not_finite_is_not_quantized(folder):
    checkpoint = convert.load("model.safetensors")
    name = "encoder.layers.0.self_attention.q_proj.kernel"
    broken = checkpoint.arrays[name].copy()
    broken[0, 0] = np.nan
    checkpoint = replace(checkpoint, arrays={**checkpoint.arrays, name: broken})
    with pytest.raises(convert.ConversionError, match="has NaN or infinite values, which int8 lacks"):
        convert.save(checkpoint, "ct2", layout="ctranslate2", quantization="int8")
    assert not Path("ct2").exists()


REFUSED = {
    "norm": ({"norm": "sample_std_norm"}, "norm='sample_std_norm': must be 'layer_norm' or 'rms_norm'"),
    "norm over the length": ({"norm": "layer_norm_over_length"}, "norm='layer_norm_over_length': must be"),
    "shift": ({"norm": "rms_norm"}, "norm_bias=True: CTranslate2's rms_norm has no shift"),
    "softmax": ({"output_activation": "softmax"}, "output_activation='softmax': must be 'none' or 'log_softmax'"),
    "cross mask": (
        {"cross_mask": "encoder", "encoder_mask": "source_and_query"},
        "cross_mask='encoder': must be 'source'",
    ),
    "query only": ({"cross_attention_residual": "query_only"}, "cross_attention_residual='query_only': must be 'add'"),
    "float64": ({"param_dtype": "float64"}, "param_dtype='float64': must be 'float32'"),
    "fill value": ({"mask_value": -1.5}, "mask_value=-1.5 gives masked keys weight"),
    "not causal": ({"decoder_mask": "causal_in_training"}, "decoder_mask='causal_in_training' is not causal"),
    "masked start": (
        {"decoder_mask": "causal_and_padding", "decoder_start_id": 0},
        "decoder_mask='causal_and_padding' masks the start token",
    ),
    "uncounted start": (
        {"position_counting": "non_padding", "decoder_start_id": 0},
        "position_counting='non_padding': CTranslate2 counts the start token",
    ),
    "heads": ({"v_head_dim": 7}, "v_head_dim=7: CTranslate2's heads have one width"),
    "both positions": ({"relative_positions": "shared"}, "positions='sinusoidal_interleaved': CTranslate2 has no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_express_is_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(ConversionError, match="CTranslate2 has no such model") as error_info:
        layout.check(CONFIG.replace(**changes))
    (line,) = str(error_info.value).splitlines()[1:]
    assert message in line


def test_all_problems_are_listed_before_anything_is_written(folder, command):
    config = CONFIG.replace(norm="sample_std_norm", v_head_dim=7, mask_value=-1.5)
    convert.save(Checkpoint(config, random_arrays(config, 0)), "odd.safetensors")
    code, _, err = command("convert", "odd.safetensors", "ct2", "--layout", "ctranslate2", "--verbose")
    assert (code, len(err.splitlines()), (folder / "ct2").exists()) == (2, 4, False)


INVALID = {
    "no tokenizer": (("bare.safetensors", "ct2"), "layout ctranslate2 needs a tokenizer"),
    "a suffix": (("model.safetensors", "ct2.pt"), "ct2.pt: layout ctranslate2 needs a name without a suffix"),
    "another layout": (
        ("model.safetensors", "x.pt", "--layout", "twinax", "--quantize", "int8"),
        "--quantize int8: needs --layout ctranslate2",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_input_gets_one_line(name, folder, command):
    arguments, message = INVALID[name]
    arguments = arguments if "--layout" in arguments else (*arguments, "--layout", "ctranslate2")
    before = sorted(path.name for path in folder.iterdir())
    code, _, err = command("convert", *arguments)
    assert (code, message in err, len(err.splitlines())) == (2, True, 1)
    assert sorted(path.name for path in folder.iterdir()) == before


def damage_end(content):
    return content[:-3]


def damage_version(content):
    return b"\x07" + content[1:]


def damage_size(content):
    return content.replace(b"encoder/layer_norm/beta\0\x01", b"encoder/layer_norm/beta\0\x02")


@pytest.mark.parametrize("damage", [damage_end, damage_version, damage_size])
def test_damaged_files_get_one_line(damage, folder, command):
    assert command("convert", "model.safetensors", "ct2", "--layout", "ctranslate2")[0] == 0
    path = folder / "ct2" / "model.bin"
    path.write_bytes(damage(path.read_bytes()))
    for flags, reason in (
        ((), "damaged or edited: does not match"),
        (("--no-verify",), "is damaged or of another version"),
    ):
        code, _, err = command("convert", "ct2", "x.pt", *flags)
        assert (code, len(err.splitlines())) == (2, 1)
        assert f"ct2/model.bin: {reason}" in err
