"""Tokenizers of the families from the files that people have; the oracle is `AutoTokenizer` of `transformers`."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from parity_tests.support.text import LANGUAGES, VARIANTS, compare_text, reference_tokenizer, write_files
from twinax import TransformerConfig
from twinax.backend.errors import DataError
from twinax.configs.data import TokenizerConfig
from twinax.train.data.fitting import with_target_language
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.pretrained import load_tokenizer

NOUNS, VERBS = ("Haus", "Hund", "Mädchen", "Baum", "See"), ("schläft", "läuft", "steht am Ufer", "ist größer")
GERMAN = [
    f"Ein{'e' * (i % 2)} {a} {b}, {i} mal; das {c} nicht!" for i, a in enumerate(NOUNS) for b in VERBS for c in NOUNS
]
ENGLISH = [
    f"The {a} is {b} by the water, isn't it? It's a {c}."
    for a in ("dog", "girl")
    for b in ("old", "wet")
    for c in "xyz"
]
STRANGE = [
    "",
    " ",
    "  zwei   Leer ",
    "日本語 ﬁn½ Ⅳ",
    "ß Ä é",
    "\tTab\u00a0fest\n",
    "</s>",
    "a</s>b <pad> <unk>c",
    "x <mask> y",
]
LANGUAGE_TOKENS = [
    ">>fra<< Hund",
    ">>fra<<Hund",
    " >>deu<< x",
    ">>xx<< a",
    "__de__ x",
    "de_DE x",
    "deu_Latn x",
    "<extra_id_7>x",
]
TEXTS = [*GERMAN[:30], *ENGLISH, *STRANGE, *LANGUAGE_TOKENS, "a . ' b 's !"]

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about sacremoses and its own classes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> folder with a family's files."""
    folder = tmp_path_factory.mktemp("families")
    for name in VARIANTS:
        write_files(name, folder / name, (GERMAN, ENGLISH * 3), 400)
    return {name: folder / name for name in VARIANTS}


@pytest.mark.parametrize("name", VARIANTS)
def test_ids_and_texts_are_those_of_transformers(name, folders):
    row = compare_text(name, folders[name], TEXTS)
    assert (row.sources, row.targets, row.decoded) == ([], [], [])


@pytest.fixture(scope="module", params=VARIANTS)
def family_pair(request, folders):
    """(`transformers`' tokenizer, twinax's) of a family."""
    folder = folders[request.param]
    return reference_tokenizer(request.param, folder), load_tokenizer(str(folder), TokenizerConfig())


@given(text=st.text(max_size=25) | st.text(st.sampled_from("aeHunds ßä½,!xx日 <>/_\u0301\u200b\n"), max_size=30))
def test_any_text_has_the_same_ids(family_pair, text):
    reference, tokenizer = family_pair
    assert tokenizer.encode_sources([text]) == [reference(text)["input_ids"]]


@given(ids=st.lists(st.integers(0, 28), max_size=12))
def test_any_ids_have_the_same_text(family_pair, ids):
    reference, tokenizer = family_pair
    expected = reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.target.decode([ids]) == [expected]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_tokenizer_is_saved_as_it_was_read(name, folders, tmp_path):
    """Into one folder, where `transformers` reads it too, with the languages that were set."""
    languages = LANGUAGES.get(name)
    tokenizer = load_tokenizer(str(folders[name]), TokenizerConfig())
    tokenizers = Tokenizers.of([tokenizer.with_languages(*languages) if languages else tokenizer])
    tokenizers.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    for file in (*folders[name].glob("*.spm"), *folders[name].glob("*.model"), *folders[name].glob("*vocab.json")):
        assert (tmp_path / "tokenizer" / file.name).read_bytes() == file.read_bytes()
    copies = Tokenizers.load(tmp_path)
    assert copies is not None
    assert copies.src.encode_sources(TEXTS) == tokenizers.src.encode_sources(TEXTS)
    assert copies.tgt.encode(TEXTS) == tokenizers.tgt.encode(TEXTS)
    (tmp_path / "tokenizer" / "config.json").write_bytes((folders[name] / "config.json").read_bytes())
    reference = reference_tokenizer(name, tmp_path / "tokenizer")
    assert [reference(text)["input_ids"] for text in TEXTS] == tokenizers.src.encode_sources(TEXTS)


