"""Freed memory is kept: the kernel clears no pages anew."""

import platform
import subprocess
import sys

import pytest

_CODE = """
import resource
import numpy as np
from twinax.train.freed_memory import keep_freed_memory
kept = {kept} and keep_freed_memory()
for i in range(21):
    np.ones(8_000_000)  # 64 MB, which glibc gives back at once
    if i == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_pages_are_cleared_once(kept):
    done = subprocess.run([sys.executable, "-c", _CODE.format(kept=kept)], capture_output=True, text=True, check=True)
    did, faults = done.stdout.split()
    if platform.libc_ver()[0] != "glibc":
        assert did == "False"
        return
    assert did == str(kept)
    # Without it every round faults; of pages of 2 MB there are 32 in 64 MB.
    assert int(faults) < 20 if kept else int(faults) > 20 * 20
