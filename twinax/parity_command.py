"""`twinax parity`: which models the ladder compares, and on what."""

import json
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
from twinax.convert.port import flax_specs
from twinax.parity.functions import Batch
from twinax.parity.published import find_oracle
from twinax.parity.report import as_document, show_ladder
from twinax.parity.sentences import draw_from
from twinax.parity.transformers_oracle import load_model, load_oracle
from twinax.parity.translations import show_translations
from twinax.presets.models import PRESETS
from twinax.train.data.corpus import read_lines
from twinax.train.translator import Translator, load

from .text_commands import decoding_in
from .usage import UsageError, check_folder, report_assumed

_MOST = 400  # sentences of a file that are read into ids; the ladder needs fewer


def prove(
    model: str,
    other: str | None,
    *,
    src: str | None,
    tgt: str | None,
    translations: bool,
    forced_bos: str | None,
    seed: int,
    json_file: str | None,
) -> bool:
    """Climbs the ladder, compares translations, and prints both; True where nothing differs."""
    check_folder(json_file)
    if src is None and (tgt is not None or translations):
        flag = "--translations" if tgt is None else f"--tgt {tgt}"
        raise UsageError(f"{flag}: needs --src, the sentences that it is of")
    if forced_bos is not None and src is None:
        raise UsageError(f"--forced-bos {forced_bos}: needs --src, the sentences to translate")
    named = {"--src": src, "--tgt": tgt, "--forced-bos": forced_bos, "--seed": str(seed)}
    flags = [word for flag, value in named.items() if value is not None for word in (flag, value)]
    words = ["twinax", "parity", model, *filter(None, [other]), *flags, *["--translations"] * translations]
    arguments: dict[str, Any] = {"seed": seed}
    first = second = None
    assumed: list[str] = []  # what the proof takes for granted
    if model in PRESETS:
        if other is not None or src is not None:
            raise UsageError(f"{model}: is a preset, of random weights; give a checkpoint to compare or to read text")
        arguments["config"] = TransformerConfig.preset(model)
    else:
        first, second = load(model), load(other) if other is not None else None
        for translator in filter(None, (first, second)):
            report_assumed(translator.name, translator.checkpoint)
            assumed += [item for item in translator.checkpoint.assumed if item not in assumed]
        arguments |= {"config": first.config, "arrays": first.checkpoint.arrays}
        arguments |= {"flax": _other(first, second)} if second else _oracle(model, first)
        if src is not None:
            first = decoding_in(first, forced_bos)
            if second is not None and forced_bos is not None:
                second = decoding_in(second, str(first.config.forced_bos_id))  # by id: it may lack a tokenizer
            arguments["draw"] = _sentences(first, second, src, tgt, seed)
    ladder = show_ladder(shlex.join(words), **arguments)
    document, equal = {"command": shlex.join(words), **as_document(ladder)}, ladder.ok
    if translations and first is not None and src is not None:
        theirs = load_model(model, first.checkpoint) if arguments.get("oracle_name") == "transformers" else None
        sources = {line: tokens for line, tokens in enumerate(first.source_ids(list(read_lines(src))), 1) if tokens}
        same, document["translations"] = show_translations((second or first).flax, first.torch, sources, theirs=theirs)
        equal &= same
    print("equal" + (f", given {', '.join(assumed)}" if assumed else "") if equal else "DIFFERENT")
    if json_file is not None:
        document |= {"equal": equal, "given": assumed}
        Path(json_file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return equal


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
    """A third model: `transformers`' for a directory of its, or a published system's own module."""
    if translator.checkpoint.layout is None or not Path(model, "config.json").is_file():
        found = find_oracle(translator.checkpoint)
        return {} if found is None else {"oracle": found.function, "oracle_name": found.name}
    if find_spec("transformers") is None:
        print("twinax: transformers is not installed: the twins are compared with each other only", file=sys.stderr)
        return {}
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
    sources = translator.source_ids(chosen)
    if tgt is None:
        found = translator.hypotheses(chosen, DecodingConfig())
        targets = [list(hypotheses[0].tokens) if hypotheses else [] for hypotheses in found]
    else:
        targets = [ids[:-1] for ids in translator.target_ids([reference for _, reference in pairs])]
    if other is not None and other.checkpoint.files:
        theirs = other.tokenizers.src.encode_sources(chosen, longest)
        if (wrong := next((t for t, a, b in zip(chosen, sources, theirs, strict=True) if a != b), None)) is not None:
            raise UsageError(f"{translator.name}, {other.name}: their tokenizers give other ids for {wrong[:100]!r}")
    return draw_from(sources, targets, translator.config)
