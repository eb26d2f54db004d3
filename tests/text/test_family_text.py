"""Text in, text out with directories of the families; the oracle is `generate` with `transformers`' tokenizers."""

import json
import shutil

import ctranslate2
import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import twinax
from parity_tests.support.text import VARIANTS, compare_translations, write_files, write_model
from twinax import convert, torch_reference
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.convert.formats.ctranslate2 import read_tokens
from twinax.convert.formats.generation import longest_translation
from twinax.parity.search.ctranslate2 import COMMON_RULES, translate_options

GERMAN = [f"Ein {a} {b}, {i} mal." for i, a in enumerate(("Haus", "Hund", "Mädchen")) for b in ("schläft", "läuft")]
ENGLISH = [f"The {a} is {b} by the water, isn't it?" for a in ("dog", "girl") for b in ("old", "wet")]
TEXTS = [GERMAN[0], ENGLISH[1], "½ ﬁn 日本"]

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> directory with a family's tokenizer files and a random model, written on first use."""
    made = {}
    transformers.logging.disable_progress_bar()  # which writes to standard error

    def folder_of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("family") / "model"
            write_files(name, made[name], (GERMAN * 8, ENGLISH * 12), 400)
            write_model(name, made[name])
        return made[name]

    return folder_of


@pytest.mark.parametrize("name", VARIANTS)
def test_translations_are_those_of_transformers(name, folders):
    """With the directory's settings; of two families also greedily."""
    for beam_size in (None, 1) if name in ("T5", "Marian") else (None,):
        assert compare_translations(name, folders(name), TEXTS, beam_size) == []


def change_settings(folder, target, **settings):
    shutil.copytree(folder, target)
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


@pytest.mark.parametrize("name", ["T5", "Marian"])
def test_without_settings_a_directory_decodes_as_generate_does_by_default(name, folders, tmp_path, command):
    """Greedily, and 20 tokens at most, which these models reach."""
    folder = change_settings(folders(name), tmp_path / "model", num_beams=None, max_length=None)
    assert compare_translations(name, folder, TEXTS, None) == []
    translator = twinax.load(folder)
    assert translator.translate(TEXTS, framework="torch") != translator.translate(
        TEXTS, framework="torch", max_length=24
    )
    (tmp_path / "text").write_text("Hund\n")
    err = command("translate", folder, tmp_path / "text", "--framework", "torch")[2]
    assert "; num_beams=1, max_new_tokens=20 (not in generation_config.json, the defaults of transformers)\n" in err
    assert longest_translation(translator.checkpoint.documents, translator.config) == 20
    assert longest_translation(twinax.load(folders(name)).checkpoint.documents, translator.config) == 23


def test_the_table_names_the_tokenizer_files_where_they_are(folders, tmp_path, command):
    code, out, _ = command("convert", folders("Marian"), tmp_path / "again", "--layout", "marian")
    assert (code, "source.spm" in out, "tokenizer/" in out) == (0, True, False)


def test_inspect_says_that_a_tokenizer_cannot_be_used(folders, tmp_path, command):
    folder, report = shutil.copytree(folders("Marian"), tmp_path / "model"), tmp_path / "report.json"
    assert command("inspect", folder, "--json", report)[0] == 0
    assert "tokenizer obstacle" not in json.loads(report.read_text())
    (folder / "target.spm").write_bytes(b"")
    assert command("inspect", folder, "--json", report)[0] == 0
    obstacle = json.loads(report.read_text())["tokenizer obstacle"]
    assert obstacle.endswith("target.spm: is not a SentencePiece model: it is empty; download or copy it again")


