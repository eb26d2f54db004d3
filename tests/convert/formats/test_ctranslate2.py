"""CTranslate2 computes what the twins compute, and its own converters write the same variables."""

from pathlib import Path

import ctranslate2
import numpy as np
import pytest
import torch
from allpairspy import AllPairs
from ctranslate2.converters import transformers as converters
from ctranslate2.specs import common_spec, transformer_spec

from parity_tests.support.conversion import VARIANTS
from twinax import TransformerConfig, convert, torch_reference
from twinax.convert import Checkpoint
from twinax.convert.formats.ctranslate2 import MODEL, Vocabulary, write_into
from twinax.convert.formats.ctranslate2_binary import read_model
from twinax.convert.layouts import ctranslate2 as layout
from twinax.parity.functions import random_arrays

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about changes in later versions
SOURCES = [[5, 6, 7, 2], [8, 9, 11, 12, 13, 14, 15, 2], [3, 2]]
TARGETS = [[7, 8, 9, 10, 2], [11, 2], [12, 13, 14, 15, 16, 17, 18, 2]]
STARTS = [target[:-1] for target in TARGETS]  # the library adds EOS
NORMS = {
    "layer_norm": {},
    "without bias": {"norm_bias": False},
    "without gain": {"norm_scale": False, "norm_eps": 1e-3},
    "rms_norm": {"norm": "rms_norm", "norm_bias": False, "norm_eps": 1e-6},
}
POSITIONS = {
    "sinusoidal": {},
    "learned, offset": {"positions": "learned", "position_offset": 2},
    "stored, long": {"positions": "stored", "position_table_length": 40},
    "none": {"positions": "none"},
    "relative": {"positions": "none", "relative_positions": "shared", "relative_position_buckets": 6},
    "relative, per layer": {
        "positions": "none",
        "relative_positions": "per_layer",
        "relative_position_max_distance": 17,
    },
}
NO_BIASES = {f"{name}_proj_bias": False for name in ("q", "k", "v", "out")} | {"ffn_bias": False}
FACTORS = {
    "norms": list(NORMS.values()),
    "positions": list(POSITIONS.values()),
    "norm_placement": ["pre", "post"],
    "final_norm": [False, True],
    "embedding_norm": ["none", "before_dropout", "after_dropout"],
    "sizes": [{}, {"num_heads": 7, "decoder_num_heads": 1}, {"head_dim": 5, "decoder_d_ff": 17}],
    "layers": [{"num_encoder_layers": 1}, {"num_decoder_layers": 3}],
    "tables": [{}, {"tgt_vocab_size": 31, "shared_embeddings": True}],
    "embedding_scale": ["none", "sqrt_d_model"],
    "decoder_start": ["token", "zero_embedding"],
    "tied_output": [False, True],
    "output_bias": ["none", "learned", "stored"],
    "logit_scale": ["none", "rsqrt_d_model"],
    "output_activation": ["none", "log_softmax"],
    "biases": [{}, {"q_proj_bias": False}, {"k_proj_bias": False, "v_proj_bias": False}, NO_BIASES],
    "score_scaling": ["product", "query", "none"],
    "masks": [{}, {"mask_value": -1e9, "encoder_mask": "source_and_query"}, {"decoder_mask": "causal_and_padding"}],
    "activation": ["relu", "gelu", "gelu_tanh", "silu"],
    "ffn_gate": [False, True],
    "position_counting": ["all", "non_padding"],
}
GROUPS = ("norms", "positions", "sizes", "layers", "tables", "biases", "masks")  # factors of several fields
SIZES = {"src_vocab_size": 31, "tgt_vocab_size": 29, "d_model": 14, "num_heads": 2, "d_ff": 23, "max_length": 20}
SIZES |= {"num_encoder_layers": 2, "num_decoder_layers": 2}


def configs():
    """Configs with all pairs of the values above."""
    for values in AllPairs(list(FACTORS.values())):
        fields = dict(zip(FACTORS, values, strict=True))
        groups = [fields.pop(name) for name in GROUPS]
        yield TransformerConfig(**SIZES | fields | {name: v for group in groups for name, v in group.items()})


def tokens(side, size):
    """No token of one side is one of the other's."""
    return Vocabulary([f"<{side} {i}>" for i in range(size)], f"<{side} 3>")


def translator(folder, config, arrays, quantization=None):
    vocabularies = tokens("src", config.src_vocab_size), tokens("tgt", config.tgt_vocab_size)
    write_into(folder, config, arrays, *vocabularies, quantization)
    return ctranslate2.Translator(str(folder), compute_type="float32", inter_threads=1, intra_threads=1)


def named(side, sentences):
    return [[f"<{side} {i}>" for i in ids] for ids in sentences]


def log_probs(model):
    """Those of each target, one sentence at a time: no padding."""
    pairs = zip(SOURCES, TARGETS, strict=True)
    return [torch_reference.score(model, torch.tensor([s]), torch.tensor([t])).tokens[0] for s, t in pairs]


