"""An audit as one HTML page, which needs no other file and no script."""

from collections.abc import Sequence

from ..backend.environment import environment
from ..backend.page import render
from .audit_report import Audit


def page(audit: Audit, command: str = "", notes: Sequence[str] = ()) -> str:
    """The page; `command` repeats the audit, `notes` say what was assumed about the model."""
    return render(
        "audit/page.html",
        ("audit/page.css",),
        audit=audit,
        verdict=audit.verdict,
        command=command,
        notes=notes,
        machine=environment(),
    )
