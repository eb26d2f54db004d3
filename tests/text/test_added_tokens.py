"""Tokens that were added to tokenizers of the families; the oracle is `AutoTokenizer` of `transformers`."""

import json
import shutil

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from parity_tests.support.text import LANGUAGES, VARIANTS, reference_tokenizer, write_files
from twinax import TransformerConfig
from twinax.backend.errors import DataError
from twinax.configs.data import TokenizerConfig
from twinax.train.data.fitting import with_target_language
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.languages import NLLB
from twinax.train.text.pretrained import load_tokenizer

GERMAN = ["Ein Hund läuft am See, das Haus steht nicht!", "das Mädchen schläft", "aber der Baum ist größer"] * 3
ENGLISH = ["the dog is old, isn't it?", "It's a wet house by the water."] * 3
CONTENTS = ["<ent>", "ab", "aab", "a b", " ab", "<b> ", "größ", "½", "▁x▁", "Hund", "x.", "日本", ">>tyv<<", "__tyv__"]
FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")  # one of them lists the added tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about sacremoses and its own classes
flags = {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
tokens = st.lists(st.builds(AddedToken, st.sampled_from(CONTENTS), **flags), max_size=4, unique_by=str)
PARTS = [*CONTENTS, *CONTENTS, " ", " ", "  ", "\t", "\u00a0", "a", "das ", "läuft", "ä", ", ", "_", "</s>", "<mask>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> folder with a family's files."""
    folder = tmp_path_factory.mktemp("families")
    for name in VARIANTS:
        write_files(name, folder / name, (GERMAN, ENGLISH), 400)
    return {name: folder / name for name in VARIANTS}


def flags_of(token):
    return {name: getattr(token, name) for name in flags}


def save_with(tokens, name, base, folder, file, **settings):
    """Write a family's files with added tokens, which one of the files lists."""
    shutil.rmtree(folder, ignore_errors=True)
    reference = reference_tokenizer(name, base)
    for token in tokens:
        reference.add_tokens([token], special_tokens=token.special)
    reference.save_pretrained(folder)
    shutil.copy(base / "config.json", folder)
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    added = reference.added_tokens_decoder
    if file != "tokenizer.json":
        saved["added_tokens_decoder"] = {str(i): {"content": t.content, **flags_of(t)} for i, t in added.items()}
    if file == "added_tokens.json":
        del saved["added_tokens_decoder"]
        (folder / file).write_text(json.dumps({token.content: i for i, token in added.items()}))
    (folder / "tokenizer_config.json").write_text(json.dumps(saved | settings))
    if file != "tokenizer.json":
        (folder / "tokenizer.json").unlink(missing_ok=True)
        for path in base.iterdir():
            if not (folder / path.name).exists():
                shutil.copy(path, folder)
    return folder


def loaded(name, folder):
    """(`transformers`' tokenizer, twinax's) of a folder, with languages."""
    languages = dict(zip(("src_lang", "tgt_lang"), LANGUAGES.get(name, ()), strict=False))
    tokenizer = load_tokenizer(str(folder), TokenizerConfig())
    tokenizer = tokenizer.with_languages(*languages.values()) if languages else tokenizer
    return reference_tokenizer(name, folder, **languages), tokenizer


@pytest.mark.parametrize("name", VARIANTS)
@given(
    tokens=tokens,
    file=st.sampled_from(FILES),
    listed=st.sampled_from(
        [{}, {"ent_token": "x."}, {"extra_special_tokens": {"a": "ab"}}, {"split_special_tokens": True}]
    ),
    random=st.randoms(use_true_random=True),  # of many texts, which hypothesis would shrink one by one
)
@settings(max_examples=5, phases=(Phase.explicit, Phase.generate))
def test_added_tokens_have_the_ids_and_texts_of_transformers(name, tokens, file, listed, random, folders):
    folder = save_with(tokens, name, folders[name], folders[name].with_name(f"{name} saved"), file, **listed)
    reference, tokenizer = loaded(name, folder)
    texts = ["".join(random.choices(PARTS, k=random.randrange(9))) for _ in range(60)]
    assert tokenizer.encode_sources(texts) == [reference(text)["input_ids"] for text in texts]
    expected = [reference(text_target=text, add_special_tokens=False)["input_ids"] for text in texts]
    assert tokenizer.target.encode(texts) == expected
    # without 2 and 3, Pegasus' masks, whose ids `transformers` 5 swaps
    numbers = [0, 1, *range(4, 30), *range(len(reference) - 15, len(reference))]
    ids = [*expected, *(random.choices(numbers, k=random.randrange(8)) for _ in range(60))]
    if "two vocabularies" in name:  # of some of its own ids, the reference cannot decode any
        ids = [[i for i in row if tokenizer.target.token_of(i) is not None] for row in ids]
    assert tokenizer.target.decode(ids) == [reference.decode(row, skip_special_tokens=True) for row in ids]


@pytest.mark.parametrize("name", ["NLLB", "T5", "BART"])
def test_an_added_token_with_another_id_than_its_files_say_is_one_line(name, folders, tmp_path):
    """`transformers` gives it the next id, which is another row of the model."""
    folder = save_with([AddedToken("<ent>")], name, folders[name], tmp_path / "saved", "tokenizer_config.json")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    number, entry = settings["added_tokens_decoder"].popitem()
    settings["added_tokens_decoder"][str(int(number) + 3)] = entry
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        DataError, match=rf"saved: its files give the added token '<ent>' the id {int(number) + 3}, but"
    ):
        load_tokenizer(str(folder), TokenizerConfig())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_longer_of_two_special_tokens_counts(name, order, folders, tmp_path):
    """One begins with the other, in either order of their ids."""
    contents = ["<e>", "<e>x", "ab", "abc"][::order]
    added = [AddedToken(content, special=True, normalized=False) for content in contents]
    reference, tokenizer = loaded(name, save_with(added, name, folders[name], tmp_path / "saved", FILES[1]))
    texts = ["<e>x", "<e> x", "das <e>xy abcd", "abab", "ababc", "<e><e>x", "ab c<e>xabc"]
    assert tokenizer.encode_sources(texts) == [reference(text)["input_ids"] for text in texts]


NEW_LANGUAGES = {"mBART": "tyv_XX", "mBART-50": "tyv_XX", "NLLB": "tyv_Cyrl", "M2M100": "__tyv__"}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", NEW_LANGUAGES)
def test_an_added_token_is_a_language(name, file, folders, tmp_path):
    token, (known, _) = NEW_LANGUAGES[name], LANGUAGES[name]
    language = token.strip("_")
    folder = save_with([AddedToken(token, special=True)], name, folders[name], tmp_path / "saved", file)
    reference = reference_tokenizer(name, folder)
    number = reference.convert_tokens_to_ids(token)
    tokenizer = load_tokenizer(str(folder), TokenizerConfig())
    if name == "M2M100":  # whose class in `transformers` has a fixed list
        reference.lang_code_to_token[language], reference.lang_token_to_id[token] = token, number
    reference.src_lang = language
    expected = [reference("Hund")["input_ids"]]
    assert number in expected[0]
    tokenizers = Tokenizers.of([tokenizer.with_languages(language, language)])
    assert tokenizers.src.encode_sources(["Hund"]) == expected
    model = TransformerConfig.preset("tiny", src_vocab_size=number + 1, tgt_vocab_size=number + 1)
    changed = with_target_language(model, tokenizers)
    assert number == (changed.decoder_start_id if name == "mBART" else changed.forced_bos_id)
    with pytest.raises(DataError, match=rf"^tgt_lang: the model lacks '{token}', the tokenizer's id {number}"):
        with_target_language(model.replace(tgt_vocab_size=number), tokenizers)
    with pytest.raises(
        DataError, match=rf"src_lang='{language}l': the tokenizer has no such language; did .*'{language}'"
    ):
        tokenizer.with_languages(f"{language}l", known)


def test_a_tokenizer_without_the_default_language_needs_that_of_sources(folders, tmp_path):
    folder = save_with([], "NLLB", folders["NLLB"], tmp_path / "saved", "tokenizer_config.json")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    entries = settings["added_tokens_decoder"]
    last = max(map(int, entries)) - len(NLLB)
    kept = {i: entry for i, entry in entries.items() if int(i) < last} | {str(last): entries[str(last)]}
    kept[str(last)]["content"] = "tyv_Cyrl"
    settings |= {"added_tokens_decoder": kept, "extra_special_tokens": ["tyv_Cyrl"], "src_lang": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(folder), TokenizerConfig())
    with pytest.raises(DataError, match=r"^src_lang=None: set the language of sources; the tokenizer has tyv_Cyrl$"):
        tokenizer.encode_sources(["Hund"])
    assert tokenizer.with_languages("tyv_Cyrl", None).encode_sources(["Hund"])[0][0] == last
