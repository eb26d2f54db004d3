"""glibc settings that keep freed memory in the process: on a CPU, XLA allocates the same buffers in every step."""

import ctypes

# mallopt option -> (its number in glibc's malloc.h, value). Together: one heap, which never shrinks.
_OPTIONS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory until the process ends; return whether it does.

    By default glibc returns large buffers to the system, and the kernel clears all their pages again in the next step;
    docs/performance.md has the cost. The process then stays at its peak size. Call this before JAX starts its threads:
    a thread that already has its own heap keeps returning memory.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another system, or another library
        return False
    return all(mallopt(*option) for option in _OPTIONS.values())
