"""Marian models in `.npz`: CTranslate2's scores, vocabularies, what is refused, and the way back."""

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import twinax
from parity_tests.support.marian_files import SIZE, marian_arrays, marian_model, marian_options, npz_changes, save_npz
from twinax import TransformerConfig, convert
from twinax.convert import Checkpoint, ConversionError
from twinax.convert.formats.marian import read_vocabulary
from twinax.convert.layouts.canonical import canonical
from twinax.convert.layouts.marian_npz import PAD_BIAS
from twinax.inference.translator import Translator
from twinax.parity.functions import random_arrays

FIXTURE = Path(__file__).parents[3] / "parity_tests" / "support" / "marian"
NAME = "Marian .npz"
pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about changes in later versions


@pytest.fixture(scope="module")
def arrays():
    return marian_arrays(NAME, marian_model(NAME))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The stored model and its vocabulary as the current folder."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_ctranslate2_gives_the_same_scores(framework, folder, command):
    """With its eps; positions are stored in its copy of the model, because it computes others."""
    assert command("convert", "model.npz", "x.pt", "--tokenizer", "vocab.yml")[0] == 0
    checkpoint, expected = convert.load("x.pt"), json.loads((FIXTURE / "scores.json").read_text())
    checkpoint = replace(checkpoint, config=checkpoint.config.replace(norm_eps=1e-5))
    scores = Translator(checkpoint).score(expected["sources"], expected["targets"], framework)
    assert len(scores) == 4
    np.testing.assert_allclose(scores, [sum(tokens) for tokens in expected["log_probs"]], rtol=2e-7, atol=1e-6)


def test_the_commands_read_and_write_it(folder, command):
    code, out, _ = command("inspect", "model.npz")
    assert (code, "Marian model" in out, "marian_npz" in out, "zero_embedding" in out) == (0, True, True, True)
    assert command("convert", "model.npz", "a.pt", "--tokenizer", "vocab.yml", "vocab.yml")[0] == 0
    code, out, _ = command("convert", "a.pt", "b.npz", "--layout", "marian_npz")
    assert (code, "vocabulary only" in out, "bit-identical after reading back" in out) == (0, False, True)
    assert "omitted: this format does not store tokenizers" in " ".join(out.split())
    assert npz_changes(folder / "model.npz", folder / "b.npz") == []
    shutil.copy("model.npz", "other.bin")
    assert convert.formats.registry.describe("other.bin") == "Marian model"
    assert len(twinax.load("a.pt").translate(["w4 w6@@ w7"], max_length=4, framework="torch")) == 1
    code, _, err = command("convert", "a.pt", "c.bin", "--layout", "marian_npz")
    assert (code, "c.bin: layout marian_npz needs a name that ends in .npz" in err) == (2, True)
    code, _, err = command("convert", "a.pt", "c.npz")
    assert (code, "c.npz: an .npz file needs --layout marian_npz" in err) == (2, True)


def test_padding_is_never_emitted_and_masked(folder):
    """Literal rows: zeros, and a bias that makes its probability 0 in every dtype."""
    checkpoint = convert.load("model.npz")
    assert checkpoint.config.pad_id == checkpoint.config.decoder_start_id == SIZE
    assert not checkpoint.arrays["src_embedding.embedding"][SIZE].any()
    assert checkpoint.arrays["output.bias"][SIZE] == PAD_BIAS == np.float16(PAD_BIAS)
    assert (checkpoint.config.norm_eps, checkpoint.config.eos_id, checkpoint.config.bos_id) == (1e-6, 0, None)
    position = checkpoint.arrays["src_input.positions.table"][3]
    frequencies = [10000 ** (-i / 5) for i in range(6)]
    expected = [np.sin(3 * f) for f in frequencies] + [np.cos(3 * f) for f in frequencies]
    np.testing.assert_allclose(position, expected, rtol=0, atol=1e-7)


