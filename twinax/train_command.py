"""`twinax train`."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from twinax.presets.runs import RUN_NAMES

from .run_arguments import parse
from .usage import one_line_errors

_DESCRIPTION = f"""Train a model: a ready-made run ({RUN_NAMES}), or your own parallel text, or go on with a run.

Examples: twinax train --src train.de --tgt train.en --valid-src val.de --valid-tgt val.en --out runs/de_en;
twinax train multi30k_de_en --model.d-model 256; twinax train runs/de_en

A run directory gets checkpoints, tokenizers, metrics.jsonl, TensorBoard files and loss.png. Ctrl-C and SIGTERM save and
end; the same command, or the directory alone, goes on with the same numbers. The flags of the corpus may be written
without their "corpus.": --src, --tgt, --dataset, --valid-src, and so on."""


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 finished; 128 + n stopped by signal n, saved."""
    parsed = parse(arguments, "twinax train", _DESCRIPTION)
    if parsed.print_config:
        print(parsed.run.to_json(), end="")
        print(
            "twinax: where something is null, and for vocabulary sizes and special ids, the corpus decides when "
            "training begins; the run directory's config.json has it then",
            file=sys.stderr,
        )
        return 0
    from twinax.train.loop import train

    before = signal.signal(signal.SIGTERM, _terminated)  # until the loop has its own
    try:
        with one_line_errors():
            outcome = train(parsed.run, parsed.out)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _terminated(number: int, frame: FrameType | None) -> None:
    print("twinax: terminated before the first update of this start; the same command begins it again", file=sys.stderr)
    sys.exit(128 + number)
