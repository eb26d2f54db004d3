"""The command `twinax`. Each subcommand imports what it needs when it runs."""

import re
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from os.path import exists
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..configs.verification import verifying
from .flags.foreign_flags import check_flags
from .plan.plan_command import plan
from .process.exit_status import run_and_exit
from .process.importing import import_uncollected
from .process.messages import set_encoding_errors, show_all
from .text.evaluate_command import evaluate
from .text.text_commands import score, translate
from .usage import CheckpointPath, UsageError, check_exists, download_hint, enable_compilation_cache, one_line_errors

_DESCRIPTION = """Twin encoder-decoder Transformers, one in JAX and one in PyTorch, proven equal.

Every command takes --no-verify (read checkpoints without comparing arrays with their checksums) and --verbose (list all
problems of an input, not only the first three)."""


def parity(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[MODEL]")] = "tiny",
    second: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CHECKPOINT]")] = None,
    *,
    src: str | None = None,
    tgt: str | None = None,
    adapter: str | None = None,
    translations: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    forced_bos: str | None = None,
    max_length: int | None = None,
    engines: str | None = None,
    shape: str | None = None,
    seed: int = 0,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Prove that the Flax and the PyTorch twin of a model compute the same function, or that two checkpoints do.

    Prints the ladder as a table: for every rung, the largest float64 difference, and in float32 and bfloat16 the ratio
    of the twins' errors. A Hugging Face directory is compared with `transformers` too. With two checkpoints, PyTorch
    computes the first and Flax the second. Exits with 0 if every rung passes (on text, only float64 counts) and no
    translation differs beyond rounding, else with 1.

    Example: twinax parity tiny

    Args:
        model: a preset (tiny, small, base, big, t5_small) with random weights, or any checkpoint: run, Hugging Face
            directory, .pt, .safetensors. tiny takes half a minute; base and big take minutes and gigabytes.
        second: a second checkpoint.
        src: text file, one sentence per line (.gz too), as input of the comparison; default: random tokens.
        tgt: its translations; default: the model's own.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of the first Hugging Face directory.
        translations: also translate every sentence of --src in both frameworks, greedily and with a beam of 5, and
            compare the tokens.
        src_lang: language of the source in a multilingual model: deu_Latn (NLLB), de (M2M100), de_DE (mBART).
        tgt_lang: language of the translations; Marian's too, such as fra for >>fra<<.
        forced_bos: first token of every translation, or its id.
        max_length: maximum length of a translation in tokens, including EOS; default: the Hugging Face directory's,
            else the model's maximum.
        engines: instead of the ladder, compare beam search on --src in these engines, greedily and with a beam of 5:
            flax,torch,transformers,ctranslate2 or some of them. Prints a certificate for each sentence that differs.
        shape: sentences x tokens of the random batches, such as 256x64 on both sides; loss and gradients are then those
            of the compiled program that trains.
        seed: seed of random tokens and weights, and of the order of sentences.
        json_file: JSON file to write the results to.
    """
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be at least 0")
    presets = import_module("twinax.presets.models").PRESETS
    if model not in presets and not exists(model):
        hint = "".join(f"; did you mean {suggestion}?" for suggestion in get_close_matches(model, presets, 1))
        hint += download_hint(model)
        raise UsageError(f"{model}: is neither a preset ({', '.join(presets)}) nor a checkpoint{hint}")
    check_exists(*filter(None, (second, src, tgt, adapter)))
    languages = {"--src-lang": src_lang, "--tgt-lang": tgt_lang, "--forced-bos": forced_bos}
    with one_line_errors():
        enable_compilation_cache()
        if engines is not None:
            if model in presets or second is not None or tgt is not None or translations or shape is not None:
                raise UsageError(
                    f"--engines {engines}: compares one checkpoint; omit presets, --tgt, --translations and --shape"
                )
            compare_searches = import_uncollected("twinax.cli.text.engines_command").compare_searches
            equal = compare_searches(
                model,
                engines,
                src,
                adapter=adapter,
                languages=languages,
                max_length=max_length,
                json_file=json_file,
            )
            return 0 if equal else 1
        equal = import_uncollected("twinax.cli.proofs.parity_command").prove(
            model,
            second,
            src=src,
            tgt=tgt,
            adapter=adapter,
            translations=translations,
            languages=languages,
            max_length=max_length,
            shape=shape,
            seed=seed,
            json_file=json_file,
        )
    return 0 if equal else 1


def audit(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    *,
    seed: int = 0,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Find mistakes in a Transformer: information leaks, unused inputs, parameters that do not learn.

    Each answer is a measurement in float64, with the first part of the model where the mistake occurs. For a published
    system, each mistake is listed with the setting that repairs it. Exits with 0 if there is no mistake, else with 1.
    To audit your own module, use twinax.audit.audit in Python.

    Example: twinax audit runs/de_en

    Args:
        model: a preset (tiny, small, base, big, t5_small), a published system (lucky_glass, or lucky_glass:repaired), a
            config as JSON, or any checkpoint: run, Hugging Face directory, .pt, .safetensors.
        seed: seed of the tokens, and of the weights if the model has none.
        json_file: JSON file to write the results to.
    """
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be at least 0")
    presets = import_module("twinax.presets.models").PRESETS
    systems = import_module("twinax.published.registry").SYSTEMS
    names = {*presets, *systems, *(f"{name}:repaired" for name in systems)}
    if model not in names and not exists(model):
        hint = "".join(f"; did you mean {suggestion}?" for suggestion in get_close_matches(model, names, 1))
        raise UsageError(
            f"{model}: is not a preset ({', '.join(presets)}), a published system ({', '.join(systems)}) or a "
            f"checkpoint{hint}"
        )
    with one_line_errors():
        enable_compilation_cache()
        return 0 if import_uncollected("twinax.cli.proofs.audit_command").examine(model, seed, json_file) else 1


