"""The demo: its language, and a short run of it."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from twinax.cli.demo.demo_language import contracted, definite, held_out_pairs, indefinite, make_corpus, sentences

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "python.md", ROOT / "docs" / "toolkits.md"]


@pytest.mark.parametrize(
    ("word", "form", "the", "a", "of_the"),
    [  # from Italian grammar
        ("gatto", 0, "il gatto", "un gatto", "del gatto"),
        ("studente", 0, "lo studente", "uno studente", "dello studente"),
        ("zio", 0, "lo zio", "uno zio", "dello zio"),
        ("amico", 0, "l'amico", "un amico", "dell'amico"),
        ("casa", 1, "la casa", "una casa", "della casa"),
        ("isola", 1, "l'isola", "un'isola", "dell'isola"),
        ("sedia", 1, "la sedia", "una sedia", "della sedia"),
        ("gatti", 2, "i gatti", "dei gatti", "dei gatti"),
        ("zaini", 2, "gli zaini", "degli zaini", "degli zaini"),
        ("uomini", 2, "gli uomini", "degli uomini", "degli uomini"),
        ("uova", 3, "le uova", "delle uova", "delle uova"),
    ],
)
def test_articles(word, form, the, a, of_the):
    article = definite(word, form)
    assert (article + word, indefinite(word, form) + word, contracted("de", article) + word) == (the, a, of_the)


@pytest.mark.parametrize(
    ("stem", "article", "expected"),
    [
        ("ne", "il ", "nel "),
        ("ne", "l'", "nell'"),
        ("su", "gli ", "sugli "),
        ("a", "i ", "ai "),
        ("da", "la ", "dalla "),
    ],
)
def test_prepositions_melt(stem, article, expected):
    assert contracted(stem, article) == expected


def test_sentences_of_the_language():
    translations = {pair.english: pair.italian for pair in islice(sentences(0), 60_000)}
    expected = {  # checked by hand
        "we lose our friend.": "perdiamo il nostro amico.",
        "do you want our house?": "vuoi la nostra casa?",
        "the oranges are Italian.": "le arance sono italiane.",
        "where is the window?": "dov'è la finestra?",
        "they do not see the man.": "non vedono l'uomo.",
        "the old mirrors were clean.": "i vecchi specchi erano puliti.",
    }
    assert {english: translations.get(english) for english in expected} == expected


def test_the_same_english_is_the_same_italian():
    translations = {}
    for pair in islice(sentences(3), 30_000):
        assert translations.setdefault(pair.english, pair.italian) == pair.italian


def test_the_corpus_keeps_what_it_promises():
    corpus, out = make_corpus(4000, 300), held_out_pairs()
    assert corpus == make_corpus(4000, 300)
    assert corpus.train != make_corpus(4000, 300, seed=1).train
    assert (len(corpus.train), len(corpus.unseen_sentences), len(corpus.unseen_pairs)) == (4000, 300, 300)
    english_sentences = [pair.english for part in corpus for pair in part]
    assert len(set(english_sentences)) == len(english_sentences)
    assert all(not pair.word_pairs & out for pair in (*corpus.train, *corpus.unseen_sentences))
    assert all(pair.word_pairs & out for pair in corpus.unseen_pairs)
    words = [{word for pair in corpus.train for word in re.findall(r"[\w']+", pair[side])} for side in (0, 1)]
    assert len(words[0]) > 150
    assert len(words[1]) > 250
    # every word is known; only its combinations are new
    vocabulary = words[0]
    assert all(set(re.findall(r"[\w']+", pair.english)) <= vocabulary for pair in corpus.unseen_pairs)


def test_a_short_demo(command, forks, monkeypatch, tmp_path):
    from twinax.parity import ladder

    monkeypatch.setattr(ladder, "POOLED", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("demo", "--updates", "80", "--test", "20")
    rows = {row[0].strip(): row[1].strip() for line in out.splitlines() if len(row := line.strip("│").split("│")) == 2}
    assert code == 0, out
    assert re.fullmatch(r"0 of [\d,]+ translated tokens differ", rows["Flax and PyTorch"])
    assert rows["proof (table above)"] == "equal on every rung"
    (*_, validation) = map(json.loads, Path("runs/demo/run/metrics.jsonl").read_text().splitlines())
    assert validation["validation"]["loss"] < 3.4  # 3.0 after so few updates; ln(600) = 6.4 without learning
    assert "BLEU" in rows["new sentences"]
    assert {p.name for p in Path("runs/demo").iterdir()} == {"attention.png", "corpus", "model.pt", "run"}
    code, out, _ = command("translate", "runs/demo/model.pt", "runs/demo/corpus/valid.en", "--beam-size", "1")
    assert (code, len(out.splitlines())) == (0, 20)
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
        (block,) = (b for b in blocks if "runs/demo" in b)
        result = forks(block, cwd=tmp_path)
        assert (result.stdout.splitlines(), result.returncode) == (re.findall(r"# -> (.*)", block), 0), result.stderr


def test_the_demo_refuses_nothing_to_do(command):
    assert command("demo", "--test", "0") == (2, "", "twinax: --updates 1000 --test 0: must be at least 2 and 1\n")
