"""Importing the command's modules leaves the garbage collector on, and their objects out of its collections."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from twinax.cli.process.importing import import_without_gc

COUNTED = """
import atexit, gc, sys
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 20_000))
from twinax.cli.entry import main
sys.argv = ["twinax", *sys.argv[1:]]
main()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    gc.unfreeze()


def test_the_collector_is_off_only_during_the_import(folder):
    (folder / "twinax_imported.py").write_text("import gc\nenabled, objects = gc.isenabled(), [[] for _ in range(9)]\n")
    frozen = gc.get_freeze_count()
    module = import_without_gc("twinax_imported")
    assert not module.enabled
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
    assert not any(tracked is module.objects for tracked in gc.get_objects())


def test_a_module_that_is_imported_already_freezes_nothing():
    frozen = gc.get_freeze_count()
    assert import_without_gc(Path.__module__) is sys.modules[Path.__module__]
    assert gc.get_freeze_count() == frozen


def test_the_collector_is_on_again_after_an_import_that_fails(folder):
    (folder / "twinax_failing.py").write_text("raise OSError('no file')\n")
    with pytest.raises(OSError, match="no file"):
        import_without_gc("twinax_failing")
    assert gc.isenabled()


@pytest.mark.parametrize("arguments", [["--version"], ["inspect", "nothing"]])
def test_every_command_starts_that_way(arguments):
    result = subprocess.run([sys.executable, "-c", COUNTED, *arguments], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "True True", result.stderr