REFUSED = {  # changes of the options -> message
    "ssru": (
        {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"},
        "transformer-decoder-autoreg='rnn' (dec-cell='ssru'): must be 'self-attention'",
    ),
    "rnn": ({"type": "s2s"}, "type='s2s': must be 'transformer'"),
    "gelu": (
        {"transformer-ffn-activation": "gelu"},
        "'relu', because the formula of Marian's gelu depends on its version",
    ),
    "highway": (
        {"transformer-postprocess": "dhn"},
        "transformer-postprocess='dhn': must be '' and 'dan' (post-norm), or",
    ),
    "a list": ({"transformer-preprocess": ["n"]}, "transformer-postprocess='dan': must be '' and 'dan'"),
    "depth": ({"transformer-ffn-depth": 3}, "transformer-ffn-depth=3: must be 2"),
    "shared layers": ({"transformer-tied-layers": [1, 1]}, "transformer-tied-layers=[1, 1]: must be []"),
    "reversed": ({"right-left": True}, "right-left=True: must be False"),
    "factors": ({"lemma-dim-emb": 64}, "lemma-dim-emb=64: must be 0"),
    "factored sizes": (
        {"dim-vocabs": [99, 99]},
        "dim-vocabs=[99, 99]: contradicts {'Wemb': 31}; factored vocabularies",
    ),
    "unknown": ({"transformer-new-thing": True}, "transformer-new-thing=True: twinax does not know this option"),
    "positions": ({"transformer-train-position-embeddings": True}, "contradicts the weights, which lack Wpos"),
    "layers": ({"enc-depth": 3}, "enc-depth=3: contradicts the weights, which have 2"),
    "heads": ({"transformer-heads": 5}, "transformer-heads=5: d_model=12 is not divisible by it"),
    "no number": ({"transformer-heads": "x"}, "transformer-heads='x'"),
    "width": ({"dim-emb": 13}, "dim-emb=13: must be even for Marian's positions"),
    "pre-norm": (
        {"transformer-preprocess": "n", "transformer-postprocess": "da"},
        "missing: decoder_l1_context_Wo_ln_bias_pre, float32[1, 12]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named(case, arrays, tmp_path):
    changes, message = REFUSED[case]
    save_npz(tmp_path / "x.npz", arrays, marian_options(NAME) | changes)
    with pytest.raises(ConversionError) as error:
        convert.load(tmp_path / "x.npz")
    assert str(error.value).startswith(f"{tmp_path / 'x.npz'}: ")
    assert message in str(error.value)


def rewritten(path, **changes):
    np.savez(path, **{**dict(np.load(path)), **changes})


def text(content):
    return {"special:model.yml": np.frombuffer(content, np.int8)}


BROKEN = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:9000]), "not a complete .npz file of plain arrays"),
    "empty": (lambda p: p.write_bytes(b""), "not a complete .npz file of plain arrays"),
    "pickled": (
        lambda p: rewritten(p, Wemb=np.array([{}], object)),
        "Object arrays cannot be loaded when allow_pickle",
    ),
    "no options": (lambda p: np.savez(p, a=np.ones(3)), "has no special:model.yml, so it is not a model that Marian"),
    "no YAML": (lambda p: rewritten(p, **text(b"a: [\0")), "special:model.yml: cannot be read"),
    "a list": (lambda p: rewritten(p, **text(b"- a\0")), "special:model.yml: holds a list, not options by name"),
    "aliases": (
        lambda p: rewritten(p, **text(b"a: &a [1]\nb: [*a, *a]\0")),
        "cannot be read: too long, or with aliases",
    ),
    "a tag": (lambda p: rewritten(p, **text(b"a: !!python/object/apply:os.getcwd []\0")), "cannot be read"),
    "no embedding": (lambda p: rewritten(p, Wemb=np.float32(3)), "has neither Wemb nor encoder_Wemb and decoder_Wemb"),
    "another array": (lambda p: rewritten(p, Wtype=np.ones((2, 12), "float32")), "not in the model: Wtype"),
    "no name": (lambda p: zipfile.ZipFile(p, "w").close(), "has no special:model.yml"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_one_message(case, folder, command):
    damage, message = BROKEN[case]
    damage(folder / "model.npz")
    code, out, err = command("convert", "model.npz", "new.pt")
    assert (code, out, err.startswith("twinax: model.npz: ")) == (2, "", True)
    assert message in err
    assert "Traceback" not in err


def test_vocabularies_are_marian_s(tmp_path):
    """Quoted tokens, escapes and long keys, as yaml-cpp writes them; the same as JSON."""
    path = tmp_path / "vocab.yml"
    path.write_text(
        '</s>: 0\n<unk>: 1\n":": 2\n"\\"": 3\n\'it\'\'s\': 4\n"\\x85": 5\n? long\n: 6\na:b: 7\n"\\u2581x": 8\n'
    )
    ids = {"</s>": 0, "<unk>": 1, ":": 2, '"': 3, "it's": 4, "\x85": 5, "long": 6, "a:b": 7, "\u2581x": 8}
    assert read_vocabulary(path) == ids
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    assert read_vocabulary(tmp_path / "vocab.json") == ids


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True), st.booleans())
def test_vocabularies_are_yaml(tmp_path_factory, tokens, allow_unicode):
    """Every token comes back: a byte-order mark, a line separator, and those that YAML escapes or folds."""
    ids = {token: number for number, token in enumerate(["</s>", "1", "null", "\b\xa0\u2028b_LN", *tokens])}
    path = tmp_path_factory.mktemp("yaml") / "vocab.yml"
    path.write_text(yaml.safe_dump(ids, allow_unicode=allow_unicode), encoding="utf-8")
    expected = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert read_vocabulary(path) == expected
    assert allow_unicode or expected == ids  # PyYAML does not escape every line break


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n", "'a' is not a token, a colon and an id"),
        ("a: 0\n- b\n", "is not a vocabulary"),
        ("a: 0\nb: [1]\n", "line 2 is not a token, a colon and an id"),
        ("a: &x 0\nb: *x\n", "line 2 is not a token, a colon and an id"),
        ("a: 0\nb: x\n", "the token 'b' has 'x', not an id"),
        ("a: 0\nb: 1\na: 2\n", "the token 'a' occurs twice"),
        ("a: 1\nb: 1\n", "gives two tokens the same id"),
        ("", "is not a vocabulary, a mapping from tokens to ids"),
        ("a: 0\n<unk>: 1\n", "has no token </s>, which a vocabulary of Marian must have"),
        ("eos: 0\nb: 1\nUNK: 2\n", "has no token <unk>, which a vocabulary of Marian must have"),
        ("the: 0\n<unk>: 1\n</s>: 2\n", "EOS, </s>, has id 2, but the model's eos_id is 0: use the model's own"),
        ("the: 0\n<unk>: 1\neos: 2\n</s>: 3\n", "EOS, </s>, has id 3, but the model's eos_id is 0"),
        (
            "".join(f"w{i}: {i + 2}\n" for i in range(40)) + "</s>: 0\n<unk>: 1\n",
            "has 42 tokens, one of them at the id of padding, 31",
        ),
    ],
)
def test_what_is_no_vocabulary(content, message, folder, command):
    Path("bad.yml").write_text(content)
    code, out, err = command("convert", "model.npz", "x.pt", "--tokenizer", "bad.yml")
    assert (code, out) == (2, "")
    assert err.startswith("twinax: bad.yml: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)
    assert not Path("x.pt").exists()


def test_text_is_segmented_by_the_user_or_by_sentencepiece(folder, command, arrays):
    ids = read_vocabulary(Path("vocab.yml"))
    Path("vocab.json").write_text(json.dumps(ids))
    nematus = {{"</s>": "eos", "<unk>": "UNK"}.get(token, token): number for token, number in ids.items()}
    Path("nematus.json").write_text(json.dumps(nematus))
    for files in (["vocab.yml"], ["vocab.json", "vocab.yml"], ["nematus.json"]):
        name = f"{'-'.join(files)}.pt"
        assert command("convert", "model.npz", name, "--tokenizer", *files)[0] == 0
        src, tgt = twinax.load(name).tokenizers
        assert src.encode_sources(["w4 w6@@ nie : w7"]) == [[4, 6, 1, 2, 7, 0]]
        assert (src.pad_id, src.bos_id, src.eos_id, src.unk_id) == (SIZE, None, 0, 1)
        assert tgt.decode([[4, 6, 7, 0, SIZE]]) == ["w4 w6w7"]
    texts = [f"ein {word} und {word}" for word in ("Haus", "Hund", "Baum")]
    options = {"vocab_size": SIZE, "pad_id": -1, "bos_id": -1, "eos_id": 0, "unk_id": 1, "hard_vocab_limit": False}
    with open("v.spm", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, minloglevel=2, model_type="bpe", **options
        )
    processor = sentencepiece.SentencePieceProcessor(model_file="v.spm")
    size = processor.vocab_size()
    cut = {
        n: a[:size] if n == "Wemb" else a[:, :size] if n == "decoder_ff_logit_out_b" else a for n, a in arrays.items()
    }
    save_npz(Path("s.npz"), cut, marian_options(NAME) | {"dim-vocabs": [size, size]})
    assert command("convert", "s.npz", "s.pt", "--tokenizer", "v.spm")[0] == 0
    tokenizers = twinax.load("s.pt").tokenizers
    assert tokenizers.src.encode_sources(texts) == [[*processor.encode(line), 0] for line in texts]
    assert tokenizers.src.pad_id == size


@settings(max_examples=5)
@given(
    ties=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    sizes=st.sampled_from([(9, 9), (9, 7), (7, 9)]),
    learned=st.booleans(),
    dropout=st.sampled_from([(0.1, 0.1), (0.0, 0.1), (0.1, 0.0), (0.0, 0.0)]),
    fields=st.fixed_dictionaries(
        {
            "num_heads": st.sampled_from([1, 2]),
            "decoder_d_ff": st.sampled_from([None, 5]),
            "activation": st.sampled_from(["relu", "silu"]),
            "embedding_norm": st.sampled_from(["none", "before_dropout", "after_dropout"]),
            "norm_placement": st.sampled_from(["pre", "post"]),
            "final_norm": st.booleans(),
            "output_bias": st.sampled_from(["learned", "stored"]),
            "attention_dropout": st.sampled_from([0.0, 0.1]),
        }
    ),
)
def test_any_model_that_marian_has_comes_back(ties, sizes, learned, dropout, fields, tmp_path_factory):
    shared, tied = ties
    src_size, tgt_size = (9, 9) if shared else sizes
    residual, embedding = dropout
    assume(embedding or fields["embedding_norm"] != "after_dropout")  # without dropout, its place has no name
    config = TransformerConfig(
        **{"src_vocab_size": 10, "tgt_vocab_size": 10, "pad_id": 9, "decoder_start_id": 9, "bos_id": None, "eos_id": 0},
        **{"d_model": 8, "d_ff": 6, "num_encoder_layers": 1, "num_decoder_layers": 2, "norm_eps": 1e-6},
        **{"positions": "learned" if learned else "sinusoidal_half_t2t", "max_length": 7 if learned else 1000},
        **{"embedding_scale": "none" if learned else "sqrt_d_model", "decoder_start": "zero_embedding"},
        **{"embedding_padding": "frozen", "shared_embeddings": shared, "tied_output": tied},
        **{"residual_dropout": residual, "embedding_dropout": embedding},
        **fields,
    )
    arrays = random_arrays(config, 0)
    arrays["src_embedding.embedding"][src_size:] = 0
    if not shared:
        arrays["tgt_embedding.embedding"][tgt_size:] = 0
    if not tied:
        arrays["output.proj.kernel"][:, tgt_size:] = 0
    arrays["output.bias"][tgt_size:] = PAD_BIAS
    if fields["output_bias"] == "stored":
        arrays["output.bias"][:tgt_size] = 0
    if learned:
        arrays["tgt_input.positions.table"] = arrays["src_input.positions.table"].copy()
    path = tmp_path_factory.mktemp("any") / "x.npz"
    convert.save(Checkpoint(config, arrays), path, layout="marian_npz")
    restored = convert.load(path)
    assert restored.config == canonical(config)
    assert max(src_size, tgt_size) == 9
    assert {n: a.tobytes() for n, a in restored.arrays.items()} == {n: a.tobytes() for n, a in arrays.items()}


@settings(max_examples=20)
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "num_heads": st.sampled_from([1, 2, 4, 6]),
            "activation": st.sampled_from(["relu"]),
            "attention_dropout": st.sampled_from([0.25]),
            "ffn_dropout": st.sampled_from([0.5]),
            "residual_dropout": st.sampled_from([0.125]),
            "embedding_dropout": st.sampled_from([0.125]),
            "positions": st.sampled_from(["sinusoidal_half_t2t"]),
        },
    ),
    learned=st.booleans(),
)
def test_a_changed_config_changes_the_options(fields, learned, arrays, tmp_path_factory):
    """What the options of the read file say otherwise, under any of their names; other options stay."""
    folder = tmp_path_factory.mktemp("changed")
    options = marian_options(NAME) | {"mini-batch": 64} | ({"transformer-train-positions": True} if learned else {})
    table = {"Wpos": np.ones((9, 12), np.float32)} if learned else {}
    save_npz(folder / "a.npz", {**arrays, **table}, options)
    checkpoint = convert.load(folder / "a.npz")
    before = checkpoint.config
    if fields.get("positions", before.positions) != before.positions:
        fields = fields | {"embedding_scale": "sqrt_d_model", "max_length": 1000, "position_table_length": None}
    config = canonical(before.replace(**fields))
    tables = {n: random_arrays(config, 0)[n] for n in checkpoint.arrays if n.endswith("positions.table")}
    kept = checkpoint.arrays if config.positions == before.positions else {**checkpoint.arrays, **tables}
    convert.save(replace(checkpoint, config=config, arrays=kept), folder / "b.npz", layout="marian_npz")
    restored = convert.load(folder / "b.npz")
    assert restored.config == config
    written = restored.documents["model.yml"]
    assert (written["mini-batch"], written["dec-cell"]) == (64, "gru")
    assert written["transformer-heads"] == config.num_heads


