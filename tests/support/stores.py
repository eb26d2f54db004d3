"""Stores of encoded pairs for tests."""

import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp

from twinax.train.data.store_writing import Request, stored_pairs


def store_of(pairs, sides, **settings):
    """The store of some pairs, in a folder that is removed with it."""
    folder = Path(mkdtemp())
    try:
        stored = stored_pairs(folder, Request("x", pairs, len(pairs), sides, {}, **settings), print)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # it is gone if no pair was kept
        raise
    weakref.finalize(stored, shutil.rmtree, folder)
    return stored


def ids_of(pairs, rows=None):
    """(ids of each source, ids of each target)."""
    rows = range(len(pairs)) if rows is None else rows
    return [[ids.tolist() for ids in side(rows)] for side in (pairs.sources, pairs.targets)]
