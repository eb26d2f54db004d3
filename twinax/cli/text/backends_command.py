"""`twinax parity --backends`: one beam search in Flax, PyTorch, `transformers` and CTranslate2."""

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from ...backend.errors import DataError
from ...configs.decoding import DecodingConfig
from ...convert.formats.ctranslate2 import QUANTIZATIONS
from ...convert.formats.generation import longest_translation
from ...convert.formats.registry import describe
from ...inference.translator import load
from ...parity.search.backends import BACKENDS, BEAM_SIZES, BackendAgreement, compare_backends, load_searches
from ...train.text.corpus import read_lines
from ...train.tracking.progress import progress_bar
from ..flags.proofs import Parity
from ..usage import UsageError, check_outputs, report_assumed, write_json
from .text_commands import decoding_in


def compare_searches(flags: Parity) -> bool:
    """Compare the n-best lists of backends and print a table; return whether rounding explains all differences."""
    check_outputs([flags.json_file], [flags.model, flags.src, flags.adapter])
    DecodingConfig(max_length=flags.max_length)  # checks the value
    names = [name.strip() for name in (flags.backends or "").split(",")]
    if unknown := [name for name in names if name not in BACKENDS]:
        raise UsageError(
            f"--backends {flags.backends}: {unknown[0]!r} is not a backend; choose from {','.join(BACKENDS)}"
        )
    if flags.src is None:
        raise UsageError(f"--backends {flags.backends}: needs --src, the sentences to translate")
    translator = decoding_in(load(flags.model, adapter=flags.adapter), **flags.languages)
    report_assumed(translator.name, translator.checkpoint)
    sources = {line: ids for line, ids in enumerate(translator.source_ids(list(read_lines(flags.src))), 1) if ids}
    if not sources:
        raise DataError(f"{flags.src}: has no sentence")
    longest = flags.max_length or longest_translation(translator.checkpoint.documents, translator.config)
    with TemporaryDirectory(prefix="twinax-backends-") as folder, progress_bar() as progress:
        searches, missing = load_searches(translator.checkpoint, dict.fromkeys(names), Path(folder))
        if not searches:
            reasons = "; ".join(f"{backend} {reason}" for backend, reason in missing.items())
            raise UsageError(f"--backends {flags.backends}: nothing to compare: {reasons}")
        agreements: list[BackendAgreement] = []
        for beam_size in BEAM_SIZES:
            agreements += compare_backends(
                translator.checkpoint,
                searches,
                sources,
                beam_size,
                lambda count, beam_size=beam_size: progress(f"searches, beam {beam_size}", count, len(sources)),
                longest,
            )
    _show(agreements, len(sources))
    if (form := describe(Path(flags.model))).endswith(QUANTIZATIONS):
        print(f"{flags.model} is a {form}: all backends computed in float32 with the rounded weights")
    for backend, reason in missing.items():
        print(f"{backend}: {reason}")
    equal = all(agreement.ok for agreement in agreements)
    print(("equal" if equal else "DIFFERENT") + (f", without {', '.join(missing)}" if missing else ""))
    if flags.json_file is not None:
        document = {"backends": [agreement.document() for agreement in agreements], "missing": missing, "equal": equal}
        write_json(flags.json_file, document)
    return equal


def _show(agreements: list[BackendAgreement], sentences: int) -> None:
    title = "n-best lists in float32 against PyTorch in float64"
    table = Table("beam", "backend", title=title, title_justify="left")
    for name in ("sentences equal", "within rounding", "DIFFERENT", "largest difference of sums"):
        table.add_column(name, justify="right")
    for agreement in agreements:
        rounding = len(agreement.certificates) - len(agreement.different)
        error = "no scores" if agreement.score_error is None else f"{agreement.score_error:.1e}"
        error += "" if agreement.has_equal_scores else " DIFFERENT"
        counts = (f"{agreement.equal:,} of {sentences:,}", f"{rounding:,}", f"{len(agreement.different):,}")
        table.add_row(str(agreement.beam_size), agreement.backend, *counts, error)
    console = Console()
    console.print(table)
    for agreement in agreements:
        for certificate in agreement.certificates:
            line = f"beam {agreement.beam_size}, {agreement.backend}, {certificate}"
            console.print(line, style="" if certificate.is_rounding else "red", markup=False, soft_wrap=True)