def compare(
    reference: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="REF.PY:FUNCTION")],
    candidate: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CAND.PY:FUNCTION")],
    *,
    inputs: str,
    candidate_inputs: str | None = None,
    convert: str | None = None,
    rules: str | None = None,
    write_rules: str | None = None,
    gradients: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    optimizer: tuple[str, ...] = (),
    dropout: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    no_rounding: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
    report: str | None = None,
) -> int:
    """Find where two models of your own diverge: a PyTorch module and its JAX port, or any two.

    Each function returns a torch, NNX or Equinox module, a pair (Linen module, variables), or a pair (function of
    (parameters, *inputs), parameters). Names and layouts do not matter. Prints every independent difference with the
    lines of both sides and a verified fix. Exits with 0 if both are equal on these inputs, 1 if they differ, else 2.

    Example: twinax compare ref.py:make port.py:make --inputs batch.npz

    Args:
        reference: file and function that returns the reference model.
        candidate: file and function that returns the port; if it takes an argument, that is the reference's
            parameters, arrays by name.
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
        json_file: JSON file to write the results to.
        report: HTML file to write the results to, with the source lines, both traces side by side and the weight map.
    """
    with one_line_errors():
        return import_uncollected("twinax.cli.proofs.compare_command").run(
            reference,
            candidate,
            inputs=inputs,
            candidate_inputs=candidate_inputs,
            convert=convert,
            rules=rules,
            write_rules=write_rules,
            gradients=gradients,
            optimizer=optimizer,
            dropout=dropout,
            rounding=not no_rounding,
            json_file=json_file,
            report=report,
        )


def convert(
    src: CheckpointPath,
    dst: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NEW")],
    *,
    layout: str = "twinax",
    weights_only: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    max_shard_size: str | None = None,
    adapter: str | None = None,
    run: str | None = None,
    config: str | None = None,
    tokenizer: tuple[str, ...] = (),
    languages: tuple[str, ...] = (),
    scores: tuple[str, ...] = (),
    quantize: Literal["int8", "int8_float32", "float16"] | None = None,
    with_paths: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Convert a checkpoint bit-exactly to another format, with config, tokenizer and optimizer.

    The suffix of NEW selects the format: .pt (PyTorch), .safetensors, .npz (Marian), or else a directory. A directory
    has the layout of a Hugging Face family, of fairseq or of CTranslate2 if --layout names one, else that of a run's
    checkpoint. The result is read back and compared.

    Example: twinax convert runs/de_en model.pt

    Args:
        src: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file, a fairseq checkpoint or
            its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        dst: new file, or new or empty directory, to write. Folders above it are created.
        layout: tensor names: twinax; torch_nn (files, torch.nn.Transformer); lucky_glass, jadore801120, leftover,
            d2l_note, annotated_transformer (files); marian, bart, mbart, m2m100, pegasus, blenderbot, t5, mt5, umt5
            (directories); fairseq (.pt with dictionaries, or a directory of both); marian_npz (.npz); ctranslate2
            (a directory).
        weights_only: omit the optimizer and the run.
        dtype: round the weights to this dtype, without the optimizer, and report how far the logits moved.
        max_shard_size: maximum bytes per weight file of a family's directory, such as 5GB; default: one file.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        run: for the optimizer that another program saved (a checkpoint of transformers' Trainer, or a .pt with model
            and optimizer): the run that resumes from it, as a directory or as JSON of --print-config.
        config: for a file of bare tensors: its config, a JSON file, or a checkpoint of such a model, whose tokenizer is
            used too; for a published system, the settings that its tensors do not determine, as in
            leftover:repaired,num_heads=4.
        tokenizer: for a checkpoint without one: a tokenizer for both sides, or for source and target: a directory,
            a tokenizer.json, a SentencePiece model, a vocabulary in order of ids (.txt, one token per line) or one of
            Marian (.yml, .json). The vocabulary of a published system gets the pre-tokenization of that system.
        languages: languages of source and target (de en), to pre-tokenize with spaCy; default: as the published
            system.
        scores: files of `twinax evaluate --json`, for the model card of a family's directory.
        quantize: for --layout ctranslate2: int8, int8_float32 or float16 weights, which are rounded.
        with_paths: keep the paths of this machine in the run and the settings; default: of each path, its last part.
    """
    check_exists(src, *filter(None, [adapter]))
    with one_line_errors():
        command = import_uncollected("twinax.cli.checkpoints.convert_command").convert_checkpoint
        return command(
            Path(src),
            Path(dst),
            layout=layout,
            weights_only=weights_only,
            dtype=dtype,
            max_shard_size=max_shard_size,
            quantization=quantize,
            adapter=adapter,
            run=run,
            config=config,
            tokenizer=tokenizer,
            languages=languages,
            scores=scores,
            with_paths=with_paths,
        )


def inspect(
    path: CheckpointPath,
    *,
    tensors: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Print the contents of a checkpoint: format, layout, config, counts, dtypes, ties, training, checksum.

    The checksum covers the weights by Flax name, so that it is the same in every format and layout. For anything that
    twinax cannot read, prints what it is, which setting is the obstacle, and what to do, and exits with 2.

    Example: twinax inspect runs/de_en

    Args:
        path: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file, a fairseq checkpoint or
            its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        tensors: list every array with its checksum.
        json_file: JSON file to write everything to.
    """
    check_exists(path)
    with one_line_errors():
        return import_uncollected("twinax.cli.checkpoints.inspect_command").inspect_checkpoint(
            Path(path), tensors, json_file
        )


