"""Sentence pairs from every file format, and error messages for bad files."""

import csv
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax.backend.errors import DataError
from twinax.configs import ConfigError
from twinax.configs.data import CorpusConfig
from twinax.train.text.corpus import read_pairs

PAIRS = [("ein Haus", "a house"), ("", "nothing"), ("zwei\u2028Häuser \x0b", "two houses"), ('"so', "so")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def text(side):
    return "".join(pair[side] + "\n" for pair in PAIRS).encode()


def test_tmx_by_the_reader_of_the_page(folder):
    """Markup, line breaks within a segment, other languages, and a unit without the source language."""
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    (block,) = re.findall(r"```python\n((?:(?!```).)*def to_tsv.*?)```", page, flags=re.DOTALL)
    exec(block, reader := {})
    unit = '<tuv xml:lang="de"><seg>{}</seg></tuv><tuv xml:lang="en"><prop>x</prop><seg>{}</seg></tuv>'
    units = [unit.format("ein <bpt>Haus</bpt>\n &amp; Hof", "a house"), unit.format("zwei", "two"), ""]
    units[2] = '<tuv xml:lang="fr"><seg>trois</seg></tuv><tuv xml:lang="en"><seg>three</seg></tuv>'
    text = "".join(f"<tu>{unit}</tu>" for unit in units)
    with gzip.open("a.tmx.gz", "wt") as file:
        file.write(f'<?xml version="1.0"?><tmx version="1.4"><header/><body>{text}</body></tmx>')
    reader["to_tsv"]("a.tmx.gz", "a.tsv", "de", "en")
    expected = [("ein Haus & Hof", "a house"), ("zwei", "two"), ("", "three")]
    assert list(read_pairs(CorpusConfig(dataset="a.tsv"))) == expected


def test_parallel_text(folder):
    (folder / "a.de").write_bytes(text(0))
    (folder / "a.en").write_bytes(text(1).removesuffix(b"\n"))
    assert list(read_pairs(CorpusConfig(src="a.de", tgt="a.en"))) == PAIRS
    (folder / "a.de.gz").write_bytes(gzip.compress(text(0)))
    assert list(read_pairs(CorpusConfig(src="a.de.gz", tgt="a.en"))) == PAIRS
    (folder / "dos.de").write_bytes(b"\xef\xbb\xbf" + text(0).replace(b"\n", b"\r\n"))
    assert list(read_pairs(CorpusConfig(src="dos.de", tgt="a.en"))) == PAIRS


def test_tab_separated(folder):
    lines = [f"{src}\t{tgt}" for src, tgt in PAIRS]
    (folder / "a.tsv").write_text("\n".join(lines), encoding="utf-8")
    assert list(read_pairs(CorpusConfig(dataset="a.tsv"))) == PAIRS
    lines = ["en\tid\tde", *(f"{tgt}\t7\t{src}" for src, tgt in PAIRS)]
    (folder / "b.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    config = CorpusConfig(dataset="b.tsv.gz", src_column="de", tgt_column="en")
    assert list(read_pairs(config)) == PAIRS


CSV = CorpusConfig(dataset="a.csv", src_column="de", tgt_column="en")
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"))
FIELD = TEXT | st.sampled_from(["null", "NA", "3"])


@given(st.lists(st.tuples(FIELD, FIELD), min_size=1))
def test_csv_is_read_as_the_writer_of_python_meant_it(tmp_path_factory, pairs):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("en", "id", "de"), *((tgt, 7, src) for src, tgt in pairs)])
    assert list(read_pairs(replace(CSV, dataset=str(path)))) == pairs


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,b,c\n", "a.csv, line 2: must have 2 columns like the header, not 3; quote fields that contain commas"),
        ('a,b\n"c,d\ne,f\n', "a.csv, line 4: is not CSV: unexpected end of data"),
        ("", "a.csv: has no sentence pair"),
    ],
)
def test_bad_csv(folder, rows, message):
    (folder / "a.csv").write_text(f"de,en\n{rows}")
    with pytest.raises(DataError, match=f"^{message}$"):
        list(read_pairs(CSV))


