"""`twinax audit`: finds mistakes in a model."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ...audit import AuditError, audit_config
from ...audit.page import page
from ...configs import TransformerConfig
from ...configs.training import TrainingConfig
from ...convert import load
from ...convert.weight_files.reading import read_json
from ...presets.models import PRESETS
from ...published.registry import SYSTEMS
from ...train.tracking.progress import progress_bar
from ..flags.proofs import Audit
from ..usage import UsageError, check_outputs, check_report, report_assumed, write_json, write_text

REPAIRED = "repaired"
_RANDOM = "weights: random, because a config has none"


@dataclass(frozen=True)
class _Model:
    config: TransformerConfig
    training: TrainingConfig | None = None
    arrays: Any = None  # None: random weights
    notes: tuple[str, ...] = ()  # what was assumed


def examine(flags: Audit) -> bool:
    """Print the audit; return whether the model has no mistake."""
    check_report(flags.report)
    check_outputs([flags.json_file, flags.report], [flags.model])
    subject = _load(flags.model)
    with progress_bar() as progress:
        try:
            audit = audit_config(
                subject.config,
                name=flags.model,
                arrays=subject.arrays,
                training=subject.training,
                seed=flags.seed,
                progress=progress,
            )
        except AuditError as error:
            raise UsageError(f"{flags.model}: {error}") from None
    console = Console()
    for table in audit.tables():
        console.print(table)
    for answer in audit.findings:
        console.print(f"{answer.question} No. {answer.breaks}", markup=False, highlight=False, style="red")
    if audit.dtype_line:
        console.print(audit.dtype_line, markup=False, highlight=False, style="dim")
    notes = list(subject.notes)
    if subject.arrays is None:
        notes.append(_RANDOM)
        console.print(_RANDOM, style="dim")
    if flags.json_file is not None:
        write_json(flags.json_file, audit.document())
    if flags.report is not None:
        command = shlex.join(["twinax", "audit", flags.model, "--seed", str(flags.seed)])
        write_text(flags.report, page(audit, command, notes))
    return audit.ok


def _load(model: str) -> _Model:
    """Load a preset, a published system, a config from a JSON file, or a checkpoint."""
    name, _, variant = model.partition(":")
    if model in PRESETS:
        return _Model(TransformerConfig.preset(model))
    if name in SYSTEMS and variant in ("", REPAIRED):
        as_published = not variant
        config = TransformerConfig.published(name, as_published=as_published)
        return _Model(config, TrainingConfig.published(name, as_published=as_published))
    if Path(model).is_file() and Path(model).suffix == ".json":
        values = read_json(Path(model))
        return _Model(TransformerConfig.from_dict(values.get("model", values)))  # a run's config contains the model's
    checkpoint = load(model)
    report_assumed(model, checkpoint)
    training = checkpoint.training.run.training if checkpoint.training is not None else None
    notes = (f"assumed: {', '.join(checkpoint.assumed)}",) if checkpoint.assumed else ()
    return _Model(checkpoint.config, training, checkpoint.arrays, notes)
