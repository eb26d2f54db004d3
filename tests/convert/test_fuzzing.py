"""Damaged versions of every kind of file that twinax reads are read, or refused in one line."""

import io
import json
import re
import time
import zipfile
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import fuzzing
from tests.support.fuzzing import Case, Originals, cases, cases_in_worker, outcome
from tests.support.fuzzing_subjects import SUBJECTS
from twinax.backend.errors import CheckpointError, ConversionError, DataError
from twinax.cli.process.messages import one_line

EVERYDAY, COUNT = 8, 15  # per format; its variants share them. `make fuzz` has more
VARIANTS = (
    ("orbax, training", "orbax, weights"),
    ("PyTorch, training", "PyTorch, torch_nn", "PyTorch, bare"),
    ("Marian", "BART", "T5", "mBART", "Marian, shards"),
)
VARIANT_COUNTS = {name: len(names) for names in VARIANTS for name in names}
SAFE = [name for name, subject in SUBJECTS.items() if not subject.is_native]
NATIVE = [name for name in SUBJECTS if name not in SAFE]


@pytest.mark.parametrize("name", SAFE)
def test_nothing_but_a_refusal_comes_of_damage(name):
    assert [case for case in cases(_requests(name, 0, EVERYDAY)) if case.is_finding] == []


def test_nothing_but_a_refusal_comes_of_damage_to_what_native_code_reads():
    requests = [request for name in NATIVE for request in _requests(name, 0, EVERYDAY)]
    assert [case for case in cases_in_worker(requests) if case.is_finding] == []


@pytest.mark.slow
def test_nothing_but_a_refusal_comes_of_more_damage():
    safe, native = ([r for name in names for r in _requests(name, EVERYDAY, COUNT)] for names in (SAFE, NATIVE))
    assert [case for case in (*cases(safe), *cases_in_worker(native)) if case.is_finding] == []


def _requests(name, first, last):
    start, end = (-(-number // VARIANT_COUNTS.get(name, 1)) for number in (first, last))
    return [(name, number) for number in range(start, end)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None, exclude_categories=())),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return Originals(tmp_path_factory.mktemp("originals"))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("BART", "config.json"),
        ("BART", "generation_config.json"),
        ("BART", "tokenizer_config.json"),
        ("BART", "vocab.json"),
        ("run directory", "config.json"),
        ("run directory", "data.json"),
        ("run directory", "metrics.jsonl"),
    ],
)
@given(data=st.data())
def test_no_value_in_json_is_a_finding(name, file, data, originals):
    path = originals.copy(name) / file
    values = json.loads(path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text())
    key = data.draw(st.sampled_from([None, *values]))
    new = data.draw(JSON)
    path.write_text(json.dumps(new if key is None else values | {key: new}))
    found = outcome(SUBJECTS[name], path.parent, None)
    assert not Case(name, 0, "", found).is_finding, found


def _with(**values):
    return lambda content: json.dumps(json.loads(content) | values).encode()


def _as_if_deflated(content):
    """A zip archive whose directory calls its stored entries deflated."""
    return re.sub(rb"(PK\x01\x02.{6})\0\0", rb"\1" + b"\x08\0", content, flags=re.DOTALL)


def _with_another_charsmap(content):
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto = schema.ModelProto.FromString(content)
    proto.normalizer_spec.precompiled_charsmap = b"\xff" * 40
    return proto.SerializeToString()


def _with_a_piece_that_is_not_utf_8(content):
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto = schema.ModelProto.FromString(content)
    piece = proto.pieces[5].piece.encode()
    return content.replace(bytes([len(piece)]) + piece, bytes([len(piece)]) + b"\xff" * len(piece), 1)


def _with_config(**values):
    def damage(content):
        document = json.loads(content)
        return json.dumps(document | {"config": document["config"] | values, "checksum": None}).encode()

    return damage


