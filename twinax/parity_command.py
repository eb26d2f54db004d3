"""`twinax parity`: which models the ladder compares, and on what."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from twinax.configs import TransformerConfig
from twinax.configs.decoding import DecodingConfig
from twinax.configs.presets import PRESETS
from twinax.convert.port import flax_specs
from twinax.parity_tests.functions import Batch
from twinax.parity_tests.report import show_ladder
from twinax.parity_tests.sentences import draw_from
from twinax.train.corpus import read_lines
from twinax.train.translator import Translator, load

from .usage import UsageError, check_folder

_MOST = 400  # sentences of a file that are read into ids; the ladder needs fewer


def prove(model: str, other: str | None, src: str | None, tgt: str | None, seed: int, json_file: str | None) -> bool:
    """Climbs the ladder and prints it; True where every rung holds."""
    check_folder(json_file)
    if tgt is not None and src is None:
        raise UsageError(f"--tgt {tgt}: needs --src, the sentences that it translates")
    named = {"--src": src, "--tgt": tgt, "--seed": str(seed)}
    flags = [word for flag, value in named.items() if value is not None for word in (flag, value)]
    words = ["twinax", "parity", model, *filter(None, [other]), *flags]
    arguments: dict[str, Any] = {"seed": seed, "json_file": json_file}
    if model in PRESETS:
        if other is not None or src is not None:
            raise UsageError(f"{model}: is a preset, of random weights; give a checkpoint to compare or to read text")
        arguments["config"] = TransformerConfig.preset(model)
    else:
        translator = load(model)
        arguments |= {"config": translator.config, "arrays": translator.checkpoint.arrays}
        second = load(other) if other is not None else None
        arguments |= {"flax": _other(translator, second)} if second else _oracle(model, translator)
        if src is not None:
            arguments["draw"] = _sentences(translator, second, src, tgt, seed)
    return show_ladder(shlex.join(words), **arguments)


def _other(translator: Translator, other: Translator) -> tuple[TransformerConfig, Any]:
    """The second model. Raises: UsageError where its arrays have other names or shapes."""
    ours, theirs = ({name: spec.shape for name, spec in flax_specs(t.config).items()} for t in (translator, other))
    if ours != theirs:
        a, b = translator.config, other.config
        apart = [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]
        said = ", ".join(f"{name}={getattr(a, name)!r} and {getattr(b, name)!r}" for name in apart)
        raise UsageError(f"{translator.name}, {other.name}: are models of different shapes: {said}")
    return other.config, other.checkpoint.arrays


def _oracle(model: str, translator: Translator) -> dict[str, Any]:
    """`transformers` as a third, for a directory of its."""
    if translator.checkpoint.layout is None or not Path(model, "config.json").is_file():
        return {}
    if find_spec("transformers") is None:
        print("twinax: transformers is not installed: the twins are compared with each other only", file=sys.stderr)
        return {}
    from twinax.parity_tests.transformers_oracle import load_oracle

    try:
        oracle = load_oracle(model, translator.checkpoint)
    except Exception as error:  # whatever it is, it says that transformers does not take the directory
        raise UsageError(f"{model}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from None
    return {"oracle": oracle, "oracle_name": "transformers"}


def _sentences(
    translator: Translator, other: Translator | None, src: str, tgt: str | None, seed: int
) -> Callable[[int, int], Batch | None]:
    """Batches of the sentences of a file, with their translations in another, or else with the model's own."""
    texts = list(read_lines(src))
    references = texts if tgt is None else list(read_lines(tgt))
    if len(references) != len(texts):
        raise UsageError(f"{src} has {len(texts)} lines and {tgt} has {len(references)}: a line must be a pair")
    order = np.random.default_rng(seed).permutation(len(texts))
    pairs = [(texts[i], references[i]) for i in order if texts[i].strip()][:_MOST]
    if not pairs:
        raise UsageError(f"{src}: has no sentence")
    chosen, longest = [text for text, _ in pairs], translator.config.max_length
    sources = translator.tokenizers.src.encode_sources(chosen, longest)
    if tgt is None:
        found = translator.hypotheses(chosen, DecodingConfig())
        targets = [list(hypotheses[0].tokens) if hypotheses else [] for hypotheses in found]
    else:
        targets = translator.tokenizers.tgt.encode([reference for _, reference in pairs])
    if other is not None and other.checkpoint.files:
        theirs = other.tokenizers.src.encode_sources(chosen, longest)
        if (wrong := next((t for t, a, b in zip(chosen, sources, theirs, strict=True) if a != b), None)) is not None:
            raise UsageError(f"{translator.name}, {other.name}: their tokenizers give other ids for {wrong[:100]!r}")
    return draw_from(sources, targets, translator.config)
