"""SIGKILL in `twinax convert`: nothing looks whole before it is verified, and the next run removes what was left.

Kills at fixed points of two forms here; `make kill-test` kills fifty of each form at random moments, and prints counts.
"""

import json
from pathlib import Path

import pytest

from twinax import convert
from twinax.convert import Checkpoint, load
from twinax.convert.arrays.verification import compare_checkpoints
from twinax.convert.layouts import fairseq, marian_npz
from twinax.parity.functions import random_arrays

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
FORMS = {  # name -> family of the source, flags
    "directory": ("bart", "--layout bart"),
    "shards": ("bart", "--layout bart --max-shard-size 2MB"),
    "x.safetensors": ("bart", ""),
    "x.pt": ("bart", ""),
    "orbax": ("bart", ""),
    "fairseq.pt": ("fairseq", "--layout fairseq"),
    "fairseq": ("fairseq", "--layout fairseq"),
    "x.npz": ("marian", "--layout marian_npz"),
    "ct2": ("ctranslate2", "--layout ctranslate2"),
}
# Forks a process per conversion, which has everything imported. `run(point)` kills it when the progress of the command
# reaches the point, a beginning of its label and a share of the bytes; `start()` returns when it begins to write.
PRELUDE = """
import json, os, random, shutil, signal, sys, time
from contextlib import contextmanager
from pathlib import Path
import torch
from twinax import cli
from twinax.cli.checkpoints import convert_command, convert_report

target = Path(sys.argv[2])
command = ["convert", *sys.argv[1:3], *sys.argv[3].split()]

def fork(arguments, point=None):
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader

    @contextmanager
    def progress_bar(**options):
        yield show

    def show(label, completed, total):
        os.write(writer, b"x")
        if point and label.startswith(point[0]) and completed >= point[1] * total:
            os.kill(os.getpid(), signal.SIGKILL)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    convert_report.progress_bar = progress_bar
    sys.argv = ["twinax", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        os._exit(end.code)

def wait(fork):
    child, reader = fork
    while os.read(reader, 1 << 16):
        pass
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def start():
    child, reader = fork(command)
    os.read(reader, 1)
    return child, reader

def run(point=None):
    return wait(fork(command, point))

def present():
    return {path.name for path in target.parent.iterdir()} - {"dict.src.txt", "dict.tgt.txt"}

def remove():
    for path in target.parent.iterdir():
        if path.name[0] != ".":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
"""
AT_POINTS = """
for point in json.loads(sys.argv[4]):
    assert run(point) == -signal.SIGKILL, point
    (left,) = present()
    assert left.startswith(f".{target.name}.twinax-"), left
assert run() == 0
assert present() == {target.name}, present()
"""
AT_RANDOM = """
rng, counts = random.Random(0), {"kills": 0, "left something": 0, "whole": 0}
first = start()
begin = time.monotonic()
wait(first)
duration = time.monotonic() - begin
while counts["kills"] < int(sys.argv[4]):
    remove()
    process = start()
    time.sleep(rng.uniform(0, duration))
    os.kill(process[0], signal.SIGKILL)
    wait(process)
    hidden = present() - {target.name}
    assert len(hidden) <= 1, hidden
    counts["kills"] += 1
    counts["left something"] += bool(hidden)
    if target.exists():
        counts["whole"] += 1
        assert wait(fork(["inspect", str(target)])) == 0
remove()
assert run() == 0
assert present() == {target.name}, present()
print(json.dumps(counts))
"""


SIZES = {"src_vocab_size": 900, "tgt_vocab_size": 900, "d_model": 128, "num_heads": 4, "d_ff": 1024}
SIZES |= {"decoder_num_heads": None, "decoder_d_ff": None, "num_encoder_layers": 2, "num_decoder_layers": 2}


def config_of(family):
    """The config of a model of 6 MB; that for CTranslate2 has the vocabulary of a stored tokenizer."""
    if family == "bart":
        settings = {"pad_token_id": 1, "max_position_embeddings": 40}
        return convert.family("bart").config(settings, "float32").replace(**SIZES)
    if family == "marian":
        config = marian_npz.config_of({}, 900, None, "float32")
        return config.replace(**SIZES)
    if family == "fairseq":
        return fairseq.config_of({"arch": "transformer"}, (900, 900), "float32").replace(**SIZES)
    sizes = {**SIZES, "src_vocab_size": 20, "tgt_vocab_size": 20}
    return load(STORED).config.replace(**sizes)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """The file of a checkpoint, by family."""
    folder = tmp_path_factory.mktemp("sources")

    def write(family):
        path = folder / f"{family}.safetensors"
        if not path.exists():
            config = config_of(family)
            arrays = random_arrays(config, 0)
            if family in ("marian", "fairseq"):  # neither stores the row of padding, which is not trained
                for name in ("src_embedding.embedding", "tgt_embedding.embedding"):
                    arrays[name][config.pad_id] = 0
            if family == "marian":
                arrays["output.proj.kernel"][:, config.pad_id] = 0
                arrays["output.bias"][config.pad_id] = marian_npz.PAD_BIAS
            files = load(STORED).files if family == "ctranslate2" else {}
            convert.save(Checkpoint(config, arrays, files=files), path)
        return path

    return write


def kill_and_convert(form, kills, code, source_of, folder, forks):
    """What the code prints; fails if anything incomplete has the target's name, or hidden files remain."""
    family, flags = FORMS[form]
    source, target = source_of(family), folder / "out" / form
    target.parent.mkdir()
    result = forks(PRELUDE + code, source, target, flags, json.dumps(kills))
    assert result.returncode == 0, result.stderr
    different = compare_checkpoints(load(source), load(target)).different
    assert [name for name in different if not name.endswith(".table")] == []  # which fairseq recomputes
    return target, result.stdout


@pytest.mark.parametrize("form", ["shards", "x.pt"])
def test_nothing_has_the_name_before_it_is_verified(form, source_of, tmp_path, forks):
    """Kills in the middle of writing, which of a .pt has no progress, and before and after the comparison."""
    points = [("writing", 0.5)] * (form == "shards") + [("comparing", 0), ("comparing", 1)]
    target, _ = kill_and_convert(form, points, AT_POINTS, source_of, tmp_path, forks)
    assert form != "shards" or (target / "README.md").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_fifty_kills(form, source_of, tmp_path, forks, capsys):
    _, output = kill_and_convert(form, 50, AT_RANDOM, source_of, tmp_path, forks)
    counts = json.loads(output.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{form}: {counts}")
    assert counts["kills"] == 50
    assert counts["left something"] > 0
