"""The recipes of the published systems: scaled-down training from a corpus in the hub's layout, and decoding."""

import functools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twinax import TransformerConfig, torch_reference
from twinax.configs import ConfigError
from twinax.configs.decoding import DecodingConfig
from twinax.formulas.decoding import plan
from twinax.parity.oracles.published import checkpoint_of, random_model
from twinax.presets.runs import RUNS, run_preset
from twinax.published.leftover.module import greedy_decode
from twinax.published.registry import SYSTEMS, as_decoded, recipe
from twinax.train.step import step_programs

VARIANTS = [name for name in RUNS if name.startswith("published/")]
WORDS = {"der": "the", "Hund": "dog", "Haus": "house", "sieht": "sees", "ein": "a", "z.B.": "e.g.", "kleiner": "small"}
SMALL = (
    *("--model.d-model", "16", "--model.d-ff", "12", "--model.num-heads", "2", "--batches.tokens", "240"),
    *("--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1", "--batches.shapes", "1"),
    *("--loop.updates", "12", "--loop.validate-every", "12", "--training.warmup-updates", "1"),
    *("--loop.translations", "0"),  # `translate` follows
)
GREEDY = ("--beam-size", "1", "--max-length", "6", "--framework", "torch")  # which compiles nothing


def rows(number, seed):
    """Random word-for-word pairs, with a full stop attached to the last word."""
    rng = random.Random(seed)
    sentences = [rng.choices(list(WORDS), k=rng.randint(2, 6)) for _ in range(number)]
    return [(" ".join(words) + ".", " ".join(WORDS[word] for word in words) + ".") for words in sentences]


@pytest.fixture(scope="module", autouse=True)
def one_step_per_config():
    """Trace a recipe's train step once for all tests of this file."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(step_programs, "make_train_step", functools.cache(step_programs.make_train_step))
        yield


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Both corpora in the hub's directory layout, under the names that the recipes use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    multi30k, books = Path("bentrevett/multi30k"), Path("Helsinki-NLP/opus_books")
    for folder in (multi30k, books / "en-it"):
        folder.mkdir(parents=True)
    for part, number in (("train", 80), ("val", 12), ("test", 12)):
        lines = [json.dumps({"en": en, "de": de}) for de, en in rows(number, part)]
        (multi30k / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"id": str(i), "translation": {"en": a, "it": b}}) for i, (a, b) in enumerate(rows(80, "it"))]
    (books / "en-it" / "train.jsonl").write_text("\n".join(lines) + "\n")
    (books / "README.md").write_text(
        "---\nconfigs:\n- config_name: en-it\n  data_files:\n  - split: train\n    path: en-it/train.jsonl\n---\n"
    )
    Path("input").write_text("der Hund sieht ein Haus.\n\nz.B. ein Haus.\n")


def shrunk(name):
    """Flags for a small training; jadore801120 sets its head width separately."""
    heads = ("--model.head-dim", "8", "--model.v-head-dim", "8") if "jadore" in name else ()
    return (name, *SMALL, *heads, "--out", "run")


EVERYDAY = ("annotated_transformer", "leftover")  # spaCy, and a model that cannot translate


@pytest.mark.parametrize(
    "system", [pytest.param(name, marks=[pytest.mark.slow] * (name not in EVERYDAY)) for name in SYSTEMS]
)
def test_from_text_to_text(system, hub, command):
    code, _, err = command("train", *shrunk(f"published/{system}"))
    assert code == 0, err
    assert ("80 of 80 pairs" if system != "leftover" else "train: 80 of 80") in err
    config = json.loads(Path("run/config.json").read_text())
    assert config["tokenizer"]["special_order"] == list(run_preset(f"published/{system}").tokenizer.special_order)
    languages = [
        json.loads(p.read_text()).get("spacy_language") for p in sorted(Path("run").glob("*/tokenizer_config.json"))
    ]
    assert languages == (["de", "en"] if config["tokenizer"]["languages"] else [None, None])
    code, out, err = command("translate", "run", "input", *GREEDY)
    if system == "leftover":
        assert code == 2
        assert "cross_mask='encoder': needs as many target as source tokens" in err
        corpus = ("--src", "input", "--tgt", "input", "--out", "tuned")
        code, _, err = command("train", "--init-from", "run", *corpus, "--corpus.held-out", "1")
        assert (code, "translations=200: a model with cross_mask='encoder' cannot translate" in err) == (2, True)
        code, out, _ = command("train", "--init-from", "run", *corpus, "--loop.translations", "0", "--print-config")
        assert (code, json.loads(out)["model"]["cross_mask"]) == (0, "encoder")
    else:
        assert (code, len(out.splitlines())) == (0, 3)


def test_repaired_from_text_to_text(hub, command):
    """The repaired leftover, because the published one cannot translate; it trains on 90% of the pairs."""
    code, _, err = command("train", *shrunk("published/leftover:repaired"))
    assert code == 0, err
    assert "train: 72 of 72 pairs" in err
    assert "valid: 8 of 8 pairs" in err
    code, out, _ = command("translate", "run", "input", *GREEDY)
    assert (code, len(out.splitlines())) == (0, 3)


def test_scan(hub, command):
    lines = [f"IN: {en.removesuffix('.')} OUT: {de.removesuffix('.').upper()}" for de, en in rows(80, 1)]
    Path("tasks_train_simple.txt").write_text("\n".join(lines) + "\n")
    code, _, err = command("train", *shrunk("scan"))
    assert code == 0, err
    assert "train: 76 of 76 pairs" in err
    flags = ("--dataset", "tasks_train_simple.txt", "--beam-size", "1", "--max-length", "6")
    code, out, _ = command("evaluate", "run", *flags)
    assert (code, "exact match" in out) == (0, True)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_recipe_is_its_system(name):
    system, as_published = name.removeprefix("published/").removesuffix(":repaired"), not name.endswith(":repaired")
    run = run_preset(name)
    fields = {"max_length": run.model.max_length}
    assert run.model == type(run.model).published(system, as_published=as_published, **fields)
    special = {role: run.tokenizer.special_order.index(role) for role in ("pad", "bos", "eos")}
    assert special == {role: getattr(run.model, f"{role}_id") for role in special}


# From the write-ups: epochs, warm-up, tokens per batch, parts, minimum frequency, lower case, longest sides.
NUMBERS = {
    "lucky_glass": (10, 0, 2048, 1, 1, False, (None, None)),
    "jadore801120": (400, 128_000, 4096, 1, 3, True, (102, 101)),
    "leftover": (100, 0, 1024, 1, 2, False, (None, None)),
    "d2l_note": (30, 0, 2048, 1, 2, True, (None, None)),
    "annotated_transformer": (8, 3000, 5120, 10, 2, False, (72, 72)),
}


@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("system", NUMBERS)
def test_the_numbers_of_a_recipe(system, as_published):
    run = recipe(system, as_published=as_published)
    actual = (
        *(run.loop.epochs, run.training.warmup_updates, run.batches.tokens, run.training.accumulation),
        *(run.tokenizer.min_frequency, run.tokenizer.lowercase),
        (run.batches.max_src_length, run.batches.max_tgt_length),
    )
    assert actual == NUMBERS[system]
    if system == "leftover":
        assert run.model.max_length == 350  # 348 and two, 349 and one
        assert (run.corpus.split, run.corpus.valid_split) == ("train" if as_published else "train[:90%]", "train[90%:]")


def test_an_epoch_is_a_step_of_the_rate(hub, command):
    command("train", *shrunk("published/lucky_glass"))
    training = json.loads(Path("run/config.json").read_text())["training"]
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    rates = {r["epoch"]: r["learning_rate"] for r in records if "learning_rate" in r and r["update"] > 1}
    assert len(rates) > 1
    assert training["step_updates"] == sum(r.get("epoch") == 0 for r in records if "loss" in r)
    assert rates[1] == pytest.approx(rates[0] / 10, rel=1e-5)


def test_without_spacy(hub, command, monkeypatch):
    """Without spaCy, a warning names the fallback; models trained with spaCy's tokens are refused."""
    code, _, err = command("train", *shrunk("published/lucky_glass"))
    assert (code, "spaCy is not installed" in err) == (0, False)
    monkeypatch.setattr("twinax.train.text.spacy_pretokenizer.has_spacy", lambda: False)
    monkeypatch.setattr("twinax.cli.flags.run_arguments.has_spacy", lambda: False)
    from twinax.train.text import spacy_pretokenizer as words

    words._tokenizer.cache_clear()
    code, out, err = command("train", "published/lucky_glass", "--print-config")
    assert code == 0
    assert "spaCy is not installed: pre-tokenizing at whitespace and punctuation" in err
    tokenizer = json.loads(out)["tokenizer"]
    assert (tokenizer["languages"], tokenizer["split"]) == ([], "punctuation")
    code, _, err = command("train", *shrunk("published/lucky_glass")[:-1], "new", "--tokenizer.languages", "de", "fr")
    assert (code, "needs spaCy, which is not installed" in err) == (2, True)
    _, _, err = command("train", "published/lucky_glass", "--tokenizer.languages", "--print-config")
    assert "spaCy" not in err
    code, _, err = command("translate", "run", "input")
    assert code == 2
    assert "needs spaCy, which is not installed: pip install 'twinax[spacy]'" in err