# Marian's and M2M100's classes have no tokenizer.json
JSON = [name for name in VARIANTS if not name.startswith(("Marian", "M2M100"))]


@pytest.mark.parametrize("name", JSON)
def test_tokenizer_json_has_the_text_of_transformers(name, folders, tmp_path):
    """As `transformers` 5 saves it, and again after twinax saved it: fine-tuning changes neither text nor settings."""
    first, again = tmp_path / "first", tmp_path / "again"
    reference_tokenizer(name, folders[name]).save_pretrained(first)
    (first / "config.json").write_bytes((folders[name] / "config.json").read_bytes())
    assert (first / "tokenizer.json").is_file()
    load_tokenizer(str(first), TokenizerConfig()).save(again)
    (again / "config.json").write_bytes((first / "config.json").read_bytes())
    for folder in (first, again):
        row = compare_text(name, folder, TEXTS)
        assert (row.sources, row.targets, row.decoded) == ([], [], [])
    old, new = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (first, again))
    for settings in (old, new):
        for name_of_language in ("src_lang", "tgt_lang"):  # which may state the default
            settings.pop(name_of_language, None)
    assert new == old
    texts = [AutoTokenizer.from_pretrained(folder).decode([5, 6, 7, 8]) for folder in (first, again)]
    assert texts[0] == texts[1]


def copy_with_settings(folder, target, **settings):
    shutil.copytree(folder, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


@pytest.mark.parametrize("legacy", [True, False])
def test_the_frame_of_nllb_depends_on_legacy_behaviour(legacy, folders, tmp_path):
    folder = copy_with_settings(folders["NLLB"], tmp_path / "files", legacy_behaviour=legacy)
    reference = AutoTokenizer.from_pretrained(folder, src_lang="deu_Latn")
    reference.save_pretrained(tmp_path / "json")
    (tmp_path / "json" / "config.json").write_bytes((folder / "config.json").read_bytes())
    expected = [reference(text)["input_ids"] for text in TEXTS]
    for path in (folder, tmp_path / "json"):
        tokenizer = load_tokenizer(str(path), TokenizerConfig()).with_languages("deu_Latn", None)
        assert tokenizer.encode_sources(TEXTS) == expected
        assert tokenizer.encode_sources(["Hund"])[0][-1 if legacy else 0] == tokenizer.id_of("deu_Latn")


@pytest.mark.parametrize(
    "settings", [{"cls_token": "<pad>", "sep_token": "<unk>"}, {"bos_token": "<pad>", "eos_token": "<unk>"}]
)
def test_bart_s_frame_is_cls_and_sep(settings, folders, tmp_path):
    folder = copy_with_settings(folders["BART"], tmp_path / "files", **settings)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder), TokenizerConfig())
    assert tokenizer.encode_sources(TEXTS) == [reference(text)["input_ids"] for text in TEXTS]


def test_a_source_is_truncated_between_its_special_tokens(folders):
    for name in ("mBART", "NLLB", "Marian", "T5"):
        tokenizer = load_tokenizer(str(folders[name]), TokenizerConfig())
        full, short = (tokenizer.encode_sources([GERMAN[0]], longest)[0] for longest in (None, 6))
        assert len(short) == 6 < len(full)
        reference = AutoTokenizer.from_pretrained(folders[name])
        assert short == reference(GERMAN[0], truncation=True, max_length=6)["input_ids"]


