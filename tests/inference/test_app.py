"""The server's interface, in this process, against the command, LibreTranslate's field names and the limits."""

import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import twinax
from parity_tests.support.text import write_files, write_model
from twinax.inference.ensemble import Ensemble
from twinax.inference.serving.app import Service, application
from twinax.inference.serving.directions import Directions
from twinax.inference.serving.engine import Engine
from twinax.inference.serving.requests import Limits

MODEL = Path(__file__).parents[1] / "checkpoints" / "v1"
LINES = ["a b c", "h e d f", "g g a b c d e f g h", "f b", "d a"]
TOKEN = "a-token-of-sixteen-characters"


def client_of(translator, *, beam_size=3, token=None, hosts=None, capacity=100, names=("de", "en")):
    engine = Engine(Directions(translator, *names), translator.decoding(beam_size=beam_size, max_length=8))
    service = Service.of("model", engine, Limits(10_000, 20, beam_size), 0.0, capacity, token, hosts)
    return TestClient(application(service), raise_server_exceptions=False, base_url="http://localhost")


@pytest.fixture(scope="module")
def translator():
    return twinax.load(MODEL)


@pytest.fixture(scope="module")
def client(translator):
    with client_of(translator) as client:
        yield client


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_translations_are_those_of_the_command(client, command, tmp_path):
    (tmp_path / "text").write_text("\n".join(LINES) + "\n")
    status, out, _ = command("translate", MODEL, tmp_path / "text", "--beam-size", "3", "--n-best", "3", "--scores")
    assert status == 0
    answer = client.post("/translate", json={"q": LINES, "source": "de", "target": "en", "alternatives": 2}).json()
    hypotheses = [
        [best, *others] for best, others in zip(answer["translatedText"], answer["alternatives"], strict=True)
    ]
    assert [text for n_best in hypotheses for text in n_best] == [line.split("\t")[2] for line in out.splitlines()]
    assert answer["warnings"] == ["sentence 3: has more tokens than the model reads and was truncated"]
    with client.stream("POST", "/translate", json={"q": LINES, "alternatives": 2, "stream": True}) as response:
        events = events_of(response.read().decode())
    scores = [score for name, data in events if name == "sentence" for score in data["scores"]]
    assert [f"{score:.6f}" for score in scores] == [line.split("\t")[1] for line in out.splitlines()]


def events_of(text):
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


TEXTS = st.text(st.sampled_from("abcdefgh .\n\r"), max_size=60)


@given(st.lists(TEXTS, max_size=3), st.booleans())
def test_a_stream_has_what_the_answer_has(client, texts, split):
    body = {"q": texts, "split_sentences": split}
    answer = client.post("/translate", json=body)
    if answer.status_code == 413:  # more sentences than the limit
        return
    events = events_of(client.post("/translate", json=body | {"stream": True}).text)
    parts, (end, last) = ["" for _ in texts], events.pop()
    for name, data in events:
        assert name == "sentence"
        parts[data["text"]] += data["separator"] + data["translatedText"]
    assert end == "end"
    assert [part + after for part, after in zip(parts, last["separators"], strict=True)] == answer.json()[
        "translatedText"
    ]


def test_a_document_keeps_its_lines(client):
    text = "\n  a b c\r\n\r\n\th e d f \n \n"
    assert client.post("/translate", json={"q": text}).json()["translatedText"] == text.upper()


def test_forms_and_json_mean_the_same(client):
    body = {"q": "h e d f", "source": "auto", "target": "en", "format": "text", "alternatives": 1, "split_sentences": 0}
    form = client.post("/translate", data=body | {"secret": "", "api_key": ""})
    assert form.json() == client.post("/translate", json=body | {"split_sentences": False}).json()
    assert form.json()["translatedText"] == "H E D F"


def test_scores_are_those_of_the_translator(client, translator):
    pairs = {"q": ["a b", "c"], "translation": ["A B", "D"]}
    scores = client.post("/score", json=pairs).json()["scores"]
    assert scores == pytest.approx(translator.score(pairs["q"], pairs["translation"]), rel=1e-5)
    assert error_of(client.post("/score", json={"q": ["a", " "], "translation": ["A", "B"]}), 400) == (
        "item 2: the source ' ' has no token; remove the pair"
    )
    assert "2 and 1 texts" in error_of(client.post("/score", json={"q": ["a", "b"], "translation": ["A"]}), 400)


