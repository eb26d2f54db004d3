"""`twinax serve` as a process: its signals, and what it refuses."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

MODEL = Path(__file__).parents[1] / "checkpoints" / "v1"
TOKEN = "a-token-of-sixteen-characters"


@pytest.fixture
def start():
    """Start the command; returns the process and its address when it listens."""
    processes = []

    def start(*flags):
        command = [Path(sys.executable).with_name("twinax"), "serve", MODEL, *map(str, flags)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        line = process.stderr.readline()
        assert line.startswith("twinax: v1: http://"), line + process.stderr.read()
        return process, re.search(r"http://\S+", line)[0]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_signals_end_it_and_it_starts_again_at_the_same_port(start):
    process, address = start("--port", 0, "--src-lang", "de", "--tgt-lang", "en")
    body = {"q": "h e d f", "source": "de", "target": "en"}
    answer = httpx2.post(f"{address}/translate", json=body, timeout=60)
    assert answer.json() == {"translatedText": "H E D F"}
    process.kill()
    assert process.wait(20) == -signal.SIGKILL
    process, again = start("--port", address.rpartition(":")[2], "--beam-size", 1)
    assert again == address
    assert httpx2.post(f"{address}/translate", json={"q": "h e d f"}, timeout=60).json() == answer.json()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert process.stderr.read() == ""


def refused(command, *flags):
    status, out, err = command("serve", MODEL, *flags)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    return line


def test_an_address_in_use_is_refused(command):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused(command, "--port", port)
    assert line == f"twinax: 127.0.0.1:{port}: cannot be listened at: Address already in use"


def test_other_machines_need_a_token(command, tmp_path):
    path = tmp_path / "token"
    message = "twinax: --host 0.0.0.0: other machines reach it; set a token with --token-file, or keep to 127.0.0.1"
    assert refused(command, "--host", "0.0.0.0") == message
    path.write_text("short")
    path.chmod(0o600)
    assert "at least 16 ASCII characters" in refused(command, "--host", "0.0.0.0", "--token-file", path)
    path.write_text(TOKEN)
    path.chmod(0o644)
    assert f"other users can read it; run: chmod 600 {path}" in refused(command, "--token-file", path)


def test_a_token_lets_other_machines_in(start, tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    _, address = start("--host", "0.0.0.0", "--port", 0, "--token-file", path)
    address = address.replace("0.0.0.0", "127.0.0.1")
    body = {"q": "h e d f", "api_key": TOKEN}
    host = {"host": "translate.example.org"}
    assert httpx2.post(f"{address}/translate", json=body, headers=host, timeout=60).json() == {
        "translatedText": "H E D F"
    }
    assert httpx2.post(f"{address}/translate", json={"q": "h e d f"}, timeout=30).status_code == 403


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", 70000), "--port 70000: must be 0 to 65535"),
        (("--window", -1), "--window -1.0: must be 0 to 1000 milliseconds"),
        (("--max-waiting", 0), "--max-waiting 0: must be at least 1"),
        (("--beam-size", 0), "beam_size=0: must be at least 1"),
        (("--top-k", 3, "--beam-size", 3), "--top-k: samples, without a beam"),
    ],
)
def test_wrong_flags_are_refused_before_the_model_is_read(flags, message, command):
    assert refused(command, *flags).startswith(f"twinax: {message}")


def test_a_glossary_needs_a_model_that_reads_it(command, tmp_path):
    (tmp_path / "terms.tsv").write_text("a\tb\n")
    line = refused(command, "--port", 0, "--glossary", tmp_path / "terms.tsv")
    assert "the source tokenizer has no token '<term>'" in line


def test_without_the_extra_it_says_what_to_install(forks):
    code = "import sys; sys.modules['uvicorn'] = None; from twinax.cli.commands import main; main()"
    finished = forks(f"import sys; sys.argv = ['twinax', *sys.argv[1:]]; {code}", "serve", MODEL)
    assert finished.returncode == 2
    assert finished.stderr == (
        "twinax: twinax serve: needs uvicorn, which is not installed: pip install 'twinax[serve]'\n"
    )
