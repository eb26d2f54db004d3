"""Several corpora, their store and their cleaning, as a user calls the commands."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from twinax.train.data.dataset import Batches
from twinax.train.tracking.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_programs", "folder")
RUN = (
    *("--tokenizer.kind", "word", "--tokenizer.vocab-size", "100", "--batches.tokens", "60", "--batches.shapes", "1"),
    *("--model.d-model", "8", "--model.num-heads", "2", "--model.d-ff", "16", "--model.max-length", "12"),
    *("--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1"),
    *("--loop.updates", "8", "--loop.translations", "1"),
)
CLEANING = ("--cleaning.duplicates", "--cleaning.identical", "--cleaning.max-ratio", "3")
SCRIPTS = ("--cleaning.src-script", "Latin")
NEWS = '[[corpora]]\nname = "news"\nsrc = "news.de"\ntgt = "news.en"\nheld_out = 4\n'
BACK = '[[corpora]]\nname = "back"\nsrc = "back.de"\ntgt = "back.en"\nvalid_src = "dev.de"\nvalid_tgt = "dev.en"\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with two corpora; one has two pairs that each way of cleaning drops."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("abcdefg"), rng.integers(2, 6))) + f" w{i % 30}" for i in range(90)]
    dirty = [("a b", "A B")] * 3 + [
        ("x", "x"),
        ("y z", "y z"),
        ("a", "A B C D"),
        ("A B C D", "a"),
        ("дом", "D"),
        ("б", "E"),
    ]
    pairs = {"news": [(t, t.upper()) for t in texts[:40]], "dev": [(t, t.upper()) for t in texts[40:46]]}
    pairs["back"] = [(t, t.upper()) for t in texts[46:]] + dirty
    for name, own in pairs.items():
        for side, language in enumerate(("de", "en")):
            Path(f"{name}.{language}").write_text("".join(pair[side] + "\n" for pair in own))
    Path("mixture.toml").write_text(f'{NEWS}copies = 2\n\n{BACK}copies = 0.5\ntag = "<bt>"\n')
    return tmp_path


def checksums(run):
    return {r["update"]: (r["checksum"], r["loss"]) for r in read_metrics(Path(run)) if "checksum" in r}


def validation(run):
    *_, record = (r["validation"] for r in read_metrics(Path(run)) if "validation" in r)
    return record


def test_a_mixture_and_its_store_give_one_run(command, monkeypatch):
    """Cleaned; interrupted, and resumed from the texts; a change of the copies does not change the store."""
    mixture, store = ("--corpus.mixture", "mixture.toml"), ("--corpus.store", "store")
    status, out, err = command("data", *mixture, *RUN, *CLEANING, *SCRIPTS, "--store", "store")
    assert status == 0, err
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[:1] == "│"]
    table = {row[0]: row[1:] for row in cells}
    expected = {"pairs read": ["89", "10"], "kept": ["81", "10"]}
    expected |= {
        f"dropped: {reason}": ["2", "0"]
        for reason in ("duplicates", "with equal sides", "of unequal lengths", "in another script")
    }
    assert {name: table[name] for name in expected} == expected
    assert "back: 45 pairs, 0.5 times per epoch, with <bt>" in err
    assert command("train", *mixture, *RUN, *CLEANING, *SCRIPTS, "--out", "whole")[0] == 0
    text = Path("mixture.toml").read_text()
    Path("mixture.toml").write_text(text.replace("copies = 2", "copies = 3"))
    read = Batches.__getitem__

    def interrupted(batches, index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(batches, index)

    with monkeypatch.context() as context:
        context.setattr(Batches, "__getitem__", interrupted)
        status, _, err = command("train", *store, *RUN, "--out", "parts")
    assert (status, "resume" in err or "continue" in err) == (128 + signal.SIGTERM, True)
    assert 0 < len(checksums("parts")) < 8
    saved = json.loads(Path("parts/config.json").read_text())
    assert (saved["corpus"]["store"], command("data", "parts")[0]) == ("store", 0)
    status, _, err = command("train", "parts", *mixture)
    assert status == 2
    assert "parts: was started with another corpus: the training pairs have changed" in err.splitlines()[-1]
    Path("mixture.toml").write_text(text)
    assert command("train", "parts", *mixture)[0] == 0
    assert checksums("parts") == checksums("whole")
    assert {"news/loss", "news/bleu", "back/loss", "back/bleu", "loss", "bleu"} <= validation("whole").keys()
    assert validation("parts") == validation("whole")


WRONG = {
    "no file": (None, "mixture.toml: cannot be read: No such file or directory"),
    "a missing text": (NEWS.replace("news.de", "nowhere"), "nowhere: there is no such file"),
    "an unknown key": (f"{NEWS}weight = 2\n", "mixture.toml: unknown fields weight; a corpus has copies, dataset"),
    "unequal lines": (NEWS.replace("news.en", "dev.en"), "news.de has 40 lines and dev.en has 6: they must have"),
    "an empty text": (NEWS + BACK.replace("back.", "empty."), "empty.de: has no sentence pair"),
    "a store": (
        '[[corpora]]\nname = "x"\nstore = "store"\n',
        "mixture.toml: store='store': a corpus of a mixture must",
    ),
    "a name twice": (f"{NEWS}\n{NEWS}", "mixture.toml: corpora: there must be one, and their names must differ: news"),
    "negative copies": (f"{NEWS}copies = -1\n", "mixture.toml: copies=-1.0: must be a number above 0"),
    "too few copies": (f"{NEWS}copies = 0.001\n", "copies: some epochs have no pair"),
    "a language for some": (
        f'{NEWS}src_lang = "de"\n{BACK}',
        "src_lang: some corpora of mixture.toml set it; set it for back",
    ),
    "no language": (f'{NEWS}src_lang = "de"\n', "src_lang='de': the tokenizer is not multilingual; omit it"),
    "no valid pair": (
        NEWS + BACK.replace("dev.", "blank."),
        "back, validation: all 1 pairs are dropped: 1 have an empty",
    ),
    "all held out": (NEWS.replace("= 4", "= 40"), "of which 40 are held out for validation; no training pair remains"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_mixture_is_one_line(text, message, command, folder):
    Path("mixture.toml").unlink()
    if text is not None:
        Path("mixture.toml").write_text(text)
    for language in ("de", "en"):
        Path(f"empty.{language}").write_text("")
        Path(f"blank.{language}").write_text(" \n")
    before = {path for path in folder.iterdir() if path.name != "cache"}
    for name, *flags in (("train", "--out", "run"), ("data", "--store", "new")):
        status, out, err = command(name, "--corpus.mixture", "mixture.toml", *RUN, *flags)
        *_, line = err.splitlines()
        assert (status, out) == (2, "")
        assert line.startswith("twinax: ")
        assert message in line
        assert "Traceback" not in err
        new = {path for path in folder.iterdir() if path.name != "cache"} - before
        assert not [path for path in new if path.name != "new" or (path / "store.json").exists()]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cleaning.max-ratio", "0.5"), "max_ratio=0.5: must be at least 1"),
        (("--cleaning.src-script", "German"), "src_script='German': is no script of Unicode"),
        (("--src", "news.de", "--tgt", "news.en"), "mixture='mixture.toml' has all pairs; omit one of them"),
    ],
)
def test_wrong_flags_are_named(flags, message, command):
    status, out, err = command("data", "--corpus.mixture", "mixture.toml", *RUN, *flags)
    assert (status, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
