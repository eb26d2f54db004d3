"""The flags of `twinax demo`."""

from pathlib import Path

from ...backend.torch_package import require_torch
from ..process.importing import import_without_gc
from ..usage import UsageError, enable_compilation_cache, one_line_errors
from .shared import flags


@flags
class Demo:
    """Learn a little Italian in two minutes, translate unseen sentences, and prove both twins equal.

    Needs no files and no network. Exits with 0 if the twins agree on every token and rung, and the round trip is exact.

    Example: twinax demo

    Attributes:
        out: directory for corpus, run, pictures and weights; the same command resumes.
        updates: number of training updates.
        test: sentences in each of the two test sets.
    """

    out: str = "runs/demo"
    updates: int = 1000
    test: int = 500

    def execute(self) -> int:
        """The exit status: 0 if the twins agree, 1 if not, 128 + n if signal n stopped it. Raises: UsageError."""
        if self.updates < 2 or self.test < 1:
            raise UsageError(f"--updates {self.updates} --test {self.test}: must be at least 2 and 1")
        with one_line_errors():
            require_torch("twinax demo")
            enable_compilation_cache()
            demo = import_without_gc("twinax.cli.demo.demo").demo
            results = demo(Path(self.out), self.updates, self.test)
        if results.stopped_by is not None:
            return 128 + results.stopped_by
        return 0 if results.ladder and not results.differing_tokens and len({*results.equal_arrays}) == 1 else 1