def test_nllb_without_added_tokens_has_the_published_order_of_languages(folders, tmp_path):
    """In the published model ace_Arab follows the pieces, eng_Latn is the 47th language, and <mask> is last."""
    shutil.copytree(folders["NLLB"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer"}')
    tokenizer = load_tokenizer(str(tmp_path), TokenizerConfig())
    first = tokenizer.id_of("ace_Arab")
    assert first is not None
    assert [tokenizer.id_of(token) for token in ("eng_Latn", "fra_Latn", "<mask>")] == [
        first + 46,
        first + 56,
        first + 202,
    ]
    assert tokenizer.encode_sources([""]) == [[first + 46, tokenizer.eos_id]]


@pytest.mark.parametrize("name", ["mBART", "NLLB"])
def test_a_target_language_replaces_the_first_token_of_another(name, folders):
    """mBART's starts the decoder and NLLB's is forced; the other field keeps nothing of an earlier language."""
    tokenizer = load_tokenizer(str(folders[name]), TokenizerConfig()).with_languages(*LANGUAGES[name])
    number = tokenizer.id_of(LANGUAGES[name][1])
    model = TransformerConfig.preset("tiny", src_vocab_size=2000, tgt_vocab_size=2000, forced_bos_id=9)
    changed = with_target_language(model, Tokenizers.of([tokenizer]))
    expected = (number, None) if name == "mBART" else (model.decoder_start_id, number)
    assert (changed.decoder_start_id, changed.forced_bos_id) == expected


def test_m2m100_omits_languages_that_its_files_do_not_list(folders, tmp_path):
    shutil.copytree(folders["M2M100"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(str(tmp_path), TokenizerConfig())
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode_sources(TEXTS) == [reference(text)["input_ids"] for text in TEXTS]
    (ids,) = tokenizer.encode_sources(["Hund"])
    assert tokenizer.decode([ids]) == ["Hund"]


def change(folder, name, content):
    (folder / name).write_bytes(content)


DAMAGES = {
    "no vocabulary": (
        "Marian",
        lambda f: (f / "vocab.json").unlink(),
        "has no vocab.json, which its MarianTokenizer needs",
    ),
    "no model": ("Marian", lambda f: (f / "target.spm").unlink(), "has no target.spm, which its MarianTokenizer needs"),
    "a damaged model": (
        "Marian",
        lambda f: change(f, "source.spm", b"abc"),
        "source.spm: is not a SentencePiece model",
    ),
    **{
        f"an empty {name}": (
            "Marian",
            lambda f, name=name: change(f, name, b""),
            f"{name}: is not a SentencePiece model",
        )
        for name in ("source.spm", "target.spm")
    },
    "an empty model": ("T5", lambda f: change(f, "spiece.model", b""), "spiece.model: is not a SentencePiece model"),
    "not JSON": ("BART", lambda f: change(f, "vocab.json", b"{"), "vocab.json: is not JSON"),
    "a list": ("M2M100", lambda f: change(f, "vocab.json", b"[]"), "vocab.json: must be a JSON object, not a list"),
    "an id that is text": ("M2M100", lambda f: change(f, "vocab.json", b'{"a": "b"}'), "but the id of 'a' is 'b'"),
    "no unknown token": (
        "Marian",
        lambda f: change(f, "vocab.json", b'{"</s>": 0, "a": 1}'),
        "its vocabulary has no unknown token '<unk>'",
    ),
    "one id twice": ("BART", lambda f: change(f, "vocab.json", b'{"a": 0, "b": 0}'), "two tokens have the same id"),
    "merges of another": ("BART", lambda f: change(f, "merges.txt", b"qq zz\n"), "merges.txt: does not fit vocab.json"),
    "an unknown language": (
        "NLLB",
        lambda f: change(f, "tokenizer_config.json", b'{"tokenizer_class": "NllbTokenizer", "src_lang": "de"}'),
        "src_lang='de': the tokenizer has no such language",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line(damage, folders, tmp_path):
    name, apply, message = DAMAGES[damage]
    shutil.copytree(folders[name], tmp_path, dirs_exist_ok=True)
    apply(tmp_path)
    with pytest.raises(DataError) as error:
        load_tokenizer(str(tmp_path), TokenizerConfig())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).count(str(tmp_path)) <= 1


def test_the_class_comes_from_the_tokenizer_before_the_model(folders, tmp_path):
    """As in `AutoTokenizer`: tokenizer_config.json, then config.json, then the model's type."""
    shutil.copytree(folders["mBART"], tmp_path, dirs_exist_ok=True)
    first = []
    for settings, model in (
        ({}, {}),
        ({}, {"tokenizer_class": "MBart50Tokenizer"}),
        ({"tokenizer_class": "MBartTokenizer"}, {"tokenizer_class": "MBart50Tokenizer"}),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "mbart", **model}))
        ids = load_tokenizer(str(tmp_path), TokenizerConfig()).encode_sources(["Hund"])[0]
        assert ids == AutoTokenizer.from_pretrained(tmp_path)("Hund")["input_ids"]
        first.append(ids[-1])
    assert first[0] == first[2] != first[1]