def test_there_is_no_such_recipe():
    with pytest.raises(ConfigError, match="published='lucky': there is no such system; choose one of annotated"):
        recipe("lucky", as_published=True)
    with pytest.raises(ConfigError, match="published/lucky: there is no such run; choose one of multi30k_de_en"):
        run_preset("published/lucky")


def test_leftover_counts_the_start_token():
    """Its limit of 350 tokens includes the start: a sentence that never ends has 349."""
    config = TransformerConfig.published("leftover", as_published=False)
    assert as_decoded("leftover", config, as_published=False)[1].max_length == 349
    model = random_model("leftover", as_published=False, length=14).eval()
    with torch.no_grad():
        model.get_parameter("projection.proj.bias")[3] -= 100  # the end
    checkpoint = checkpoint_of("leftover", model, as_published=False, length=14)
    config, decoding = as_decoded("leftover", checkpoint.config, as_published=False)
    src = torch.tensor([[5, 6, 7]])
    expected = greedy_decode(model, src, 1, 2, 3, 14)[1:]
    output = torch_reference.generate(replace(checkpoint, config=config).to_torch().eval(), src, decoding)
    assert output.sentences()[0][0] == expected
    assert len(expected) == 13


def test_systems_without_a_search():
    config = TransformerConfig.published("lucky_glass", as_published=False)
    with pytest.raises(ConfigError, match="'lucky_glass': has no published decoding; choose one of annotated"):
        as_decoded("lucky_glass", config, as_published=False)
    leftovers = TransformerConfig.published("leftover", as_published=True)
    with pytest.raises(ConfigError, match=r"cross_mask='encoder': needs as many target as source tokens"):
        plan(*as_decoded("leftover", leftovers, as_published=True))
    with pytest.raises(ConfigError, match=r"allow_padding=True: decoder_mask='causal_padding_and_query' masks"):
        plan(leftovers.replace(cross_mask="source"), DecodingConfig(allow_padding=True))
