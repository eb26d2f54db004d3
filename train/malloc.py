"""Freed memory, kept by the process: XLA on a CPU asks for the same buffers at every step."""

import ctypes

# Options of mallopt in glibc's malloc.h, and what they are set to: memory comes from one heap, which never shrinks.
_OPTIONS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}


def keep_freed_memory() -> bool:
    """Lets glibc keep what is freed for the rest of the process: (whether it does).

    By itself it returns large buffers at once, and the kernel clears every page of them anew at the next step. What
    that costs is in docs/performance.md; the process stays as large as it ever was. It has to come before JAX starts
    its threads: one that has a heap of its own by then goes on returning it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another system, or another library
        return False
    return all(mallopt(*option) for option in _OPTIONS.values())