# (directory, text, flags) -> what is printed about the text
SIGNS = {
    (
        "Marian, multilingual",
        "Hund\n\nHaus\n",
        (),
    ): "line 1 and 1 more: no target language; set it by --tgt-lang, as in "
    "--tgt-lang fra, or begin the source with it, as in >>fra<<; the model has >>fra<<, >>deu<<",
    ("Marian, multilingual", ">>fra<< Hund\n>>x<< Haus\n", ()): "line 2: the vocabulary has no >>x<<; the model has "
    ">>fra<<, >>deu<<",
    ("Marian, multilingual", "Hund\n", ("--tgt-lang", "fra")): "",
    ("Marian", ">>x<< Hund\n", ()): "line 1: the vocabulary has no >>x<<; the model has no languages",
    ("Marian", "Hund\n", ()): "",
    ("Marian", "日本\n", ()): "50% of the source tokens are unknown (<unk>); is the text in the language of the model?",
    ("mBART", "Hund\n", ()): ": a translation's first token selects the language, and the checkpoint sets none",
    ("mBART", "Hund\n", ("--tgt-lang", "de_DE")): "",
    ("T5", "Hund\n", ()): "config.json sets task prefixes ('translate:'), but no source starts with one; prepend the",
    ("T5", "Hund\ntranslate: Hund\n", ()): "",
}


