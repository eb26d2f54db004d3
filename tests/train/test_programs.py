"""Programs are compiled once, in a thread in their order, or at once where they are needed."""

from threading import Event, Thread, current_thread, main_thread

import jax
import jax.numpy as jnp
import pytest

from twinax.train.step.programs import Programs


def recorder(calls, name):
    def compile_program():
        calls.append((name, current_thread() is main_thread()))
        return name

    return compile_program


def test_what_is_needed_is_compiled_ahead_of_what_waits():
    calls, begun, release = [], Event(), Event()

    def occupy_the_thread():
        begun.set()
        assert release.wait(10)
        return recorder(calls, "first")()

    programs = Programs(in_background=True)
    programs.add("first", occupy_the_thread)
    assert begun.wait(10)
    for name in ("second", "third"):
        programs.add(name, recorder(calls, name))
    programs.add("third", recorder(calls, "another"))  # is there already
    assert programs["third"] == "third"
    assert calls == [("third", True)]
    assert not programs.is_ready("second")
    release.set()
    assert (programs["first"], programs["second"], programs["third"]) == ("first", "second", "third")
    programs.close()
    assert sorted(name for name, _ in calls) == ["first", "second", "third"]
    assert ("first", False) in calls


def test_what_nobody_needs_is_not_compiled_at_the_end():
    calls, begun, release = [], Event(), Event()

    def running():
        begun.set()
        assert release.wait(10)

    programs = Programs(in_background=True)
    programs.add("running", running)
    programs.add("waiting", recorder(calls, "waiting"))
    assert begun.wait(10)
    closing = Thread(target=programs.close)
    closing.start()
    closing.join(0.2)  # cancels what waits, then waits for what runs
    assert closing.is_alive()
    release.set()
    closing.join(10)
    assert not calls


def test_several_processes_compile_in_the_foreground():
    calls = []
    programs = Programs(in_background=False)
    programs.add("a", recorder(calls, "a"))
    assert not calls
    assert programs["a"] == programs["a"] == "a"
    assert calls == [("a", True)]
    programs.close()


def test_the_thread_has_the_settings_of_its_caller():
    """Without them, a program of a float64 run would be traced in float32."""
    programs = Programs(in_background=True)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        programs.add("x", lambda: jax.jit(lambda a: a @ a).lower(jnp.zeros((2, 2))).as_text())
        text = programs["x"]
    programs.close()
    assert "f64" in text
    assert "HIGHEST" in text


def test_an_error_reaches_the_one_who_needs_the_program():
    programs = Programs(in_background=True)
    programs.add("broken", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        programs["broken"]
    programs.close()
