"""The server on a socket: clients of LibreTranslate, clients that leave, connections that are silent."""

import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
from libretranslatepy import LibreTranslateAPI

import twinax
from tests.support.serving import serving
from twinax.inference.serving.batching import ROUND

MODEL = Path(__file__).parents[1] / "checkpoints" / "v1"
TOKEN = "a-token-of-sixteen-characters"


@pytest.fixture(scope="module")
def translator():
    return twinax.load(MODEL)


@pytest.fixture
def served(translator):
    with serving(translator) as served:
        yield served


def slow_down(service, monkeypatch, seconds=0.05):
    """Make each sentence take time; returns the list of those that are computed."""
    compute, computed = service.batcher.compute, []

    def slow(task, items):
        for result in compute(task, items):
            time.sleep(seconds)
            computed.append(result)
            yield result

    monkeypatch.setattr(service.batcher, "compute", slow)
    return computed


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_client_of_libretranslate_works(translator):
    with serving(translator, TOKEN) as (address, _):
        client = LibreTranslateAPI(address, TOKEN)
        assert client.translate("h e d f", "de", "en") == "H E D F"
        assert [language["code"] for language in client.languages()] == ["de", "en"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_waits_is_cancelled_when_the_client_leaves(stream, served, monkeypatch):
    address, service = served
    computed = slow_down(service, monkeypatch)
    body = {"q": ["a b c"] * 1000, "stream": stream}
    with suppress(httpx2.ReadTimeout), httpx2.stream("POST", f"{address}/translate", json=body, timeout=1) as response:
        next(response.iter_lines())
        time.sleep(0.5)
    wait_until(lambda: not service.batcher.waiting)
    assert httpx2.post(f"{address}/translate", json={"q": "f b"}, timeout=30).json() == {"translatedText": "F B"}
    assert len(computed) <= 2 * ROUND
    assert b"twinax_clients_left_total 1.0" in service.metrics.text()


def test_sentences_of_several_clients_are_translated_together(served, translator, monkeypatch):
    address, service = served
    slow_down(service, monkeypatch, 0.2)
    sizes, answers = [], {}
    service.batcher.observe = lambda size, seconds: sizes.append(size)

    def ask(i):
        answers[i] = httpx2.post(f"{address}/translate", json={"q": "abcdefgh"[i]}, timeout=30).json()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = translator.translate([*"abcdefgh"], beam_size=2, max_length=8)
    assert [answers[i]["translatedText"] for i in range(8)] == expected
    assert sum(sizes) == 8
    assert len(sizes) <= 3


SILENT = {
    "nothing": b"",
    "half a header": b"POST /translate HTTP/1.1\r\nHost: x\r\nConten",
    "another header after an answer": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HT",
}


@pytest.mark.parametrize("name", SILENT)
def test_silent_connections_are_closed(name, served):
    address, _ = served
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(SILENT[name])
        begin, data = time.monotonic(), b""
        while chunk := connection.recv(1 << 16):
            data += chunk
        assert time.monotonic() - begin < 10
    assert (b"200 OK" in data) == (name == "another header after an answer")


def test_a_body_that_does_not_arrive_is_refused(served, monkeypatch):
    monkeypatch.setattr("twinax.inference.serving.app._BODY_SECONDS", 0.5)
    address, _ = served
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in connection.recv(1 << 16)


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_answered_while_it_is_sent(declared, served):
    address, _ = served
    body = json.dumps({"q": "a " * (5 << 20)}).encode()
    chunks = (body[i : i + 65536] for i in range(0, len(body), 65536))
    response = httpx2.post(f"{address}/translate", content=body if declared else chunks, timeout=60)
    assert response.status_code == 413
    assert response.json() == {"error": "the body has more than 1,048,576 bytes"}


def test_running_requests_are_answered_at_the_end(translator, monkeypatch):
    with serving(translator) as (address, service):
        computed = slow_down(service, monkeypatch)
        answers = []

        def ask():
            answers.append(httpx2.post(f"{address}/translate", json={"q": ["a b c"] * 40}, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: computed)
    thread.join()
    assert answers[0].json() == {"translatedText": ["A B C"] * 40}
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{address}/health", timeout=30)