def train() -> int:
    """Train a model on a predefined run or on your own parallel text; the same command resumes."""
    return import_uncollected("twinax.cli.training.train_command").main(sys.argv[2:])


def data() -> int:
    """Print statistics of a corpus: pairs, tokens, lengths, unknown words, padding, batch shapes."""
    return import_uncollected("twinax.cli.training.data_command").main(sys.argv[2:])


def demo(out: str = "runs/demo", updates: int = 1000, test: int = 500) -> int:
    """Learn a little Italian in two minutes, translate unseen sentences, and prove both twins equal.

    Needs no files and no network. Exits with 0 if the twins agree on every token and rung, and the round trip is exact.

    Example: twinax demo

    Args:
        out: directory for corpus, run, pictures and weights; the same command resumes.
        updates: number of training updates.
        test: sentences in each of the two test sets.
    """
    if updates < 2 or test < 1:
        raise UsageError(f"--updates {updates} --test {test}: must be at least 2 and 1")
    with one_line_errors():
        enable_compilation_cache()
        results = import_uncollected("twinax.cli.demo.demo").demo(Path(out), updates, test)
    if results.stopped_by is not None:
        return 128 + results.stopped_by
    return 0 if results.ladder and not results.differing_tokens and len({*results.equal_arrays}) == 1 else 1


# These parse their own flags, because the flags depend on the run.
_OWN_FLAGS: dict[str, Callable[[], int]] = {"train": train, "data": data}
_COMMANDS = _OWN_FLAGS | {
    f.__name__: f for f in (translate, evaluate, score, parity, compare, audit, convert, inspect, plan, demo)
}


def _run(name: str) -> int | None:
    """Run a command with the arguments of the process; return its exit status."""
    if name == "--version":
        print(f"twinax {version('twinax')}")
        return 0
    if name[:1] not in ("", "-") and name not in _COMMANDS:
        hint = "".join(f"; did you mean {suggestion}?" for suggestion in get_close_matches(name, _COMMANDS, 1))
        raise UsageError(f"{name}: there is no such command; the commands are {', '.join(_COMMANDS)}{hint}")
    with verifying(not _take("--no-verify")):
        check_flags(name, sys.argv[2:])
        if name in _OWN_FLAGS:
            return _OWN_FLAGS[name]()
        if name in _COMMANDS:  # alone, so that its errors name its own help and flags
            return tyro.cli(_COMMANDS[name], args=sys.argv[2:], prog=f"twinax {name}")
        return tyro.extras.subcommand_cli_from_dict(_with_own_flags(), prog="twinax", description=_DESCRIPTION)


def _with_own_flags() -> dict[str, Any]:
    """The commands for the overview; for shell completion, with the flags of those that parse their own."""
    if not any("-completion" in word for word in sys.argv):
        return _COMMANDS
    for command in _COMMANDS.values():  # bash would take the second line of a description for a flag
        command.__doc__ = re.sub(r"\n {12}", " ", command.__doc__ or "")
    command_class = import_module("twinax.cli.flags.run_arguments").completion_class
    return _COMMANDS | {name: command_class(name) for name in _OWN_FLAGS}


def _take(flag: str) -> bool:
    """Remove a global flag from the arguments; return whether it was there."""
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    if flag not in sys.argv[2:end]:
        return False
    sys.argv.remove(flag)
    return True


def main() -> None:
    """Entry point of the command."""
    # An exception, so that contexts are closed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    set_encoding_errors("backslashreplace", sys.stdout, sys.stderr)  # tables have characters that a terminal may lack
    show_all(_take("--verbose"))
    run_and_exit(lambda: _run(sys.argv[1] if len(sys.argv) > 1 else ""))