LACKING = {  # changes of an array or a field -> message
    "another model": ({"norm_eps": 1e-5}, {}, "Marian has no such model:\n  norm_eps=1e-05: a Marian model has 1e-06"),
    "heads": ({"decoder_num_heads": 1}, {}, "decoder_num_heads=1: a Marian model has None"),
    "a bias": (
        {},
        {"output.bias": 1.0},
        "output.bias: must have -8192.0 at the last id, padding, which Marian does not",
    ),
    "a row": ({}, {"src_embedding.embedding": 1.0}, "Wemb: must have a row of zeros at the last id, padding"),
    "a table": ({}, {"src_input.positions.table": 1.0}, "src_input.positions.table: Marian computes its table"),
}


@pytest.mark.parametrize("case", LACKING)
def test_a_model_that_marian_lacks_is_refused(case, folder):
    fields, changes, message = LACKING[case]
    checkpoint = convert.load("model.npz")
    arrays = {name: a + np.float32(changes.get(name, 0)) for name, a in checkpoint.arrays.items()}
    changed = Checkpoint(checkpoint.config.replace(**fields), arrays)
    with pytest.raises(ConversionError) as error:
        convert.save(changed, "x.npz", layout="marian_npz")
    assert message in str(error.value)
    assert not Path("x.npz").exists()


def test_a_token_with_the_bias_of_padding_is_refused(folder):
    """Its row would be lost."""
    checkpoint = convert.load("model.npz")
    bias = checkpoint.arrays["output.bias"].copy()
    bias[20:] = PAD_BIAS
    changed = Checkpoint(checkpoint.config, {**checkpoint.arrays, "output.bias": bias})
    with pytest.raises(
        ConversionError, match=r"Wemb: has 31 rows that are not 0, but output\.bias makes ids from 20 pad"
    ):
        convert.save(changed, "x.npz", layout="marian_npz")
