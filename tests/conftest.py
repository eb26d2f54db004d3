"""What tests of the command share."""

import shutil
import sys
import warnings

import pytest


@pytest.fixture
def command(capsys, monkeypatch):
    """Calls `twinax` in this process: (exit status, standard output, standard error)."""

    def call(*arguments):
        from twinax import cli

        monkeypatch.setattr(sys, "argv", ["twinax", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """A directory of each family's variants, as `transformers` writes it; not to be changed."""
    from twinax.parity.conversion import VARIANTS, random_model

    folder = tmp_path_factory.mktemp("theirs")
    with warnings.catch_warnings(action="ignore"):  # `transformers` says how it writes
        for name in VARIANTS:
            random_model(name).save_pretrained(folder / name)
    return folder


@pytest.fixture
def bart(directories, tmp_path):
    """A directory of BART that a test may damage."""
    return shutil.copytree(directories / "BART", tmp_path / "bart")
