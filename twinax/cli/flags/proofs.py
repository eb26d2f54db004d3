"""The flags of `twinax parity`, `twinax audit`, `twinax compare` and `twinax capture`."""

from collections.abc import Iterable
from difflib import get_close_matches
from os.path import exists
from typing import Annotated

import tyro

from ...backend.torch_package import require_torch
from ..process.importing import import_without_gc
from ..usage import UsageError, check_exists, download_hint, enable_compilation_cache, one_line_errors
from .shared import JsonFile, Languages, Switch, flags


@flags
class Parity(Languages):
    """Prove that the Flax and the PyTorch twin of a model compute the same function, or that two checkpoints do.

    Prints the ladder as a table: for every rung, the largest float64 difference, and in float32 and bfloat16 the ratio
    of the twins' errors. A Hugging Face directory is compared with `transformers` too. With two checkpoints, PyTorch
    computes the first and Flax the second. Exits with 0 if every rung passes (on text, only float64 counts) and no
    translation differs beyond rounding, else with 1.

    Example: twinax parity tiny

    Attributes:
        model: a preset (tiny, small, base, big, t5_small) with random weights, or any checkpoint: run, Hugging Face
            directory, .pt, .safetensors. tiny takes half a minute; base and big take minutes and gigabytes.
        second: a second checkpoint.
        src: text file, one sentence per line (.gz too), as input of the comparison; default: random tokens.
        tgt: its translations; default: the model's own.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of the first Hugging Face directory.
        translations: also translate every sentence of --src in both frameworks, greedily and with a beam of 5, and
            compare the tokens.
        max_length: maximum length of a translation in tokens, including EOS; default: the Hugging Face directory's,
            else the model's maximum.
        backends: instead of the ladder, compare beam search on --src in these backends, greedily and with a beam of 5:
            flax,torch,transformers,ctranslate2 or some of them. Prints a certificate for each sentence that differs.
        shape: sentences x tokens of the random batches, such as 256x64 on both sides; loss and gradients are then those
            of the compiled program that trains.
        seed: seed of random tokens and weights, and of the order of sentences.
        json_file: JSON file to write the results to.
        report: HTML file to write the results to, with the errors by layer and the attention weights of both models.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[MODEL]")] = "tiny"
    second: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    src: str | None = None
    tgt: str | None = None
    adapter: str | None = None
    translations: Switch = False
    max_length: int | None = None
    backends: Annotated[str | None, tyro.conf.arg(aliases=("--engines",))] = None
    shape: str | None = None
    seed: int = 0
    json_file: JsonFile = None
    report: str | None = None

    def execute(self) -> int:
        """The exit status: 0 if everything is equal, else 1. Raises: UsageError."""
        from ...presets.models import PRESETS

        _check_seed(self.seed)
        if self.model not in PRESETS and not exists(self.model):
            hint = _hint(self.model, PRESETS) + download_hint(self.model)
            raise UsageError(f"{self.model}: is neither a preset ({', '.join(PRESETS)}) nor a checkpoint{hint}")
        check_exists(*filter(None, (self.second, self.src, self.tgt, self.adapter)))
        with one_line_errors():
            require_torch("twinax parity")
            enable_compilation_cache()
            if self.backends is None:
                return int(not import_without_gc("twinax.cli.proofs.parity_command").prove(self))
            if self.model in PRESETS or self.second or self.tgt or self.translations or self.shape or self.report:
                raise UsageError(
                    f"--backends {self.backends}: compares one checkpoint; omit presets, --tgt, --translations, "
                    "--shape and --report"
                )
            return int(not import_without_gc("twinax.cli.text.backends_command").compare_searches(self))


@flags
class Audit:
    """Find mistakes in a Transformer: information leaks, unused inputs, parameters that do not learn.

    Each answer is a measurement in float64, with the first part of the model where the mistake occurs. For a published
    system, each mistake is listed with the setting that repairs it. Exits with 0 if there is no mistake, else with 1.
    To audit your own module, use twinax.audit.audit in Python.

    Example: twinax audit runs/de_en

    Attributes:
        model: a preset (tiny, small, base, big, t5_small), a published system (lucky_glass, or lucky_glass:repaired), a
            config as JSON, or any checkpoint: run, Hugging Face directory, .pt, .safetensors.
        seed: seed of the tokens, and of the weights if the model has none.
        json_file: JSON file to write the results to.
        report: HTML file to write the results to, with the consequences of each defect.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    seed: int = 0
    json_file: JsonFile = None
    report: str | None = None

    def execute(self) -> int:
        """The exit status: 0 if there is no mistake, else 1. Raises: UsageError."""
        from ...presets.models import PRESETS
        from ...published.registry import SYSTEMS

        _check_seed(self.seed)
        if self.model.endswith(".py") or ".py:" in self.model:
            raise UsageError(f"{self.model}: audit a module of your own from Python, with twinax.audit (docs/audit.md)")
        names = {*PRESETS, *SYSTEMS, *(f"{name}:repaired" for name in SYSTEMS)}
        if self.model not in names and not exists(self.model):
            raise UsageError(
                f"{self.model}: is not a preset ({', '.join(PRESETS)}), a published system ({', '.join(SYSTEMS)}) or a "
                f"checkpoint{_hint(self.model, names)}"
            )
        with one_line_errors():
            require_torch("twinax audit")
            enable_compilation_cache()
            return int(not import_without_gc("twinax.cli.proofs.audit_command").examine(self))