def test_scan(folder):
    (folder / "tasks.txt").write_text("IN: jump twice OUT: I_JUMP I_JUMP\nIN: walk OUT: I_WALK\n")
    assert list(read_pairs(CorpusConfig(dataset="tasks.txt"))) == [("jump twice", "I_JUMP I_JUMP"), ("walk", "I_WALK")]


@pytest.mark.parametrize("layout", ["plain", "translation"])
@pytest.mark.parametrize("kind", ["json", "parquet", "directory"])
def test_what_datasets_reads(folder, kind, layout):
    """Columns of text as Multi30k has them, and a column `translation` as opus_books and WMT have it."""
    import datasets

    rows = [{"de": src, "en": tgt} for src, tgt in PAIRS]
    rows = rows if layout == "plain" else [{"id": str(i), "translation": row} for i, row in enumerate(rows)]
    name = {"json": "a.jsonl", "parquet": "a.parquet", "directory": "hub/multi30k"}[kind]
    if kind == "json":
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(name)
    else:
        (folder / name / "data").mkdir(parents=True)
        for split, split_rows in (("train", rows), ("validation", rows[:1])):
            datasets.Dataset.from_list(split_rows).to_parquet(f"{name}/data/{split}-00000-of-00001.parquet")
    columns = {"src_column": "de", "tgt_column": "en"}
    assert list(read_pairs(CorpusConfig(dataset=name, **columns))) == PAIRS
    if kind == "directory":
        assert list(read_pairs(CorpusConfig(dataset=name, split="validation", **columns))) == PAIRS[:1]
    with pytest.raises(DataError, match=rf"^{name}(, line 1)?: has no column 'fr'; it has {'de, en'}$"):
        list(read_pairs(CorpusConfig(dataset=name, src_column="de", tgt_column="fr")))
    with pytest.raises(DataError, match=f"^{name}: set src_column and tgt_column"):
        list(read_pairs(CorpusConfig(dataset=name)))


@pytest.mark.parametrize("layout", ["plain", "translation"])
def test_what_save_to_disk_wrote(folder, layout):
    """One dataset, in two files, as well as several by split; a later cache of the library is not data."""
    import datasets

    datasets.disable_progress_bars()
    rows = [{"de": src, "en": tgt} for src, tgt in PAIRS]
    data = datasets.Dataset.from_list(rows if layout == "plain" else [{"translation": row} for row in rows])
    data.save_to_disk("one", num_shards=2)
    (folder / "one" / "cache-1.arrow").write_bytes(b"x")
    data.select(range(1, len(PAIRS))).save_to_disk("rest")
    splits = datasets.DatasetDict({"train": data, "validation": data.select([0])})
    splits.save_to_disk("several")
    splits["validation"].save_to_disk("valid")
    columns = {"src_column": "de", "tgt_column": "en"}
    expected = {("one", "train"): PAIRS, ("rest", "train"): PAIRS[1:], ("one", "train[:1]"): PAIRS[:1]}
    expected |= {("several", "train"): PAIRS, ("several", "validation"): PAIRS[:1], ("valid", "train"): PAIRS[:1]}
    for (name, split), pairs in expected.items():
        assert list(read_pairs(CorpusConfig(dataset=name, split=split, **columns))) == pairs
    with pytest.raises(DataError, match='one: datasets cannot load it: Unknown split "validation"'):
        list(read_pairs(CorpusConfig(dataset="one", split="validation", **columns)))
    (folder / "one" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="one: datasets cannot load it: "):
        list(read_pairs(CorpusConfig(dataset="one", **columns)))


def test_a_missing_text_is_empty_and_a_number_is_refused(folder):
    (folder / "a.jsonl").write_text('{"de": null, "en": "x"}\n{"de": "y", "en": "z"}\n')
    config = CorpusConfig(dataset="a.jsonl", src_column="de", tgt_column="en")
    assert list(read_pairs(config)) == [("", "x"), ("y", "z")]
    (folder / "b.jsonl").write_text('{"de": 3, "en": "x"}\n')
    with pytest.raises(DataError, match=r"^b\.jsonl, line 1: column de has int 3, not text$"):
        list(read_pairs(CorpusConfig(dataset="b.jsonl", src_column="de", tgt_column="en")))