def test_every_expressible_setting_gives_the_same_log_probabilities(tmp_path):
    """Sentences of different lengths in one batch, against the PyTorch twin in float64."""
    count = 0
    for number, config in enumerate(configs()):
        arrays = random_arrays(config, number)
        folder = tmp_path / str(number)
        folder.mkdir()
        scores = translator(folder, config, arrays).score_batch(
            named("src", SOURCES), named("tgt", (t[:-1] for t in TARGETS))
        )
        exact = config.replace(param_dtype="float64", compute_dtype="float64")
        reference = Checkpoint(exact, {name: a.astype(np.float64) for name, a in arrays.items()}).to_torch()
        for result, expected in zip(scores, log_probs(reference), strict=True):
            np.testing.assert_allclose(result.log_probs, expected, rtol=2e-5, atol=2e-5, err_msg=str(config))
        back = layout.read(config, read_model(folder / MODEL))
        rows = slice(config.position_offset, config.position_offset + config.max_length)
        for name, array in arrays.items():
            used = rows if name.endswith("positions.table") else slice(None)
            np.testing.assert_array_equal(back[name][used], array[used], err_msg=name)
        count += 1
    assert count >= 24


# family -> its converter; fields by which the library selects the architecture, because it reads `transformers` 4
CONVERTERS = {
    "Marian, untied": (converters.MarianMTLoader, {}),
    "BART, untied, scaled": (converters.BartLoader, {"normalize_before": False}),
    "mBART": (converters.MBartLoader, {"normalize_before": True}),
    "M2M100": (converters.M2M100Loader, {}),
    "Pegasus": (converters.PegasusLoader, {"normalize_before": True, "normalize_embedding": False}),
    "T5": (converters.T5Loader, {}),
    "T5 v1.1, Flan-T5": (converters.T5Loader, {}),
    "UMT5": (converters.UMT5Loader, {}),
}
# It takes the encoder's number of heads for the decoder, and states no width of heads.
DIFFERENT = ("decoder/num_heads", "/head_dim")


@pytest.mark.parametrize("name", CONVERTERS)
def test_its_own_converter_makes_the_same_variables(name, directories, monkeypatch):
    import transformers

    checkpoint = convert.load(directories / name)
    loader, settings = CONVERTERS[name]
    architecture = getattr(transformers, convert.formats.hugging_face.family(VARIANTS[name][0]).architecture)
    model = architecture.from_pretrained(directories / name)
    for field, value in settings.items():
        setattr(model.config, field, value)
    model.config.tie_word_embeddings = checkpoint.config.logit_scale != "none"
    monkeypatch.setattr(converters.MarianMTLoader, "_remove_pad_weights", lambda self, spec: None)
    with torch.no_grad():
        spec = loader().get_model_spec(model)
        for side in (spec.encoder, spec.decoder):
            side.validate()
    expected = {n: v.numpy() for side in ("encoder", "decoder") for n, v in getattr(spec, side).variables(side).items()}
    variables, aliases = layout.write(checkpoint.config, checkpoint.arrays)
    variables |= {alias: variables[target] for alias, target in aliases.items()}
    relevant = [n for n in {*expected, *variables} if not n.endswith(DIFFERENT)]
    assert len(relevant) > 50
    for variable in relevant:
        if variable.endswith("scale_embeddings"):  # a flag, or the factor itself
            factors = {0: 1.0, 1: checkpoint.config.d_model**0.5}
            value = float(expected[variable])
            assert factors[int(variables[variable])] == pytest.approx(value if value else 1.0, rel=1e-6)
        elif variable != "decoder/start_from_zero_embedding":  # equal for a zero row of padding only
            np.testing.assert_array_equal(variables[variable], expected[variable], err_msg=variable)


@pytest.mark.parametrize("quantization", ["int8", "int8_float32", "float16"])
def test_weights_are_quantized_as_the_library_does(quantization, tmp_path):
    config = TransformerConfig(**SIZES, norm_placement="pre", final_norm=True)
    arrays = random_arrays(config, 0)
    arrays["src_embedding.embedding"][4] = 0  # a row without a scale
    translator(tmp_path, config, arrays, quantization)
    variables, _ = layout.write(config, arrays)
    spec = transformer_spec.TransformerSpec.from_config((2, 2), 2, activation=common_spec.Activation.RELU)
    for name, array in variables.items():
        owner, attribute = spec, name.split("/")
        for part in attribute[:-1]:
            group, _, number = part.rpartition("_")
            owner = getattr(owner, part) if hasattr(owner, part) else getattr(owner, group)[int(number)]
        setattr(owner, attribute[-1], array)
    for side in ("source", "target"):
        size = {"source": config.src_vocab_size, "target": config.tgt_vocab_size}[side]
        getattr(spec, f"register_{side}_vocabulary")(list(tokens(side, size).tokens))
    spec.validate()
    spec.optimize(quantization=quantization)
    Path(tmp_path, "library").mkdir()
    spec.save(str(tmp_path / "library"))
    expected, result = read_model(tmp_path / "library" / MODEL), read_model(tmp_path / MODEL)
    for name in expected:  # the library makes an alias of any two equal arrays
        assert result[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(result[name], expected[name], err_msg=name)
    assert sum(name.endswith("_scale") for name in result) == (0 if quantization == "float16" else 25)