@pytest.mark.parametrize(("name", "text", "flags"), SIGNS)
def test_what_a_text_lacks_is_said(name, text, flags, folders, tmp_path, command):
    folder = shutil.copytree(folders(name), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    tasks = {"a": {"prefix": "translate: "}, "b": {"num_beams": 2}} if name == "T5" else None
    (folder / "config.json").write_text(json.dumps({**settings, "task_specific_params": tasks}))
    (tmp_path / "text").write_text(text)
    options = ("--framework", "torch", "--max-length", "1", "--beam-size", "1")
    code, _, err = command("translate", folder, tmp_path / "text", *options, *flags)
    lines = [line for line in err.splitlines() if "generation_config.json" not in line]
    expected = SIGNS[name, text, flags]
    assert (code, len(lines)) == (0, int(bool(expected)))
    assert expected in err


LANGUAGES = {"mBART": ("de_DE", None), "NLLB": ("fra_Latn", "</s>")}


@pytest.mark.parametrize("name", LANGUAGES)
def test_ctranslate2_takes_the_language_as_target_prefix(name, folders, tmp_path):
    """As with its own converter, whose start token of an mBART is null and of an NLLB EOS."""
    language, start = LANGUAGES[name]
    path = tmp_path / "ct2"
    convert.save(convert.load(folders(name)), path, layout="ctranslate2")
    assert json.loads((path / "config.json").read_text())["decoder_start_token"] == start
    translator = twinax.load(path).with_languages(None, language)
    decoding = DecodingConfig(beam_size=1, max_length=12, **COMMON_RULES)
    source, target = (read_tokens(path, side) for side in ("source", "target"))
    sentences = [[source[i] for i in ids] for ids in translator.source_ids(TEXTS)]
    library, prefix = ctranslate2.Translator(str(path), compute_type="float32"), [[language]] * len(TEXTS)
    results = library.translate_batch(sentences, prefix, **translate_options(translator.config, decoding, target))
    for result, (hypothesis,) in zip(results, translator.hypotheses(TEXTS, decoding, "torch"), strict=True):
        ids = [target.index(token) for token in result.hypotheses[0]]
        assert tuple(ids[:-1] if ids[-1] == translator.config.eos_id else ids) == hypothesis.tokens


def test_the_comparison_sees_a_setting_that_is_not_applied(folders, tmp_path):
    """Each of three settings changes a translation, which is that of `transformers` where all are applied."""
    ignored = {"Marian": "num_beams", "BART": "no_repeat_ngram_size", "Blenderbot": "min_length"}
    for name, setting in ignored.items():
        folder = change_settings(folders(name), tmp_path / name, **{setting: None})
        texts = [twinax.load(path).translate(TEXTS, framework="torch") for path in (folder, folders(name))]
        assert texts[0] != texts[1], setting


def test_settings_are_printed_and_flags_override_them(folders, tmp_path, command):
    folder, text = folders("Marian"), tmp_path / "text"
    text.write_text(f"{GERMAN[0]}\n")
    options = ("--framework", "torch")
    code, out, err = command("translate", folder, text, *options)
    assert code == 0
    assert f"twinax: {folder}: num_beams=6, renormalize_logits=True, max_length=24, bad_words_ids=[[" in err
    assert out == f"{twinax.load(folder).translate([GERMAN[0]], framework='torch')[0]}\n"
    short = command("translate", folder, text, *options, "--max-length", "2", "--beam-size", "1")[1]
    assert short == f"{twinax.load(folder).translate([GERMAN[0]], framework='torch', max_length=2, beam_size=1)[0]}\n"
    unset = (*options, "--max-length", "2", "--ignore-generation-config")
    assert "num_beams" not in command("translate", folder, text, *unset)[2]


def test_a_directory_that_samples_does_unless_a_beam_is_asked_for(folders, tmp_path, command):
    folder = change_settings(folders("Marian"), tmp_path / "model", do_sample=True, num_beams=1, temperature=0.7)
    (tmp_path / "text").write_text(f"{GERMAN[0]}\n")
    words = ("translate", folder, tmp_path / "text", "--framework", "torch", "--max-length", "4")
    code, out, err = command(*words)
    assert code == 0
    assert "do_sample=True, temperature=0.7" in err
    assert "top_k=50" in err.partition("the defaults of transformers")[0]
    same = ("--ignore-generation-config", "--temperature", "0.7", "--top-k", "50")
    model = twinax.load(folder)
    assert model.decoding().sampling == SamplingConfig(temperature=0.7, top_k=50)
    assert model.decoding(sampling=SamplingConfig(seed=3)).sampling == SamplingConfig(seed=3)
    assert model.decoding(beam_size=2).sampling is None
    assert out == f"{model.translate([GERMAN[0]], framework='torch', max_length=4)[0]}\n"
    assert command(*words, "--beam-size", "1")[0] == command(*words, *same)[0] == 0


UNUSABLE = {
    "repetition_penalty=1.3": {"repetition_penalty": 1.3},
    "num_beams=4, num_beam_groups=3, diversity_penalty=1.0": {
        "num_beams": 4,
        "num_beam_groups": 3,
        "diversity_penalty": 1.0,
    },
    "num_beams=4 with do_sample=True": {"do_sample": True, "num_beams": 4},
    "epsilon_cutoff=0.1, temperature=0": {"do_sample": True, "num_beams": 1, "epsilon_cutoff": 0.1, "temperature": 0},
    "early_stopping='never'": {"early_stopping": "never"},
    "bad_words_ids=[[3], []]": {"bad_words_ids": [[3], []]},
    "eos_token_id=[0, 1] (the model's is 0)": {"eos_token_id": [0, 1]},
    "eos_token_id=1 (the model's is 0)": {"eos_token_id": 1},
    "bos_token_id=1 without decoder_start_token_id (the model's is N)": {
        "bos_token_id": 1,
        "decoder_start_token_id": None,
    },
    "max_length='24'": {"max_length": "24"},
    "num_beams='four'": {"num_beams": "four"},
    "length_penalty='1'": {"length_penalty": "1"},
}


@pytest.mark.parametrize("setting", UNUSABLE)
def test_a_setting_that_cannot_be_applied_is_named(setting, folders, tmp_path, command):
    folder = change_settings(folders("Marian"), tmp_path / "model", **UNUSABLE[setting])
    (tmp_path / "text").write_text("a\n")
    arguments = ("translate", folder, tmp_path / "text", "--framework", "torch")
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    start = twinax.load(folder).config.decoder_start_id
    setting = setting.replace("is N)", f"is {start})")
    assert err == (
        f"twinax: {folder}: generation_config.json sets {setting}, which twinax cannot apply; change the file, or pass "
        "--ignore-generation-config\n"
    )
    assert command(*arguments, "--ignore-generation-config", "--beam-size", "1", "--max-length", "2")[0] == 0


def test_a_language_is_a_code(folders, tmp_path, command):
    """NLLB: the source's and the target's; Marian: the target's, before the source."""
    (tmp_path / "text").write_text("Hund\n")
    options = ("--framework", "torch", "--beam-size", "1")
    nllb = twinax.load(folders("NLLB"))
    changed = nllb.with_languages("deu_Latn", "fra_Latn")
    ids = [nllb.tokenizers.src.id_of(token) for token in ("deu_Latn", "fra_Latn")]
    assert (changed.source_ids(["Hund"])[0][0], changed.config.forced_bos_id) == tuple(ids)
    assert changed.target_ids(["Hund"])[0][0] == ids[1]
    expected = changed.translate(["Hund"], framework="torch", beam_size=1)[0]
    arguments = ("translate", folders("NLLB"), tmp_path / "text", *options)
    assert command(*arguments, "--src-lang", "deu_Latn", "--tgt-lang", "fra_Latn")[:2] == (0, f"{expected}\n")
    marian = twinax.load(folders("Marian, multilingual"))
    assert marian.with_languages(target="fra").source_ids(["Hund"]) == marian.source_ids([">>fra<< Hund"])
    code, _, err = command(*arguments, "--tgt-lang", "fra")
    assert (code, err.splitlines()[-1]) == (
        2,
        "twinax: tgt_lang='fra': the tokenizer has no such language; did you mean 'fra_Latn'?",
    )
    code, _, err = command("translate", folders("T5"), tmp_path / "text", "--tgt-lang", "fr")
    assert (code, err) == (2, "twinax: tgt_lang='fr': the tokenizer is not multilingual; omit it\n")


def test_a_forced_first_token_is_in_the_target_and_not_in_its_score(folders):
    """As in `generate`, whose scores leave forced tokens out."""
    translator = twinax.load(folders("NLLB")).with_languages("deu_Latn", "fra_Latn")
    (src,), (tgt,) = translator.source_ids([GERMAN[0]]), translator.target_ids([ENGLISH[0]])
    assert tgt[0] == translator.tokenizers.tgt.id_of("fra_Latn")
    tokens = torch_reference.score(translator.torch, torch.tensor([src]), torch.tensor([tgt])).tokens
    (score,) = translator.score([GERMAN[0]], [ENGLISH[0]], "torch")
    assert score == pytest.approx(float(tokens[0, 1:].sum()), rel=1e-5)
    assert score != pytest.approx(float(tokens[0].sum()), rel=1e-3)


def test_fine_tuning_goes_back_into_a_directory(folders, tmp_path, command):
    """With the tokenizer's files and the generation settings of the first directory."""
    folder = folders("NLLB")
    for side, texts in (("src", GERMAN), ("tgt", (ENGLISH * 2)[: len(GERMAN)])):
        (tmp_path / side).write_text("\n".join(texts) + "\n")
    flags = ["--tokenizer.src-lang", "deu_Latn", "--tokenizer.tgt-lang", "fra_Latn"]
    corpus = ("--src", tmp_path / "src", "--tgt", tmp_path / "tgt", "--corpus.held-out", "2")
    small = (
        "--loop.updates",
        "1",
        "--batches.shapes",
        "1",
        "--training.warmup-updates",
        "1",
        "--loop.validate-every",
        "9",
    )
    code, _, err = command("train", "--init-from", folder, "--out", tmp_path / "run", *corpus, *small, *flags)
    assert code == 0, err
    assert command("convert", tmp_path / "run", tmp_path / "back", "--layout", "m2m100")[0] == 0
    first, run, back = (twinax.load(path) for path in (folder, tmp_path / "run", tmp_path / "back"))
    assert run.source_ids(GERMAN) == back.source_ids(GERMAN)
    assert back.generation == first.generation
    assert run.config.forced_bos_id == back.tokenizers.tgt.id_of("fra_Latn")
    for file in folder.glob("*.model"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    reference = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert [reference(text)["input_ids"] for text in GERMAN] == back.source_ids(GERMAN)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back")
    output = model.generate(**reference(GERMAN[0], return_tensors="pt"))
    assert reference.decode(output[0], skip_special_tokens=True) == back.translate([GERMAN[0]], framework="torch")[0]


def test_fine_tuning_needs_a_language(folders, tmp_path, command):
    (tmp_path / "text").write_text("\n".join(GERMAN) + "\n")
    corpus = ("--src", tmp_path / "text", "--tgt", tmp_path / "text", "--corpus.held-out", "2")
    code, _, err = command("train", "--init-from", folders("NLLB"), "--out", tmp_path / "run", *corpus)
    assert code == 2
    assert err.endswith("twinax: tgt_lang=None: the model is multilingual; set --tokenizer.tgt-lang, as in ace_Latn\n")
