"""SIGKILL at random moments of a conversion: nothing looks whole, and the next run removes what was left.

Two kills of two forms here; `make kill-test` does fifty of each form and prints its counts.
"""

import json
import shutil

import pytest
from transformers import BartConfig, BartForConditionalGeneration

from twinax.convert import load
from twinax.convert.verification import compare_checkpoints

FORMS = {  # name -> layout, bytes per shard
    "directory": ("bart", None),
    "shards": ("bart", 2_000_000),
    "x.safetensors": ("twinax", None),
    "x.pt": ("twinax", None),
    "orbax": ("twinax", None),
}
# Forks a process per kill, which has everything imported; prints what was seen as JSON.
CODE = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from twinax import convert

source, target, layout = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
shard, kills = json.loads(sys.argv[4]), int(sys.argv[5])
rng = random.Random(0)
counts = {"kills": 0, "left something": 0, "whole": 0}

def start():
    # returns when the child begins to write
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        checkpoint = convert.load(source, memory_map=True)
        os.write(writer, b"x")
        convert.save(checkpoint, target, layout=layout, max_shard_size=shard)
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return child

def load_in_child():
    child = os.fork()  # here, it would start threads, which a fork lacks
    if child == 0:
        convert.load(target)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def present():
    return {path.name for path in target.parent.iterdir()}

child = start()
begin = time.monotonic()
os.waitpid(child, 0)
duration = time.monotonic() - begin
while counts["kills"] < kills:
    if target.is_dir():
        shutil.rmtree(target)
    elif target.exists():
        target.unlink()
    child = start()
    time.sleep(rng.uniform(0, 1.1 * duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    counts["kills"] += 1
    counts["left something"] += bool(present() - {target.name})
    assert len(present() - {target.name}) <= 1, present()
    if target.exists():
        counts["whole"] += 1
        assert load_in_child() == 0
if not target.exists():
    assert os.waitpid(start(), 0)[1] == 0
assert present() == {target.name}, present()
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A BART of 6 MB."""
    sizes = {"vocab_size": 900, "max_position_embeddings": 40, "d_model": 128, "pad_token_id": 1}
    sizes |= {f"{side}_layers": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 1024 for side in ("encoder", "decoder")}
    folder = tmp_path_factory.mktemp("bart") / "model"
    BartForConditionalGeneration(BartConfig(**sizes)).save_pretrained(folder)
    return folder


def kill_and_convert(form, kills, source, folder, forks):
    """Counts of events; fails if anything incomplete is at the target, or hidden files remain."""
    layout, shard = FORMS[form]
    target = folder / "out" / form
    target.parent.mkdir()
    result = forks(CODE, source, target, layout, json.dumps(shard), kills)
    assert result.returncode == 0, result.stderr
    assert not compare_checkpoints(load(source), load(target)).different
    shutil.rmtree(target.parent)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("form", ["directory", "x.pt"])
def test_two_kills(form, source, tmp_path, forks):
    assert kill_and_convert(form, 2, source, tmp_path, forks)["kills"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_fifty_kills(form, source, tmp_path, forks, capsys):
    counts = kill_and_convert(form, 50, source, tmp_path, forks)
    with capsys.disabled():
        print(f"\n{form}: {counts}")
    assert counts["kills"] == 50
    assert counts["left something"] > 0