def _with_an_entry_that_is_no_array(content):
    """Its length in the directory of the archive has become 0."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(written, "w") as new:
        *names, last = old.namelist()
        for name in names:
            new.writestr(name, old.read(name))
        new.writestr(last, b"")
    return written.getvalue()


def _without_the_unknown_token(content):
    document = json.loads(content)
    document["model"]["unk_token"] = "x"
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("name", "file", "damage", "message"),
    [
        ("T5", "generation_config.json", _with(bad_words_ids=10**9), "bad_words_ids=1000000000"),
        ("T5", "generation_config.json", _with(suppress_tokens=7), "suppress_tokens=7"),
        ("T5", "tokenizer_config.json", lambda content: b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        ("T5", "tokenizer_config.json", lambda content: b'{"a":' * 500 + b"1" + b"}" * 500, "nested too deeply"),
        ("T5", "tokenizer_config.json", lambda content: b"[]", "must be a JSON object, not a list"),
        ("T5", "tokenizer_config.json", lambda content: b'{"eos_token": "\\ud800"}', "surrogates not allowed"),
        ("SentencePiece model", "spiece.model", _with_a_piece_that_is_not_utf_8, "piece 5 is not UTF-8"),
        (
            "vocabulary",
            "x.txt",
            lambda content: content.replace(b"</s>", b"</s:"),
            "'</s:': cannot be put around a source",
        ),
        ("tokenizer.json", "tokenizer.json", _without_the_unknown_token, "the tokenizer cannot encode the text: "),
        ("T5", "spiece.model", _with_another_charsmap, "its table of normalization cannot be read"),
        ("Marian, npz", "model.npz", _with_an_entry_that_is_no_array, "is damaged: it is no array"),
        ("CTranslate2", "x/twinax.json", _with(config="a" * 9), "damaged or edited"),
        ("CTranslate2", "x/twinax.json", _with(config="a" * 9, checksum=None), "has no valid config"),
        ("CTranslate2", "x/twinax.json", _with_config(num_encoder_layers=2**31), "declares a model of"),
        ("CTranslate2", "x/twinax.json", _with_config(head_dim=10**30), "declares a model of"),
        ("T5", "config.json", _with(d_kv=10**30), "declares a model of"),
        ("Marian", "config.json", _with(decoder_ffn_dim=10**30), "such as decoder_d_ff=1,000"),
        ("BART", "config.json", _with(tie_word_embeddings="a" * 10_000), "a" * 100 + "…"),
        ("run directory", "config.json", lambda content: b"null", "is not a JSON object"),
        ("PyTorch, bare", "x.pt", _as_if_deflated, "not a complete PyTorch file"),
        ("orbax, training", "x/run/tokenizer/tokenizer_config.json", lambda content: b"[]", "damaged"),
        ("orbax, training", "x/run/checksums.json", _with(files={"a" * 10_000: "0"}), "is missing"),
        ("orbax, training", "x/run/checksums.json", _with(files={"/etc/passwd": "0"}), "is missing"),
    ],
)
def test_what_was_a_finding_once(name, file, damage, message, originals):
    folder = originals.copy(name)
    (folder / file).write_bytes(damage((folder / file).read_bytes()))
    with pytest.raises((ConversionError, DataError, CheckpointError)) as caught:
        SUBJECTS[name].read(folder)
    line = one_line(str(caught.value))
    assert message in line
    assert len(line) < 600


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda path: _raise(KeyError("x")), "KeyError: 'x'"),
        (lambda path: "other", "other arrays, and no word about it"),
        (lambda path: time.sleep(2), "takes more than 1 s"),
    ],
)
def test_what_a_finding_is(read, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "_SECONDS", 1)
    assert outcome(SUBJECTS["PyTorch, bare"]._replace(read=read), tmp_path, "original") == expected
    assert Case("", 0, "", expected).is_finding


def test_memory_is_a_finding_too(tmp_path, monkeypatch):
    peaks = iter([1 << 20, 3 << 20])
    monkeypatch.setattr(fuzzing.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=next(peaks)))
    subject = SUBJECTS["PyTorch, bare"]._replace(read=lambda path: "original")
    assert outcome(subject, tmp_path, "original") == "read, and needs 2.1 GB"