def test_attention_points_at_the_words_of_a_copy(client):
    """The model uppercases letter by letter, so that each attends to its own."""
    body = {"q": "a b h e", "translation": "A B H E"}
    (attention,) = client.post("/attention", json=body).json()["attention"]
    assert attention["source"] == attention["translation"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [row.index(max(row)) for row in attention["weights"]] == [0, 1, 2, 3]


WRONG = {
    "no JSON": ({"content": b"{"}, 400, "the body is not JSON: "),
    "no UTF-8": ({"content": b'"\xff"'}, 400, "the body is not JSON: "),
    "deep JSON": ({"content": b"[" * 9000}, 400, "the body is not JSON: "),
    "a number": ({"json": 5}, 400, "the body is int: must be an object"),
    "half a surrogate": ({"content": rb'{"q": "\ud800"}'}, 400, "q: has half of a surrogate pair"),
    "no text": ({"json": {"source": "de"}}, 400, "q: is missing"),
    "null": ({"json": {"q": None}}, 400, "q: is missing"),
    "text of another type": ({"json": {"q": {}}}, 400, "q: is dict, must be a string or a list"),
    "a list with null": ({"json": {"q": ["a", None]}}, 400, "q[1]: is NoneType, must be a string"),
    "an unknown field": ({"json": {"q": "a", "beam": 3}}, 400, "'beam': there is no such field"),
    "a truth as number": ({"json": {"q": "a", "alternatives": True}}, 400, "alternatives: is bool"),
    "a form's word as number": ({"data": {"q": "a", "alternatives": "x"}}, 400, "alternatives: is str"),
    "another language": (
        {"json": {"q": "a", "source": "fr"}},
        400,
        "source='fr': the model has no such language; it has de",
    ),
    "another target": (
        {"json": {"q": "a", "target": "de"}},
        400,
        "target='de': the model has no such language; it has en",
    ),
    "markup": ({"json": {"q": "a", "format": "html"}}, 400, "format='html': must be 'text'"),
    "a large beam": ({"json": {"q": "a", "beam_size": 4}}, 400, "beam_size=4: must be 1 to 3"),
    "a beam of none": ({"json": {"q": "a", "beam_size": 0}}, 400, "beam_size=0: must be 1 to 3"),
    "alternatives of greedy search": ({"json": {"q": "a", "beam_size": 1, "alternatives": 1}}, 400, "alternatives=1"),
    "too many sentences": ({"json": {"q": ["a"] * 21}}, 413, "q: has 21 sentences; at most 20"),
    "a large body": ({"json": {"q": "a " * 10_000}}, 413, "the body has more than 10,000 bytes"),
    "another type": ({"content": b"a", "headers": {"content-type": "text/plain"}}, 415, "Content-Type 'text/plain'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_get_one_clear_line(name, client):
    arguments, status, message = WRONG[name]
    error = error_of(client.post("/translate", **arguments), status)
    assert error.startswith(message)
    assert len(error.splitlines()) == 1


@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda values: (
            st.lists(values, max_size=3)
            | st.dictionaries(
                st.sampled_from(["q", "source", "target", "alternatives", "beam_size", "stream", "translation", "x"]),
                values,
            )
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["/translate", "/score", "/attention"]),
)
def test_any_body_gets_an_answer(client, body, path):
    for kind in ("application/json", "application/x-www-form-urlencoded"):
        response = client.post(path, content=body, headers={"content-type": kind})
        assert response.status_code in (200, 400, 413), response.text
        assert response.headers["content-type"].startswith("text/event-stream") or response.json()


def test_other_paths_and_methods(client):
    assert error_of(client.get("/translate"), 405) == "/translate: does not take GET"
    assert error_of(client.post("/detect"), 404) == "there is no '/detect'"
    assert client.get("/languages").json() == [
        {"code": "de", "name": "de", "targets": ["en"]},
        {"code": "en", "name": "en", "targets": []},
    ]
    health = client.get("/health").json()
    assert (health["status"], health["model"], health["source"], health["target"]) == ("ok", "model", "de", "en")


def test_the_page_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    for text in (page.text, client.get("/page.css").text, client.get("/page.js").text):
        assert not re.search(r"(src|href)=.?(http|/)|url\(|https?:|@import", text)


def test_metrics_count_what_was_answered(translator):
    with client_of(translator) as client:
        client.post("/translate", json={"q": ["a b c", "f b"]})
        client.post("/translate", json={"q": 1})
        client.get("/unknown/path")
        lines = client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["twinax_sentences_total"] == "2.0"
    assert values['twinax_requests_total{path="/translate",status="200"}'] == "1.0"
    assert values['twinax_requests_total{path="/translate",status="400"}'] == "1.0"
    assert values['twinax_requests_total{path="other",status="404"}'] == "1.0"
    assert values['twinax_request_seconds_count{path="/translate"}'] == "2.0"
    assert float(values["twinax_round_items_sum"]) == 2.0


def test_metrics_count_compiled_programs(translator):
    def count(client):
        return float(re.search(r"^twinax_programs_total (\S+)", client.get("/metrics").text, re.MULTILINE)[1])

    with client_of(translator) as client:
        before = count(client)
        program = jax.jit(lambda x: x + 1)
        program(np.ones(2, "f"))
        program(np.ones(3, "f"))
        program(np.ones(3, "f"))
        assert count(client) == before + 2


def test_a_token_opens_what_translates(translator):
    with client_of(translator, token=TOKEN) as client:
        for body in ({"q": "a"}, {"q": "a", "api_key": "another"}):
            assert error_of(client.post("/translate", json=body), 403).startswith("the token is missing or wrong")
        assert error_of(client.get("/metrics"), 403)
        assert error_of(client.get("/metrics", headers={"authorization": "Bearer another"}), 403)
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert client.post("/translate", json={"q": "f b"}, headers=bearer).json() == {"translatedText": "F B"}
        assert client.post("/translate", data={"q": "f b", "api_key": TOKEN}).json() == {"translatedText": "F B"}
        assert client.get("/metrics", headers=bearer).status_code == 200
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_another_host_name_is_refused(translator):
    """So that a web page whose name leads to this machine cannot reach the server."""
    with client_of(translator, hosts=("localhost", "127.0.0.1", "::1")) as client:
        for host in ("localhost", "localhost:5000", "127.0.0.1:80", "[::1]:5000"):
            assert client.get("/health", headers={"host": host}).status_code == 200
        for host in ("example.org", "localhost.example.org"):
            assert "Host" in error_of(client.get("/health", headers={"host": host}), 421)


def test_a_full_queue_says_when_to_come_back(translator):
    with client_of(translator, capacity=5) as client:
        response = client.post("/translate", json={"q": ["a"] * 6})
        assert error_of(response, 503) == "too many sentences wait; try again later"
        assert int(response.headers["retry-after"]) >= 1
        assert client.post("/translate", json={"q": ["a"] * 5}).status_code == 200


def test_one_wrong_sentence_fails_alone(translator, monkeypatch):
    """Here, one whose logits are not finite."""
    stream = type(translator).stream

    def failing(self, texts, *rest, **more):
        if "h" in texts.texts:
            raise twinax.backend.errors.NotFiniteError("the model's logits are NaN")
        return stream(self, texts, *rest, **more)

    monkeypatch.setattr(type(translator), "stream", failing)
    with client_of(translator) as client:
        assert error_of(client.post("/translate", json={"q": ["a", "h"]}), 400) == "item 2: the model's logits are NaN"
        events = events_of(client.post("/translate", json={"q": ["a", "h"], "stream": True}).text)
        assert events[-1] == ("error", {"error": "item 2: the model's logits are NaN"})
        assert client.post("/translate", json={"q": ["f b"]}).json() == {"translatedText": ["F B"]}


def test_a_defect_is_named_and_the_server_goes_on(translator, monkeypatch):
    def broken(*rest, **more):
        raise KeyError("q")

    with client_of(translator) as client:
        with monkeypatch.context() as context:
            context.setattr(type(translator), "stream", broken)
            assert error_of(client.post("/translate", json={"q": "f b"}), 500) == "a defect of twinax: KeyError"
            assert events_of(client.post("/translate", json={"q": "a", "stream": True}).text) == [
                ("error", {"error": "a defect of twinax: KeyError"})
            ]
        assert client.post("/translate", json={"q": "f b"}).json() == {"translatedText": "F B"}


def test_an_ensemble_is_served(translator):
    with client_of(Ensemble([translator, translator])) as client:
        assert client.post("/translate", json={"q": "a b c"}).json() == {"translatedText": "A B C"}


@pytest.mark.parametrize("name", ["NLLB", "mBART-50", "M2M100"])
def test_languages_of_a_multilingual_model(name, tmp_path):
    """Each request in its own direction, as the translator translates it."""
    write_files(name, tmp_path, (["ein Haus im Wald"] * 9, ["a house in the woods"] * 9), 300)
    write_model(name, tmp_path)
    translator = twinax.load(tmp_path)
    codes = [*translator.tokenizers.src.languages.tokens][:3]
    with client_of(translator, names=(None, None)) as client:
        listed = client.get("/languages").json()
        assert [language["code"] for language in listed] == [*translator.tokenizers.src.languages.tokens]
        assert set(listed[0]["targets"]) == {language["code"] for language in listed[1:]}
        for source, target in itertools.pairwise(codes):
            body = {"q": ["ein Haus"], "source": source, "target": target, "beam_size": 2}
            expected = translator.translate(["ein Haus"], src_lang=source, tgt_lang=target, beam_size=2, max_length=8)
            assert client.post("/translate", json=body).json() == {"translatedText": expected}
        assert "does not detect" in error_of(client.post("/translate", json={"q": "a", "source": "auto"}), 400)
        wrong = client.post("/translate", json={"q": "a", "source": codes[0], "target": "xx"})
        assert error_of(wrong, 400).startswith("target='xx': the model has no such language")
