"""`twinax capture`: records a model for a comparison elsewhere, or writes the program that does."""

from pathlib import Path

from ...compare.capture.program import record, write_program
from ...compare.capture.trace import CaptureError
from ..flags.proofs import Capture
from ..usage import UsageError, check_outputs


def run(flags: Capture) -> int:
    """Write the recording, or the recorder; the exit status."""
    if flags.program is not None:
        if flags.model is not None:
            raise UsageError(f"--program {flags.program}: writes the recorder and records nothing; omit {flags.model}")
        if Path(flags.program).suffix != ".pyz":
            raise UsageError(f"--program {flags.program}: must end in .pyz")
        check_outputs([flags.program], [])
        write_program(flags.program)
        print(f"{flags.program}: python {flags.program} MODEL.PY:FUNCTION --inputs BATCH.npz --out REFERENCE.trace")
        return 0
    model, inputs = _given("MODEL.PY:FUNCTION", flags.model), _given("--inputs", flags.inputs)
    out = _given("--out", flags.out)
    check_outputs([out], [name.rpartition(":")[0] or name for name in (model, inputs)])
    try:
        print(record(model, inputs, out, flags.gradients, flags.dropout, flags.layers))
    except CaptureError as error:
        raise UsageError(str(error)) from None
    return 0


def _given(name: str, value: str | None) -> str:
    if value is None:
        raise UsageError(f"{name}: is missing; see twinax capture --help")
    return value
