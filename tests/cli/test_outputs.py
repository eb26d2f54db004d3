"""What the command writes: files are replaced as a whole, inputs are kept, and broken streams are named."""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twinax import convert
from twinax.cli.usage import UsageError, check_outputs
from twinax.convert.io.atomic_io import replace_file

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
TWINAX = Path(sys.executable).with_name("twinax")


def test_a_link_keeps_its_place_and_a_file_its_mode(command, tmp_path):
    target, link, beside = (tmp_path / name for name in ("target.json", "x.json", "x.json.tmp"))
    target.write_text("earlier")
    target.chmod(0o640)
    link.symlink_to(target)
    beside.write_text("mine")
    assert command("inspect", STORED, "--json", link)[0] == 0
    assert link.is_symlink()
    assert target.read_text().startswith("{")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert beside.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_new_file_has_the_mode_of_other_new_files(tmp_path):
    (tmp_path / "usual").touch()
    replace_file(tmp_path / "x", "text")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_devices_and_pipes_are_written_to(command, tmp_path):
    assert command("inspect", STORED, "--json", os.devnull)[0] == 0
    assert Path(os.devnull).is_char_device()
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_text()))
    reader.start()
    assert command("inspect", STORED, "--json", tmp_path / "pipe")[0] == 0
    reader.join()
    assert received[0].startswith("{")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "x.pt", "--json", "x.pt"),
        ("audit", "x.pt", "--json", "./x.pt"),
        ("parity", "x.pt", "--json", "link.pt"),
        ("parity", "x.pt", "--src", "a.txt", "--json", "a.txt"),
        ("translate", "x.pt", "a.png", "--attention", "a.png"),
        ("evaluate", "x.pt", "--src", "a.txt", "--tgt", "a.txt", "--output", "a.txt"),
        ("plan", "c.json", "--topology", "h100:8", "--json", "c.json"),
        ("compare", "a.py:f", "b.py:f", "--inputs", "a.py:g", "--json", "b.py"),
        ("compare", "a.py:f", "b.py:f", "--inputs", "a.py:g", "--json", "r.html", "--report", "r.html"),
        ("parity", "x.pt", "--src", "a.html", "--report", "a.html"),
        ("audit", "a.html", "--report", "./a.html"),
    ],
)
def test_no_command_overwrites_what_it_reads(arguments, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x.pt", "a.txt", "a.png", "a.html", "c.json", "a.py", "b.py"):
        Path(name).write_text("mine")
    Path("link.pt").symlink_to("x.pt")
    code, out, err = command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "of this command; name another file to write" in err
    assert all(path.read_text() == "mine" for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["parity", "audit"])
@pytest.mark.parametrize(
    ("report", "line"),
    [("r.json", "--report r.json: must end in .html"), ("none/r.html", "none/r.html: there is no directory none")],
)
def test_a_report_that_cannot_be_written_is_refused_first(name, report, line, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.pt").write_text("no checkpoint")
    assert command(name, "x.pt", "--report", report) == (2, "", f"twinax: {line}\n")


def test_parts_of_a_checkpoint_are_kept_and_other_files_written(command, tmp_path):
    copy = shutil.copytree(STORED, tmp_path / "v1")
    for file in filter(Path.is_file, copy.rglob("*")):
        before = file.read_bytes()
        code, _, err = command("inspect", copy, "--json", file)
        assert (code, file.read_bytes()) == (2, before)
        assert err == f"twinax: {file}: is part of an input of this command; name another file to write\n"
    (copy / "text").write_text("a\n")
    words = ("evaluate", copy / "text", "--tgt", copy / "text", "--json", copy / "metrics.json")
    for _ in range(2):
        assert command("inspect", copy, "--json", copy / "scores.json")[0] == 0
        assert command(*words)[0] == 0


@pytest.mark.parametrize("flags", [("--json",), ("--output",)])
def test_files_beside_weights_and_in_the_hub_s_cache_are_kept(flags, command, bart, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in bart.iterdir():
        (blobs / f"hash-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    (tmp_path / "text").write_text("a\n")
    contents = {path: path.read_bytes() for path in blobs.iterdir()}
    for model, target in (
        (snapshot, snapshot / "config.json"),
        (snapshot, blobs / "hash-config.json"),
        (bart / "model.safetensors", bart / "config.json"),
    ):
        code, out, err = command(
            "evaluate", model, "--src", tmp_path / "text", "--tgt", tmp_path / "text", *flags, target
        )
        assert (code, out) == (2, "")
        assert err == f"twinax: {target}: is part of an input of this command; name another file to write\n"
    assert {path: path.read_bytes() for path in blobs.iterdir()} == contents


def test_a_converter_that_was_written_is_no_report(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("compare", "a.py:f", "b.py:f", "--inputs", "a.py:g", "--write-rules", "r.toml", "--json", "r.py")
    assert command(*words)[::2] == (2, "twinax: r.py: is another output of this command; name another file to write\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", STORED, "--json", "x.json"),
        ("evaluate", "text", "--tgt", "text", "--json", "x.json"),
        ("capture", "ref.py:make", "--inputs", "ref.py:inputs", "--out", "x.trace"),
        ("capture", "--program", "x.pyz"),
    ],
    ids=lambda words: " ".join((words[0], words[-2])),
)
def test_an_earlier_output_stays_until_the_command_succeeds(arguments, command, files, monkeypatch):
    """And a link stays one."""
    target = files / "target"
    target.write_text("earlier")
    (files / "text").write_text("a\n")
    (files / arguments[-1]).symlink_to(target)

    def full(source, target):
        raise OSError(28, "No space left on device", str(source))

    with monkeypatch.context() as context:
        context.setattr("os.replace", full)
        context.setattr("os.rename", full)
        code, _, err = command(*arguments)
    assert code == 2
    assert "No space left on device" in err
    assert target.read_text() == "earlier"
    assert command(*arguments)[0] == 0
    assert target.read_bytes() != b"earlier"
    assert (files / arguments[-1]).is_symlink()
    assert not [*files.glob("*.part")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("translate", STORED, "text", "--output", "x"),
        ("convert", STORED, "x"),
        ("compare", "ref.py:make", "port.py:make", "--inputs", "ref.py:inputs", "--write-rules", "x.toml"),
    ],
    ids=lambda words: words[0],
)
def test_an_earlier_output_that_may_have_cost_hours_is_kept(arguments, command, files):
    (files / "text").write_text("a\n")
    (files / arguments[-1]).write_text("earlier")
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{arguments[-1]}: exists; " in err
    assert (files / arguments[-1]).read_text() == "earlier"


# Connects a stream as a shell does, and then runs the command: descriptor, path, flags of `open`, words.
CONNECTED = """
import os, sys
from twinax.cli.entry import main

descriptor, path, flags, *sys.argv[1:] = sys.argv[1:]
reader, writer = os.pipe()
os.close(reader)
os.dup2(os.open(path, int(flags)) if path else writer, int(descriptor))
os.close(writer)
main()
"""


def test_standard_output_as_a_file_is_appended_to(forks, tmp_path):
    (tmp_path / "log").write_text("earlier\n")
    words = (1, "log", os.O_WRONLY | os.O_APPEND, "inspect", STORED, "--json", "/dev/stdout")
    assert forks(CONNECTED, *words, cwd=tmp_path).returncode == 0
    text = (tmp_path / "log").read_text()
    assert text.startswith('earlier\n{\n  "path"')
    assert "sha256 of weights" in text.partition("\n}\n")[2]
    (tmp_path / "a.txt").write_text("\u00e9\n")
    line = f"PYTHONIOENCODING=ascii {TWINAX} evaluate a.txt --tgt a.txt --output /dev/stdout | cat"
    assert shell(line, cwd=tmp_path).stdout.startswith("\u00e9\n")
    words = (1, "x.json", os.O_WRONLY | os.O_CREAT, "inspect", STORED, "--json", "x.json")
    assert forks(CONNECTED, *words, cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "x.json").read_text())["path"] == str(STORED)


def test_what_may_not_be_written_is_named_at_once(tmp_path, monkeypatch):
    """An existing file itself, of a new one its folder."""
    (tmp_path / "x").touch()
    for name, place in (("x", tmp_path / "x"), ("y", tmp_path)):
        forbidden = (place, os.W_OK)
        monkeypatch.setattr("os.access", lambda path, mode, forbidden=forbidden: (Path(path), mode) != forbidden)
        with pytest.raises(UsageError, match=rf"^{tmp_path}/{name}: cannot be written: Permission denied$"):
            check_outputs([str(tmp_path / name)])


def test_a_file_is_written_where_no_new_one_may_be_made(tmp_path, monkeypatch):
    replace_file(tmp_path / f"x.{'y' * 240}", "a")
    path = tmp_path / ("x" * 250)
    replace_file(path, "a")
    inode = path.stat().st_ino
    monkeypatch.setattr("os.access", lambda path, mode: False)
    replace_file(path, "b")
    assert (path.read_text(), path.stat().st_ino) == ("b", inode)


def test_a_path_that_cannot_be_a_file(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path, reason in (("a", "cannot be used"), (".", "is a directory"), ("none/x", "there is no directory")):
        with pytest.raises(UsageError, match=reason):
            check_outputs([str(tmp_path / path)])


def shell(line, **options):
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    ("redirection", "code", "err"),
    [
        ((1, "/dev/full"), 2, "twinax: standard output: No space left on device\n"),
        (">&-", 0, ""),
        ((2, "/dev/full"), 0, ""),
        ("2>&-", 0, ""),
        ("2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", 0, ""),
        ((1, ""), 141, ""),
    ],
)
def test_standard_output_and_error_that_cannot_be_written(redirection, code, err, forks, tmp_path):
    """The command prints a table, and that the array holds a NaN to standard error."""
    checkpoint = convert.load(STORED)
    name = min(checkpoint.arrays)
    arrays = {**checkpoint.arrays, name: np.full_like(checkpoint.arrays[name], np.nan)}
    convert.save(replace(checkpoint, arrays=arrays, training=None), tmp_path / "x.pt")
    doubt = f"twinax: x.pt: 1 of {len(arrays)} arrays hold NaN or infinite numbers, first {name}\n"
    if isinstance(redirection, tuple):
        result = forks(CONNECTED, *redirection, os.O_WRONLY, "inspect", "x.pt", cwd=tmp_path)
    else:  # Python starts with the stream like this
        result = shell(f"{TWINAX} inspect x.pt {redirection}", cwd=tmp_path)
    unread = redirection[0] in (2, "2")
    assert (result.returncode % 256, result.stderr) == (code, "" if unread else doubt + err)


@pytest.mark.parametrize("words", ["--help", "--version", "evaluate --help", "train --help"])
def test_a_help_that_cannot_be_printed(words):
    result = shell(f"{TWINAX} {words} >/dev/full")
    assert (result.returncode, result.stderr) == (2, "twinax: standard output: No space left on device\n")


def test_an_error_without_standard_error(tmp_path):
    assert shell(f"{TWINAX} inspect {tmp_path}/x 2>/dev/full").returncode == 2


def test_what_is_printed_is_not_held_back_if_python_is_told_so():
    module = "twinax.cli.process.streams"
    code = f"import os; from {module} import guard_streams; guard_streams(); print('a', end=''); os._exit(0)"
    result = shell(f'{sys.executable} -c "{code}"', env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert result.stdout == "a"


def test_a_pipe_as_a_text_is_named(command, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for arguments in (
        ("evaluate", tmp_path / "pipe", "--tgt", tmp_path / "pipe"),
        ("score", STORED, "--src", tmp_path / "pipe", "--tgt", tmp_path / "pipe"),
    ):
        code, _, err = command(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{tmp_path / 'pipe'}: is a pipe or a device; save it to a file, and pass that" in err


def test_a_pipe_beside_a_conversion_does_not_hang_it(command, tmp_path):
    """It has the name of what a killed conversion leaves."""
    os.mkfifo(tmp_path / ".y.pt.twinax-1.pt")
    assert command("convert", STORED, tmp_path / "x.pt")[0] == 0


def test_closed_standard_input(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = command("translate", STORED)
    assert (code, err.splitlines()[-1]) == (2, "twinax: standard input is closed; pass a file")


@pytest.mark.parametrize(
    "arguments", [("--references", "a", "--references", "b"), ("--references=a", "--references=b")]
)
def test_a_list_that_is_given_twice(arguments, command):
    code, out, err = command("evaluate", "x.txt", "--tgt", "y.txt", *arguments)
    assert (code, out) == (2, "")
    assert err == "twinax: --references: is given twice, and only the last would count; give it once, with all values\n"
