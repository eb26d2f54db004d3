"""What tests of the command share."""

import sys

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
