"""`twinax parity`: which models the ladder compares, and on what."""

import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def prove(model: str, other: str | None, src: str | None, tgt: str | None, seed: int, json_file: str | None) -> bool:
    """Climbs the ladder and prints it; True where every rung holds."""
    check_folder(json_file)
    if tgt is not None and src is None:
        raise UsageError(f"--tgt {tgt}: needs --src, the sentences that it translates")
    shown = [model, *filter(None, [other]), *(f"--{n} {v}" for n, v in {"src": src, "tgt": tgt}.items() if v)]
    arguments: dict[str, Any] = {"seed": seed, "json_file": json_file}
    if model in PRESETS:
        if other is not None or src is not None:
            raise UsageError(f"{model}: is a preset, of random weights; give a checkpoint to compare or to read text")
        arguments["config"] = TransformerConfig.preset(model)
    else:
        translator = load(model)
        arguments |= {"config": translator.config, "arrays": translator.checkpoint.arrays}
        if other is not None:
            arguments["flax"] = _other(translator, load(other))
        else:
            arguments |= _oracle(model, translator)
        if src is not None:
            arguments["draw"] = _sentences(translator, src, tgt, seed)
    return show_ladder(f"twinax parity {' '.join(shown)} --seed {seed}", **arguments)


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


def _sentences(translator: Translator, src: str, tgt: str | None, seed: int) -> Callable[[int, int], Batch | None]:
    """Batches of the sentences of a file, with their translations in another, or else with the model's own."""
    texts = list(read_lines(src))
    if tgt is None:
        found = translator.hypotheses(texts, DecodingConfig())
        targets = [list(hypotheses[0].tokens) if hypotheses else [] for hypotheses in found]
    else:
        references = list(read_lines(tgt))
        if len(references) != len(texts):
            raise UsageError(f"{src} has {len(texts)} lines and {tgt} has {len(references)}: a line must be a pair")
        targets = translator.tokenizers.tgt.encode(references)
    sources = translator.tokenizers.src.encode_sources(texts, translator.config.max_length)
    pairs = [(s, t) for text, s, t in zip(texts, sources, targets, strict=True) if text.strip()]
    if not pairs:
        raise UsageError(f"{src}: has no sentence")
    return draw_from([s for s, _ in pairs], [t for _, t in pairs], translator.config, seed)
