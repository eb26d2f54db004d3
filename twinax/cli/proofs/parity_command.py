"""`twinax parity`: loads the models and inputs that the ladder compares."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...configs import TransformerConfig
from ...configs.decoding import DecodingConfig
from ...convert.formats.generation import longest_translation
from ...convert.port import flax_specs
from ...inference.translator import Translator, load
from ...parity.functions import Batch, output_bytes
from ...parity.ladder import POOLED, TEXT_SENTENCES, sentences_per_input
from ...parity.oracles.published import find_oracle
from ...parity.oracles.transformers import load_model, load_oracle
from ...parity.page import page
from ...parity.report import as_document, show_ladder
from ...parity.search.translations import show_translations
from ...parity.sentences import distinct_pairs, draw_from
from ...presets.models import PRESETS
from ...train.text.corpus import read_lines
from ...train.tracking.progress import progress_bar
from ..flags.proofs import Parity
from ..text.text_commands import decoding_in, warn_about_text
from ..usage import UsageError, check_outputs, check_report, report_assumed, write_json, write_text

_COPIES = 6  # of all activations, which the ladder holds at once: those of both models, and what their gradients need
_MAX_SENTENCES = 400  # of a file; the ladder needs fewer


def prove(flags: Parity) -> bool:
    """Run the ladder, compare translations and print both; return whether everything is equal."""
    check_report(flags.report)
    check_outputs([flags.json_file, flags.report], [flags.model, flags.second, flags.src, flags.tgt, flags.adapter])
    if flags.src is None and (flags.tgt is not None or flags.translations):
        flag = "--translations" if flags.tgt is None else f"--tgt {flags.tgt}"
        raise UsageError(f"{flag}: needs --src, the source sentences")
    length = None if flags.max_length is None else str(flags.max_length)
    languages = {f"--{name.replace('_', '-')}": value for name, value in flags.languages.items()}
    for flag, value in {**languages, "--max-length": length}.items():
        if value is not None and flags.src is None:
            raise UsageError(f"{flag} {value}: needs --src, the sentences to translate")
    if flags.shape is not None and flags.src is not None:
        raise UsageError(f"--shape {flags.shape}: is of random batches; omit --src, or --shape")
    DecodingConfig(max_length=flags.max_length)  # checks the value
    values = {
        "--adapter": flags.adapter,
        "--src": flags.src,
        "--tgt": flags.tgt,
        **languages,
        "--max-length": length,
        "--shape": flags.shape,
        "--seed": str(flags.seed),
    }
    set_flags = [word for flag, value in values.items() if value is not None for word in (flag, value)]
    models = [flags.model, *filter(None, [flags.second])]
    words = ["twinax", "parity", *models, *set_flags, *["--translations"] * flags.translations]
    arguments: dict[str, Any] = {"seed": flags.seed}
    first = second = text = None
    assumed: list[str] = []  # settings that the files do not state
    if flags.model in PRESETS:
        if flags.second is not None or flags.src is not None or flags.adapter is not None:
            raise UsageError(
                f"{flags.model}: is a preset with random weights; --src, --adapter and a second model need a checkpoint"
            )
        arguments["config"] = TransformerConfig.preset(flags.model)
    else:
        first = load(flags.model, adapter=flags.adapter)
        second = load(flags.second) if flags.second is not None else None
        for translator in filter(None, (first, second)):
            report_assumed(translator.name, translator.checkpoint)
            assumed += [item for item in translator.checkpoint.assumed if item not in assumed]
        arguments |= {"config": first.config, "arrays": first.checkpoint.arrays}
        arguments |= {"flax": _second_model(first, second)} if second else _oracle(flags.model, first, flags.adapter)
        if flags.src is not None:
            first = decoding_in(first, **flags.languages)
            text = first.sources(read_lines(flags.src))
            warn_about_text(first, text)
            if second is not None and any(languages.values()):
                second = _in_same_languages(second, first, languages)
            longest = _longest(first, flags.max_length)
            arguments["draw"] = _sentences(first, second, flags.src, flags.tgt, longest, flags.seed)
    if flags.shape is not None:
        arguments["shape"] = _parse_shape(flags.shape, arguments["config"])
    ladder = show_ladder(shlex.join(words), **arguments)
    document = {"command": shlex.join(words), **as_document(ladder)}
    equal = ladder.ok
    if flags.translations and first is not None and text is not None:
        has_oracle = arguments.get("oracle_name") == "transformers"
        transformers_model = load_model(flags.model, first.checkpoint, flags.adapter) if has_oracle else None
        sources = {line: tokens for line, tokens in enumerate(text.ids, 1) if tokens}
        translations_equal, document["translations"] = show_translations(
            (second or first).flax, first.torch, sources, transformers_model, _longest(first, flags.max_length)
        )
        equal &= translations_equal
    print("equal" + (f", assuming {', '.join(assumed)}" if assumed else "") if equal else "DIFFERENT")
    if flags.json_file is not None:
        document |= {"equal": equal, "given": assumed}
        write_json(flags.json_file, document)
    if flags.report is not None:
        options: dict[str, Any] = {"assumed": assumed, "oracle_name": arguments.get("oracle_name", "")}
        if first is not None and text is not None and ladder.attention is not None:
            src, tgt = ladder.attention.tokens
            options["labels"] = first.tokenizers.src.show(src), first.tokenizers.tgt.show(tgt)
            options["texts"] = dict(enumerate(text.texts, 1))
            options["translations"] = document.get("translations", ())
        write_text(flags.report, page(ladder, (flags.model, flags.second or flags.model), **options))
    return equal


def _parse_shape(shape: str, config: TransformerConfig) -> tuple[int, int]:
    """(sentences, tokens) of SENTENCESxTOKENS. Raises: UsageError if it is none, or needs more memory than there is."""
    sentences, _, tokens = shape.partition("x")
    if not (sentences.isdecimal() and tokens.isdecimal() and int(sentences) > 1 and int(tokens) > 0):
        raise UsageError(f"--shape {shape}: must be SENTENCESxTOKENS with at least 2 sentences, for example 256x64")
    if int(tokens) > config.max_length:
        raise UsageError(f"--shape {shape}: the model's maximum is max_length={config.max_length} tokens")
    needed = _COPIES * output_bytes(config.replace(compute_dtype="float64"), int(sentences), int(tokens))
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS
        return int(sentences), int(tokens)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise UsageError(
            f"--shape {shape}: the ladder keeps all activations in float64 and needs about {needed / 1e9:,.0f} GB, but "
            f"{available / 1e9:,.0f} GB are free; choose a smaller shape or model"
        )
    return int(sentences), int(tokens)


def _second_model(translator: Translator, second: Translator) -> tuple[TransformerConfig, Any]:
    """The second model's config and arrays. Raises: UsageError if names or shapes of its arrays differ."""
    shapes, second_shapes = (
        {name: spec.shape for name, spec in flax_specs(t.config).items()} for t in (translator, second)
    )
    if shapes != second_shapes:
        a, b = translator.config, second.config
        names = [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]
        settings = ", ".join(f"{name}={getattr(a, name)!r} and {getattr(b, name)!r}" for name in names)
        models = f"{translator.name}, {second.name}"
        raise UsageError(f"{models}: have arrays of different shapes; their settings differ in {settings}")
    return second.config, second.checkpoint.arrays


