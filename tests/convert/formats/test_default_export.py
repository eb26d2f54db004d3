"""A run with the default settings can be exported: Pegasus has such a model, and `transformers` translates with it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import twinax
from twinax import TransformerConfig, convert
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.convert.checkpoint import Checkpoint
from twinax.convert.formats.hugging_face import fitting_families
from twinax.flax_transformer import Transformer
from twinax.parity.functions import random_arrays
from twinax.presets.runs import RUNS, run_preset
from twinax.train.data.fitting import with_tokenizers
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.tokenization import train_tokenizer

DEFAULT = RunConfig(corpus=CorpusConfig(dataset="x"))
TEXT = "ein Mann Hund Frau zwei rote Straße läuft steht neben vor dem a man dog woman two red street"
SENTENCES = [" ".join(np.random.default_rng(seed).choice(TEXT.split(), 3 + seed % 6)) + " ." for seed in range(12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The default model in small, with random weights and a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(replace(DEFAULT.tokenizer, vocab_size=90), SENTENCES)
    tokenizers = Tokenizers.of([tokenizer])
    tokenizers.save(folder)
    files = {f"tokenizer/{path.name}": path.read_bytes() for path in (folder / "tokenizer").iterdir()}
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 24, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = with_tokenizers(DEFAULT.model.replace(**sizes, max_length=30), tokenizers)
    arrays = random_arrays(config, 1)
    arrays["output.bias"] = np.random.default_rng(0).normal(0, 1, config.tgt_vocab_size).astype(np.float32)
    return Checkpoint(config, arrays, files=files)


def test_the_default_fits_a_family():
    assert fitting_families(DEFAULT.model)["pegasus"] == ""
    for name in RUNS:
        if name.startswith("multi30k"):
            fitting = [layout for layout, mismatch in fitting_families(run_preset(name).model).items() if not mismatch]
            assert fitting == ["t5" if name.endswith("t5") else "pegasus"]


def test_transformers_translates_as_twinax_does(checkpoint, command, tmp_path):
    """Tokenizer included, with both beam sizes; the learned bias of the output becomes `final_logits_bias`."""
    assert checkpoint.config.output_bias == "learned"
    convert.save(checkpoint, tmp_path / "own.safetensors")
    assert command("convert", tmp_path / "own.safetensors", tmp_path / "pegasus", "--layout", "pegasus")[0] == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "pegasus")
    model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "pegasus", output_loading_info=True)
    assert not any(info.values())
    own = twinax.load(str(tmp_path / "own.safetensors"))
    for beam_size in (1, 5):
        texts = []
        for sentence in SENTENCES:
            inputs = tokenizer([sentence], return_tensors="pt")
            output = model.generate(**inputs, num_beams=beam_size)
            texts += tokenizer.batch_decode(output, skip_special_tokens=True)
        assert texts == own.translate(SENTENCES, beam_size=beam_size)
        assert len(set(texts)) > 3  # or the comparison is empty
    src, tgt = torch.randint(4, 80, (3, 9)), torch.randint(4, 80, (3, 7))
    with torch.no_grad():
        logits = model(input_ids=src, decoder_input_ids=tgt).logits
    flax = jax.jit(checkpoint.to_flax())(jnp.asarray(src.numpy()), jnp.asarray(tgt.numpy()))
    np.testing.assert_allclose(flax, logits, atol=1e-5)


def test_a_frozen_padding_embedding_makes_no_difference():
    """Nothing reads what is computed at padding, so that the gradient of looking it up is zero anyway."""
    one_layer = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig.preset("tiny", param_dtype="float64", compute_dtype="float64", **one_layer)
    arrays = {name: jnp.asarray(a) for name, a in random_arrays(config, 0).items()}
    rng = np.random.default_rng(0)
    src, tgt = (rng.integers(3, 90, (4, 7)) for _ in range(2))
    src[1, 4:] = tgt[2, 3:] = config.pad_id

    def gradients(padding):
        def loss(arrays):
            logits = Transformer.from_arrays(config.replace(embedding_padding=padding), arrays)(
                jnp.asarray(src), jnp.asarray(tgt)
            )
            log_p = jax.nn.log_softmax(logits[:, :-1])
            labels = jnp.asarray(tgt[:, 1:, None])
            return jnp.where(labels != config.pad_id, jnp.take_along_axis(log_p, labels, -1), 0).sum()

        return jax.grad(loss)(arrays)

    trained, frozen = gradients("trained"), gradients("frozen")
    for name, gradient in trained.items():
        np.testing.assert_array_equal(gradient, frozen[name], err_msg=name)


def test_a_padding_embedding_that_starts_the_decoder_is_not_passed_over():
    """It has a gradient, which a family that freezes it would drop."""
    config = TransformerConfig.preset("small", d_model=8, num_heads=2, d_ff=16)
    assert fitting_families(config)["pegasus"] == ""
    same_start = config.replace(decoder_start_id=config.pad_id)
    expected = "embedding_padding='trained': a pegasus model has 'frozen'"
    assert fitting_families(same_start)["pegasus"] == expected
    assert fitting_families(same_start.replace(embedding_padding="frozen"))["pegasus"] == ""


def test_the_error_of_another_family_says_which_fits(checkpoint, command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    convert.save(checkpoint, tmp_path / "own.safetensors")
    code, _, error = command("convert", tmp_path / "own.safetensors", tmp_path / "x", "--layout", "bart")
    assert (code, error.count("\n")) == (2, 1)
    assert error.endswith("; and 2 more, which --verbose lists; the model fits pegasus\n")
    code, out, _ = command("inspect", tmp_path / "own.safetensors")
    assert "pegasus: fits" in out
    assert "marian: norm_placement='pre': a marian model has 'post'" in out
