"""Models of twinax as fairseq checkpoints: what fairseq has comes back, and what it lacks is refused."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinax import TransformerConfig, convert
from twinax.configs.data import TokenizerConfig
from twinax.convert import Checkpoint, ConversionError
from twinax.convert.formats.fairseq_dictionary import read_dictionary
from twinax.convert.layouts.canonical import canonical
from twinax.parity.functions import random_arrays
from twinax.train.text.tokenization import train_tokenizer

WRITTEN = {  # fields that fairseq fixes
    **{"pad_id": 1, "bos_id": 0, "eos_id": 2, "decoder_start_id": 2, "embedding_padding": "frozen"},
    **{"decoder_mask": "causal_and_padding", "position_counting": "non_padding", "position_offset": 2},
    **{"output_bias": "none", "head_dim": None, "v_head_dim": None},
}


@settings(max_examples=5)
@given(
    ties=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    pre_norm=st.booleans(),
    positions=st.sampled_from(["learned", "sinusoidal_half_t2t"]),
    fields=st.fixed_dictionaries(
        {
            "num_heads": st.sampled_from([1, 2]),
            "decoder_num_heads": st.sampled_from([None, 1, 4]),
            "decoder_d_ff": st.sampled_from([None, 5]),
            "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]),
            "embedding_scale": st.sampled_from(["none", "sqrt_d_model"]),
            "embedding_norm": st.sampled_from(["none", "before_dropout"]),
            "attention_dropout": st.sampled_from([0.0, 0.1]),
            "ffn_dropout": st.sampled_from([0.0, 0.2]),
            "encoder_layerdrop": st.sampled_from([0.0, 0.1]),
            "param_dtype": st.sampled_from(["float32", "float16"]),
        }
    ),
)
def test_any_model_that_fairseq_has_comes_back(ties, pre_norm, positions, fields, tmp_path_factory):
    shared, tied = ties
    config = TransformerConfig(
        src_vocab_size=9,
        tgt_vocab_size=9 if shared else 8,
        d_model=8,
        d_ff=6,
        num_encoder_layers=1,
        num_decoder_layers=2,
        max_length=7,
        shared_embeddings=shared,
        tied_output=tied,
        norm_placement="pre" if pre_norm else "post",
        final_norm=pre_norm,
        positions=positions,
        **WRITTEN,
        **fields,
    )
    config = config.replace(compute_dtype=config.param_dtype)
    arrays = random_arrays(config, 0)
    path = tmp_path_factory.mktemp("any") / "x.pt"
    convert.save(Checkpoint(config, arrays), path, layout="fairseq")
    restored = convert.load(path)
    assert restored.config == canonical(config)
    learned = [name for name in arrays if not (name.endswith(".table") and positions != "learned")]
    assert all(restored.arrays[name].tobytes() == arrays[name].tobytes() for name in learned)
    assert restored.arrays.keys() == arrays.keys()


def test_a_model_that_fairseq_lacks_is_refused(tmp_path):
    config = TransformerConfig.preset("tiny", num_heads=4, head_dim=None, v_head_dim=None)
    with pytest.raises(ConversionError) as error:
        convert.save(Checkpoint(config, random_arrays(config, 0)), tmp_path / "x.pt", layout="fairseq")
    message = str(error.value)
    assert message.startswith("fairseq has no such model:\n")
    assert "pad_id=0: a fairseq model has 1" in message
    assert "decoder_mask='causal': a fairseq model has 'causal_and_padding'" in message
    assert os.listdir(tmp_path) == []


def test_a_vocabulary_of_twinax_becomes_dictionaries(tmp_path):
    """Ids stay; a model with more rows than tokens gets made-up words."""
    special = TokenizerConfig(vocab_size=40, special_order=("bos", "pad", "eos", "unk"))
    tokenizer = train_tokenizer(special, ["ein Haus", "ein Hund und ein Baum"])
    tokenizer.save(tmp_path / "t")
    files = {f"tokenizer/{path.name}": path.read_bytes() for path in (tmp_path / "t").iterdir()}
    size = tokenizer.vocab_size + 2
    sizes = {"src_vocab_size": size, "tgt_vocab_size": size, "d_model": 8, "num_heads": 2, "d_ff": 6}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "positions": "learned", "max_length": 9}
    config = TransformerConfig(**sizes, **WRITTEN)
    convert.save(Checkpoint(config, random_arrays(config, 0), files=files), tmp_path / "x", layout="fairseq")
    ids = read_dictionary(tmp_path / "x" / "dict.src.txt")
    tokens = tokenizer.fast.get_vocab()
    assert {token: number for token, number in ids.items() if number < tokenizer.vocab_size} == tokens
    assert [token for token, number in ids.items() if number >= tokenizer.vocab_size] == [
        f"madeupword{number:04d}" for number in (size - 2, size - 1)
    ]
    assert (tmp_path / "x" / "dict.tgt.txt").read_bytes() == (tmp_path / "x" / "dict.src.txt").read_bytes()
