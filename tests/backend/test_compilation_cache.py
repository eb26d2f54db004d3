"""The next process reads the programs that a command compiled."""

import json
from pathlib import Path

import jax
import pytest

from twinax.backend import compilation_cache

MODEL = Path(__file__).parents[1] / "checkpoints" / "v1"
# The oracle is JAX's own count of hits and misses.
COUNTED = """
import json, sys
import jax
counts = dict.fromkeys(("cache_hits", "cache_misses"), 0)
def count(event, **rest):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1
jax.monitoring.register_event_listener(count)
from twinax import cli
sys.argv = ["twinax", *sys.argv[1:]]
try:
    cli.main()
finally:
    print(json.dumps(counts), file=sys.stderr)
"""


def test_the_second_process_compiles_nothing(tmp_path, forks):
    (tmp_path / "src").write_text("a b\n")
    arguments = ["translate", MODEL, tmp_path / "src", "--beam-size", "1", "--max-length", "3"]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_COMPILATION_CACHE_DIR": None}
    own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = None
    outputs, counts = [], []
    for _ in range(2):
        result = forks(COUNTED, *arguments, **own)
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout)
        counts.append(json.loads(result.stderr.splitlines()[-1]))
    programs = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "twinax" / "xla").glob("*-cache")}
    assert {"jit_prefill", "jit_extend"} <= programs
    assert outputs == ["A B\n"] * 2
    assert counts[0]["cache_hits"] == 0
    assert counts[1] == {"cache_hits": counts[0]["cache_misses"], "cache_misses": 0}
    for path in (tmp_path / "cache" / "twinax" / "xla").glob("jit_extend-*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    result = forks(COUNTED, *arguments, **own)
    assert (result.returncode, result.stdout) == (0, "A B\n")
    assert "Error reading persistent compilation cache entry for 'jit_extend'" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("translate", MODEL, "text"),
        ("evaluate", MODEL, "--src", "text", "--tgt", "text"),
        ("score", MODEL, "--src", "text", "--tgt", "text"),
        ("parity", "tiny"),
        ("audit", "tiny"),
        ("demo",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_each_command_that_compiles_enables_the_cache(arguments, command, monkeypatch, tmp_path):
    def enabled():
        raise OSError(0, "is enabled", "the cache")

    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a b\n")
    monkeypatch.setattr(compilation_cache, "use_compilation_cache", enabled)
    assert command(*arguments) == (2, "", "twinax: the cache: is enabled\n")


def test_settings_of_the_user_take_precedence(monkeypatch, tmp_path):
    settings = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
        assert compilation_cache.use_compilation_cache() == tmp_path / "own"
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 7
        monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
        compilation_cache.use_compilation_cache()
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
        jax.config.update("jax_compilation_cache_dir", None)
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no directory can be made there
        assert compilation_cache.use_compilation_cache() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", settings[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", settings[1])
