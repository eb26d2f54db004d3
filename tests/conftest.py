"""Shared fixtures: the command, Python code in separate processes, Hugging Face directories."""

import functools
import json
import os
import shutil
import subprocess
import sys
import warnings
from typing import NamedTuple

import numpy as np
import pytest

# JAX and PyTorch take seconds to import. Each job runs in a fork of this process, which has imported both but
# started neither.
_FORKS = """
import gc, json, os, sys, traceback
import flax.nnx, jax, torch, transformers

def run(job):
    for descriptor, name in enumerate(job["streams"]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
    os.chdir(job["cwd"])
    for name, value in job["environment"].items():
        os.environ[name] = value or ""
        if value is None:
            del os.environ[name]
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    sys.argv, status = ["-c", *job["arguments"]], 0
    try:
        exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Finished(NamedTuple):
    """Exit status and output of a process."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Run Python code in a separate process: (code, *arguments, cwd, environment) -> `Finished`.

    A variable of the environment that is None is removed.
    """
    folder = tmp_path_factory.mktemp("forks")
    server = subprocess.Popen([sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(code, *arguments, cwd=folder, **environment):
        streams = [os.devnull, str(folder / "stdout"), str(folder / "stderr")]
        for name in streams[1:]:
            open(name, "w").close()
        job = {"code": code, "arguments": [str(a) for a in arguments], "cwd": str(cwd), "streams": streams}
        print(json.dumps({**job, "environment": environment}), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return Finished(status, *((folder / name).read_text() for name in ("stdout", "stderr")))

    yield run
    server.communicate()


@pytest.fixture(scope="module")
def shared_programs():
    """One train step and loss of validation per config, shared by the runs of a file; one plot per run."""
    from twinax.train.loop import evaluate
    from twinax.train.step import step_programs
    from twinax.train.tracking import plot

    plot_losses = plot.plot_losses
    with pytest.MonkeyPatch.context() as context:
        context.setattr(step_programs, "make_train_step", functools.cache(step_programs.make_train_step))
        context.setattr(evaluate, "make_validation_loss", functools.cache(evaluate.make_validation_loss))
        context.setattr(plot, "plot_losses", lambda records, path: path.exists() or plot_losses(records, path))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Lower-case words and, as their translation, the same words in upper case."""
    from twinax.configs.data import CorpusConfig

    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    sentences = [" ".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(80)]
    for name, text in (("src", "\n".join(sentences)), ("tgt", "\n".join(sentences).upper())):
        (folder / name).write_text(text + "\n")
    return CorpusConfig(src=str(folder / "src"), tgt=str(folder / "tgt"), held_out=10)


@pytest.fixture
def command(capsys, monkeypatch):
    """Call `twinax` in this process; returns (exit status, standard output, standard error)."""

    def call(*arguments):
        from twinax.cli import commands

        monkeypatch.setattr(sys, "argv", ["twinax", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            commands.main()
        return exit_info.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """One directory per variant of each family, as `transformers` writes it; tests must not change it."""
    from parity_tests.support.conversion import VARIANTS, random_model

    folder = tmp_path_factory.mktemp("theirs")
    with warnings.catch_warnings(action="ignore"):  # `transformers` warns about how it writes
        for name in VARIANTS:
            random_model(name).save_pretrained(folder / name)
    return folder


@pytest.fixture
def bart(directories, tmp_path):
    """A copy of the BART directory that a test may damage."""
    return shutil.copytree(directories / "BART", tmp_path / "bart")
