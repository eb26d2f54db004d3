"""Imports of a command's modules without garbage collection, which would take a good part of its start."""

import gc
import sys
from importlib import import_module
from types import ModuleType


def import_without_gc(name: str) -> ModuleType:
    """Import a module with the garbage collector off, and exempt its objects from later collections.

    Modules live as long as the process, but every full collection would traverse their objects. Call this before
    checkpoints are read: all other objects that exist by then are exempted too.
    """
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()