def _in_same_languages(second: Translator, first: Translator, languages: Mapping[str, str | None]) -> Translator:
    if second.checkpoint.files:
        return decoding_in(second, *languages.values())
    ids = {name: getattr(first.config, name) for name in ("decoder_start_id", "forced_bos_id")}
    return second.with_config(second.config.replace(**ids))


def _oracle(model: str, translator: Translator, adapter: str | None) -> dict[str, Any]:
    """The oracle, if any: the `transformers` model of a Hugging Face directory, or a published system's own module."""
    if translator.checkpoint.layout is None or not Path(model, "config.json").is_file():
        published = find_oracle(translator.checkpoint)
        return {} if published is None else {"oracle": published.function, "oracle_name": published.name}
    for package in ("transformers", *(["peft"] if adapter is not None else [])):
        if find_spec(package) is None:
            print(f"twinax: {package} is not installed; only the twins are compared with each other", file=sys.stderr)
            return {}
    try:
        oracle = load_oracle(model, translator.checkpoint, adapter)
    except Exception as error:  # transformers raises many types
        raise UsageError(f"{model}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from None
    return {"oracle": oracle, "oracle_name": "transformers"}


def _longest(translator: Translator, max_length: int | None) -> int | None:
    """The largest length of a translation: of the flag, else of a Hugging Face directory, else None."""
    if max_length is not None:
        return max_length
    return longest_translation(translator.checkpoint.documents, translator.config)


def _sentences(
    translator: Translator, second: Translator | None, src: str, tgt: str | None, longest: int | None, seed: int
) -> Callable[[int, int], Batch | None]:
    """Batches of sentences from a file, with translations from another file or by the model itself."""
    texts = list(read_lines(src))
    references = texts if tgt is None else list(read_lines(tgt))
    if len(references) != len(texts):
        raise UsageError(
            f"{src} has {len(texts)} lines and {tgt} has {len(references)}: they must have the same number"
        )
    order = np.random.default_rng(seed).permutation(len(texts))
    pairs = [(texts[i], references[i]) for i in order if texts[i].strip()][:_MAX_SENTENCES]
    if not pairs:
        raise UsageError(f"{src}: has no sentence")
    source_texts = [text for text, _ in pairs]
    sources = translator.source_ids(source_texts)
    if tgt is None:
        with progress_bar() as progress:
            hypotheses = translator.hypotheses(
                source_texts,
                DecodingConfig(max_length=longest),
                progress=lambda count: progress("translations of the text", count, len(source_texts)),
            )
        targets = [list(n_best[0].tokens) if n_best else [] for n_best in hypotheses]
    else:
        targets = [ids[:-1] for ids in translator.target_ids([reference for _, reference in pairs])]
    if second is not None and second.checkpoint.files:
        second_sources = second.tokenizers.src.encode_sources(source_texts, translator.config.max_length)
        for text, ids, second_ids in zip(source_texts, sources, second_sources, strict=True):
            if ids != second_ids:
                raise UsageError(f"{translator.name}, {second.name}: the tokenizers differ, as on {text[:100]!r}")
    draw = draw_from(sources, targets, translator.config)
    _report_too_few(src, draw, len(distinct_pairs(sources, targets, translator.config)), translator.config)
    return draw


def _report_too_few(src: str, draw: Callable[[int, int], Batch | None], count: int, config: TransformerConfig) -> None:
    """Print how many sentences float32 and bf16 need if the text has fewer, before anything is compared."""
    batch = draw(0, TEXT_SENTENCES)
    assert batch is not None
    per_input = sentences_per_input(config, batch)
    sentences_needed = TEXT_SENTENCES + POOLED * per_input
    if count < sentences_needed:
        print(
            f"twinax: {src}: only float64 is compared: float32 and bf16 need at least {sentences_needed} distinct "
            f"sentences ({TEXT_SENTENCES} for float64, then {POOLED} inputs of {per_input}), and it has {count}",
            file=sys.stderr,
        )