@flags
class Compare:
    """Find where two models of your own diverge: a PyTorch module and its JAX port, or any two.

    Each function returns a torch, NNX or Equinox module, a pair (Linen module, variables), or a pair (function of
    (parameters, *inputs), parameters). Names and layouts do not matter. Prints every independent difference with the
    lines of both sides and a verified fix. Exits with 0 if both are equal on these inputs, 1 if they differ, else 2.

    Example: twinax compare ref.py:make port.py:make --inputs batch.npz

    Attributes:
        reference: file and function that returns the reference model, or a .trace file of `twinax capture`, which has
            the inputs too.
        candidate: file and function that returns the port; if it takes an argument, that is the reference's
            parameters, arrays by name. Or a .trace file.
        inputs: .npz file with the inputs in their order (.npy: one input), or file.py:function that returns them.
        candidate_inputs: inputs for the candidate, if they differ, for example with channels last.
        convert: file and function that returns the candidate's parameters from the reference's, arrays by name.
        rules: TOML file that says which parameter is which, as --write-rules writes it. If the port has other weights
            and neither is given, the map is inferred.
        write_rules: TOML file to write the inferred map to, and a converter as Python code beside it.
        gradients: compare the gradients of all parameters too.
        optimizer: compare updates too: adamw, adam, sgd, … as PyTorch and Optax have them, or two functions: one of
            (name, parameter) pairs that returns a torch optimizer, one that returns an Optax transformation.
        dropout: the functions return models in training mode; the candidate gets the reference's dropout masks.
        no_rounding: leave out the comparison of errors in float32 and bfloat16.
        layers: call both functions with layers=N, which they use for a smaller model.
        json_file: JSON file to write the results to.
        report: HTML file to write the results to, with the source lines, both traces side by side and the weight map.
    """

    reference: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="REF.PY:FUNCTION")]
    candidate: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CAND.PY:FUNCTION")]
    inputs: str | None = None
    candidate_inputs: str | None = None
    convert: str | None = None
    rules: str | None = None
    write_rules: str | None = None
    gradients: Switch = False
    optimizer: tuple[str, ...] = ()
    dropout: Switch = False
    no_rounding: Switch = False
    layers: int | None = None
    json_file: JsonFile = None
    report: str | None = None

    def execute(self) -> int:
        """The exit status: 0 if both are equal, 1 if they differ, else 2. Raises: UsageError."""
        with one_line_errors():
            if not (self.reference.endswith(".trace") or self.candidate.endswith(".trace")):
                require_torch("twinax compare")  # a recording of PyTorch is compared without it
            return import_without_gc("twinax.cli.proofs.compare_command").run(self)


@flags
class Capture:
    """Record a model, so that `twinax compare` can judge it in another environment or on another machine.

    The file has every operation with its values in float64 and its source line, the parameters and the inputs. Reading
    it runs no code. --program writes the same as one file that needs only Python, NumPy and PyTorch or JAX.

    Example: twinax capture ref.py:make --inputs batch.npz --out reference.trace

    Attributes:
        model: file and function that returns the model.
        inputs: .npz file with the inputs in their order (.npy: one input), or file.py:function that returns them.
        out: file to write; it ends in .trace.
        gradients: record the gradients of all parameters too, for twinax compare --gradients.
        dropout: the function returns a model in training mode, for twinax compare --dropout.
        layers: call the function with layers=N, which it uses for a smaller model.
        program: write the recorder itself to this file (.pyz), and record nothing.
    """

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL.PY:FUNCTION")] = None
    inputs: str | None = None
    out: str | None = None
    gradients: Switch = False
    dropout: Switch = False
    layers: int | None = None
    program: str | None = None

    def execute(self) -> int:
        """Write the file; the exit status. Raises: UsageError."""
        with one_line_errors():
            return import_without_gc("twinax.cli.proofs.capture_command").run(self)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be at least 0")


def _hint(name: str, names: Iterable[str]) -> str:
    return "".join(f"; did you mean {suggestion}?" for suggestion in get_close_matches(name, names, 1))