GOOD = b"eins\nzwei\ndrei\n"
BAD_FILES = {
    "good has 3 lines and bad has 2: they must have the same number": b"one\ntwo\n",
    "good has 3 lines and bad has 5: they must have the same number": b"1\n2\n3\n4\n5",
    r"bad, line 2: is not UTF-8 \(byte 0xe4 at 3\); save it as UTF-8": b"one\ntw\xe4\nthree\n",
    "bad: is UTF-16; save it as UTF-8": "one\ntwo\nthree\n".encode("utf-16"),
}


@pytest.mark.parametrize("line", BAD_FILES)
def test_bad_text(folder, line):
    (folder / "good").write_bytes(GOOD)
    (folder / "bad").write_bytes(BAD_FILES[line])
    with pytest.raises(DataError, match=f"^{line}$"):
        list(read_pairs(CorpusConfig(src="good", tgt="bad")))


def test_damaged_missing_and_empty_files(folder):
    (folder / "good").write_bytes(GOOD)
    (folder / "cut.gz").write_bytes(gzip.compress(GOOD * 1000)[:-20])
    (folder / "not.gz").write_bytes(GOOD)
    (folder / "empty").write_bytes(b"")
    (folder / "odd.tsv").write_text("a\tb\nc\n")
    (folder / "plain.txt").write_text("a line of text\n")
    (folder / "bad.jsonl").write_text('{"de": "x"\n')
    for line, config in {
        r"cut\.gz, after line \d+: is cut off or not gzip": CorpusConfig(src="cut.gz", tgt="good"),
        r"not\.gz, after line 0: is cut off or not gzip": CorpusConfig(src="not.gz", tgt="good"),
        "none: there is no such file": CorpusConfig(src="good", tgt="none"),
        r"none\.parquet: there is no such file": CorpusConfig(dataset="none.parquet", src_column="a", tgt_column="b"),
        "empty: has no sentence pair": CorpusConfig(src="empty", tgt="empty"),
        r"odd\.tsv, line 2: must have at least 2 columns, not 1": CorpusConfig(dataset="odd.tsv"),
        r"odd\.tsv: has no column 'de'; it has a, b": CorpusConfig(dataset="odd.tsv", src_column="de", tgt_column="en"),
        r"plain\.txt, line 1: is not 'IN: \.\.\. OUT: \.\.\.'": CorpusConfig(dataset="plain.txt"),
        r"bad\.jsonl, line 1: is not JSON: ": CorpusConfig(dataset="bad.jsonl", src_column="a", tgt_column="b"),
        "no/such_dataset: datasets cannot load it: ": CorpusConfig(
            dataset="no/such_dataset", src_column="a", tgt_column="b"
        ),
    }.items():
        with pytest.raises(DataError, match=f"^{line}"):
            list(read_pairs(config))


WRONG = {
    "src='a': needs tgt too, the other side's file": {"src": "a"},
    "tgt='a': needs src too, the other side's file": {"tgt": "a"},
    "dataset=None: give src and tgt, or dataset, or store, or mixture": {},
    "dataset='x': give src and tgt, or dataset, or store, or mixture": {"src": "a", "tgt": "b", "dataset": "x"},
    "src_column='de', tgt_column=None: give both or neither": {"dataset": "x", "src_column": "de"},
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_settings(line):
    with pytest.raises(ConfigError, match=f"^{line}$"):
        CorpusConfig(**WRONG[line])


def test_bytes_that_are_not_utf8_in_a_file_of_columns(folder):
    (folder / "a.jsonl").write_bytes(b'{"de": "a", "en": "b"}\n{"de": "\xe4", "en": "b"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl"):
        list(read_pairs(CorpusConfig(dataset="a.jsonl", src_column="de", tgt_column="en")))
