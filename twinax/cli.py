"""The command `twinax`. What a subcommand needs is imported when it runs."""

import os
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from os.path import exists
from pathlib import Path
from typing import Annotated

import tyro

from .foreign_flags import check_flags
from .text_commands import evaluate, score, translate
from .usage import CheckpointPath, UsageError, check_exists, keep_compiled_programs, one_line_errors

_DESCRIPTION = "Twin encoder-decoder Transformers, one in JAX and one in PyTorch, proven equal."


def parity(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[MODEL]")] = "tiny",
    other: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CHECKPOINT]")] = None,
    *,
    src: str | None = None,
    tgt: str | None = None,
    translations: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    forced_bos: str | None = None,
    seed: int = 0,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Prove that the Flax and the PyTorch twin of a model are one function, or that two checkpoints are.

    Prints the ladder as a table: for every rung the worst float64 difference, and in float32 and bfloat16 the ratio of
    the twins' errors. A Hugging Face directory is compared with `transformers` too. Of two checkpoints PyTorch computes
    the first and Flax the second. Exits with 0 where every rung holds, else with 1.

    Example: twinax parity tiny

    Args:
        model: a preset (tiny, small, base, big), whose weights are random, or any checkpoint: run, Hugging Face
            directory, .pt, .safetensors. tiny takes half a minute; base and big take minutes and gigabytes.
        other: a second checkpoint.
        src: text file, one sentence per line (.gz too), to compare on; none: random tokens.
        tgt: its translations; none: the model's own.
        translations: translate every sentence of --src in both frameworks too, greedily and with a beam of 5, and
            compare the tokens.
        forced_bos: first token of every translation, or its id; in M2M100, NLLB and mBART-50 the target language's.
        seed: seed of random tokens and weights, and of the order of sentences.
        json_file: file to write the same to, as JSON.
    """
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be at least 0")
    presets = import_module("twinax.presets.models").PRESETS
    if model not in presets and not exists(model):
        hint = "".join(f"; did you mean {near}?" for near in get_close_matches(model, presets, 1))
        raise UsageError(f"{model}: is neither a preset ({', '.join(presets)}) nor a checkpoint{hint}")
    check_exists(*filter(None, (other, src, tgt)))
    with one_line_errors():
        keep_compiled_programs()
        equal = import_module("twinax.parity_command").prove(
            model,
            other,
            src=src,
            tgt=tgt,
            translations=translations,
            forced_bos=forced_bos,
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
    """Find what is wrong with a Transformer: what it sees and must not, what it does not see, what does not learn.

    Each answer is a measurement in float64, with the first part of the model where it happens. On a published system
    each of its mistakes is named, with the value that repairs it. Exits with 0 where nothing is wrong, else with 1.
    A module of your own: twinax.audit.audit, in Python.

    Example: twinax audit runs/de_en

    Args:
        model: a preset (tiny, small, base, big), a published system (lucky_glass, or lucky_glass:repaired), a config as
            JSON, or any checkpoint: run, Hugging Face directory, .pt, .safetensors.
        seed: seed of the tokens, and of the weights where there are none.
        json_file: file to write the same to, as JSON.
    """
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be at least 0")
    presets = import_module("twinax.presets.models").PRESETS
    systems = import_module("twinax.published.registry").SYSTEMS
    known = {*presets, *systems, *(f"{name}:repaired" for name in systems)}
    if model not in known and not exists(model):
        hint = "".join(f"; did you mean {near}?" for near in get_close_matches(model, known, 1))
        raise UsageError(
            f"{model}: is no preset ({', '.join(presets)}), no published system ({', '.join(systems)}) and no "
            f"checkpoint{hint}"
        )
    with one_line_errors():
        keep_compiled_programs()
        return 0 if import_module("twinax.audit_command").examine(model, seed, json_file) else 1


def convert(
    src: CheckpointPath,
    dst: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NEW")],
    *,
    layout: str = "twinax",
    weights_only: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    config: str | None = None,
    tokenizer: tuple[str, ...] = (),
    languages: tuple[str, ...] = (),
) -> int:
    """Write a checkpoint in another form: the weights bit for bit, with config, tokenizer and optimiser.

    The name says the form: a .pt file of PyTorch, a .safetensors file, else a directory: of a Hugging Face family where
    --layout names one, else a checkpoint as runs have them. What was written is read again and compared.

    Example: twinax convert runs/de_en model.pt

    Args:
        src: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file.
        dst: what to write; must not exist.
        layout: names in it: twinax; torch_nn (files, torch.nn.Transformer's); lucky_glass, jadore801120, leftover,
            d2l_note, annotated_transformer (files); marian, bart, mbart, m2m100, pegasus, blenderbot (directories).
        weights_only: leave the optimiser and the run out.
        config: for a file of bare tensors: its config, a JSON file, or a checkpoint of such a model, whose tokenizer is
            taken too; for one of a published system what its tensors do not say, as leftover:repaired,num_heads=4.
        tokenizer: for a checkpoint that has none: one for both sides or the source's and the target's, a directory,
            a tokenizer.json, a SentencePiece model, or a vocabulary in the order of its ids (.txt, a token per line).
            A published system's vocabulary gets the pre-tokenization of that system.
        languages: of source and target (de en): pre-tokenize with spaCy; none: the published system's.
    """
    check_exists(src)
    with one_line_errors():
        command = import_module("twinax.convert_command").convert_checkpoint
        return command(Path(src), Path(dst), layout, weights_only, config, tokenizer, languages)


def inspect(
    path: CheckpointPath,
    *,
    tensors: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Print what is in a checkpoint: form, layout, config, counts, dtypes, ties, training, checksum.

    The checksum is of the weights by their Flax names: it is the same in every form and layout.

    Example: twinax inspect runs/de_en

    Args:
        path: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file.
        tensors: list every array with its checksum.
        json_file: file to write all of it to, as JSON.
    """
    check_exists(path)
    with one_line_errors():
        return import_module("twinax.convert_command").inspect_checkpoint(Path(path), tensors, json_file)


def train() -> int:
    """Train a model: a ready-made run, or your own parallel text in one command; the same command goes on."""
    return import_module("twinax.train_command").main(sys.argv[2:])


def data() -> int:
    """Print what a corpus looks like to a run: pairs, tokens, lengths, unknown words, padding, shapes."""
    return import_module("twinax.data_command").main(sys.argv[2:])


def demo(out: str = "runs/demo", updates: int = 1000, test: int = 500) -> int:
    """Learn a small piece of Italian in two minutes, translate what training has not seen, and prove both twins equal.

    Needs no files and no network. Exits with 0 where Flax and PyTorch agree on every token and every rung.

    Example: twinax demo

    Args:
        out: directory for corpus, run, pictures and weights; the same command goes on where it was stopped.
        updates: length of the training.
        test: sentences to translate, of each kind.
    """
    if updates < 2 or test < 1:
        raise UsageError(f"--updates {updates} --test {test}: must be at least 2 and 1")
    with one_line_errors():
        keep_compiled_programs()
        found = import_module("twinax.demo").demo(Path(out), updates, test)
    if found.stopped_by is not None:
        return 128 + found.stopped_by
    return 0 if found.ladder and not found.differing_tokens and len({*found.equal_arrays}) == 1 else 1


# These read their flags themselves: what there is to say depends on the run that they are given.
_OWN_FLAGS: dict[str, Callable[[], int]] = {"train": train, "data": data}
_COMMANDS = _OWN_FLAGS | {f.__name__: f for f in (translate, evaluate, score, parity, audit, convert, inspect, demo)}


def main() -> None:
    """Entry point of the command."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as an exception, which cleans up
    try:
        if name == "--version":
            print(f"twinax {version('twinax')}")
            return
        if name[:1] not in ("", "-") and name not in _COMMANDS:
            hint = "".join(f"; did you mean {near}?" for near in get_close_matches(name, _COMMANDS, 1))
            raise UsageError(f"{name}: there is no such command; they are {', '.join(_COMMANDS)}{hint}")
        check_flags(name, sys.argv[2:])
        if name in _OWN_FLAGS:
            sys.exit(_OWN_FLAGS[name]())
        sys.exit(tyro.extras.subcommand_cli_from_dict(_COMMANDS, prog="twinax", description=_DESCRIPTION))
    except UsageError as error:
        print(f"twinax: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader closed the pipe; Python would report it once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print("twinax: interrupted", file=sys.stderr)
        sys.exit(130)
