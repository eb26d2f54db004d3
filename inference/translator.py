"""A trained model with its tokenizers: translates and scores text in either framework."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from math import isnan, prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from ..backend.errors import CheckpointError, ConfigError, DataError, NotFiniteError
from ..configs.data import TokenizerConfig
from ..configs.decoding import DecodingConfig
from ..configs.schema import TransformerConfig
from ..configs.summary import describe_model, html_table, text_table
from ..convert.arrays.lazy import specs_of
from ..convert.checkpoint import CONFIG, Checkpoint
from ..convert.formats.generation import Generation, decoding_with, generation_of
from ..convert.formats.hugging_face import LAYOUTS, family
from ..convert.formats.registry import load as load_checkpoint
from ..convert.port import flax_specs
from ..flax_transformer.decoding.scoring import attention_maps, score
from ..flax_transformer.decoding.search import Sentences, generate_batches
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import named_arrays
from ..formulas.decoding import NAN_LOGITS, Decoded
from ..formulas.padding import pad, round_up
from ..train.data.fitting import lacks_language, with_target_language
from ..train.data.tokenizer_pair import Tokenizers
from ..train.text.glossary import Glossary, encode_annotated
from ..train.text.tokenizer import Tokenizer
from ..train.text.tokenizer_files import needed_files
from .batches import Rows, decoding_threads, token_batches

if TYPE_CHECKING:
    from .. import torch_reference

Framework = Literal["flax", "torch"]
Quantization = Literal["int8"]
_LISTED = 8  # languages that a summary names
_MULTIPLE = 8  # source lengths are padded to multiples of it, because each length is compiled


class Sources(NamedTuple):
    """Sentences as a model reads them, so that each is tokenized once."""

    texts: list[str]
    ids: list[list[int]]  # truncated to the model's `max_length`; empty for an empty text
    too_long: list[int]  # indices of the texts that were truncated

    def window(self, start: int, size: int) -> "Sources":
        """`size` sentences from `start` on."""
        rows = slice(start, start + size)
        return Sources(
            self.texts[rows], self.ids[rows], [i - start for i in self.too_long if start <= i < start + size]
        )


class Hypothesis(NamedTuple):
    """A translation of a sentence."""

    text: str
    score: float  # sum of log-probabilities in nats, divided by the length penalty
    tokens: tuple[int, ...]  # ids without EOS

    @property
    def line(self) -> str:
        """The text without line breaks."""
        return " ".join(self.text.splitlines())


class Attention(NamedTuple):
    """Cross-attention weights of a translation: last decoder layer, mean of its heads."""

    weights: np.ndarray  # (T, S)
    targets: list[str]  # tokens, EOS last
    sources: list[str]


class Translator:
    """A checkpoint whose model translates and scores text.

    Raises:
        CheckpointError: on a call with text: the checkpoint has no tokenizer that can be read.
        ConfigError: on a call that decodes or scores: the model has no start token for the decoder.
        NotFiniteError: on such a call: the model's logits are NaN.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str = "the checkpoint",
        base: "Translator | None" = None,
        tokenizers: Tokenizers | None = None,
        quantize: Quantization | None = None,
        glossary: Glossary | None = None,
    ):
        self.checkpoint, self.config, self.name = checkpoint, checkpoint.config, name
        self.quantize: Quantization | None = quantize if base is None else base.quantize
        # The base shares its arrays, and its tokenizers and glossary if none are set.
        self._base, self._tokenizers = base, tokenizers
        self.glossary: Glossary | None = base.glossary if glossary is None and base is not None else glossary

    def __repr__(self) -> str:
        return text_table(self.name, self._summary())

    def _repr_html_(self) -> str:
        return html_table(self.name, self._summary())

    def _summary(self) -> dict[str, str]:
        specs, trained = specs_of(self.checkpoint.arrays), flax_specs(self.config, trained_only=True)
        rows = {"family": self.checkpoint.layout or self.checkpoint.system or "none of transformers"}
        rows |= describe_model(self.config, sum(prod(specs[name].shape) for name in trained))
        rows |= {} if self.quantize is None else {"products": self.quantize}
        rows |= {} if self.glossary is None else {"glossary": f"{len(self.glossary.terms):,} terms"}
        try:
            languages = self.tokenizers.src.languages
        except (CheckpointError, DataError):
            return rows | {"tokenizer": "none that can be read"}
        rows["tokenizer"] = "joint" if self.tokenizers.src is self.tokenizers.tgt else "one per side"
        if languages is not None:
            codes = ", ".join([*languages.tokens][:_LISTED]) + ", …" * (len(languages.tokens) > _LISTED)
            pair = f"{languages.source or 'not set'} to {languages.target or 'not set'}"
            rows["languages"] = f"{pair}; has {len(languages.tokens)}: {codes}"
        return rows

    @property
    def members(self) -> "tuple[Translator, ...]":
        """The models that translate together; outside of an ensemble, this one."""
        return (self,)

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers of source and target.

        Raises:
            CheckpointError: the checkpoint has no tokenizer, or none that twinax can read.
            DataError: a file is damaged, or has tokens beyond the model's vocabulary.
        """
        if self._base is not None:
            return self._base.tokenizers if self._tokenizers is None else self._tokenizers
        tokenizers = Tokenizers.of_checkpoint(self.checkpoint, TokenizerConfig(), self.name)
        if tokenizers is None:
            names = ", ".join(sorted({Path(name).name for name in self.checkpoint.files}))
            needed = f"it needs {needed_files(self.checkpoint.documents.get(CONFIG, {}))}"
            reason = f"{needed}; {names} cannot be used" if names else needed
            raise CheckpointError(
                f"{self.name}: has no readable tokenizer ({reason}); `twinax convert` with --tokenizer adds one"
            )
        for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
            self._check_vocabulary(side, tokenizer)
        return tokenizers

    def _check_vocabulary(self, side: str, tokenizer: Tokenizer) -> None:
        """Raises: DataError if text could be encoded to ids beyond the model's vocabulary."""
        size = getattr(self.config, f"{side}_vocab_size")
        if excess_tokens := tokenizer.tokens_beyond(size):
            number, token = excess_tokens[0]
            raise DataError(
                f"{self.name}: the {side} tokenizer has {len(excess_tokens):,} tokens beyond the model's {size:,} (the "
                f"first: {token!r}, id {number}): it belongs to another model; `twinax convert` with --tokenizer "
                "replaces it"
            )

    @cached_property
    def flax(self) -> Transformer:
        """The model in Flax."""
        if self._base is not None:
            return Transformer.from_arrays(self.config, self._base._arrays)
        model = self.checkpoint.to_flax()
        return model if self.quantize is None else model.quantized()

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        """The arrays of the model in Flax."""
        return named_arrays(self.flax)

    @cached_property
    def torch(self) -> "torch_reference.Transformer":
        """The model in PyTorch, in evaluation mode.

        Raises:
            ConfigError: the model is quantized.
        """
        if self.quantize is not None:
            raise ConfigError(f"framework='torch': has no {self.quantize}; use framework='flax', or omit quantize")
        if self._base is not None:
            return type(self._base.torch).from_state_dict(self.config, self._base.torch.state_dict()).eval()
        return self.checkpoint.to_torch().eval()

    def with_forced_bos(self, token: str | int) -> "Translator":
        """The same model with another `forced_bos_id`, by token or id: the first token of every translation.

        In M2M100, NLLB and mBART-50 it selects the target language. Tokenizers and arrays are shared.

        Raises:
            CheckpointError, DataError: as `tokenizers`; or the token does not exist.
        """
        number = self.tokenizers.tgt.id_of(token) if isinstance(token, str) else token
        if number is None:
            suggestions = get_close_matches(str(token), self.tokenizers.tgt.vocabulary(), 1)
            hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
            raise DataError(f"forced_bos={token!r}: the target tokenizer has no such token{hint}")
        if not 0 <= number < self.config.tgt_vocab_size:
            raise DataError(f"forced_bos={token!r}: must be 0 to {self.config.tgt_vocab_size - 1}")
        return self.with_config(self.config.replace(forced_bos_id=number))

    def with_config(self, config: TransformerConfig, tokenizers: Tokenizers | None = None) -> "Translator":
        """The same arrays with another config; None: and the same tokenizers."""
        return Translator(replace(self.checkpoint, config=config), self.name, self, tokenizers)

    def with_languages(self, source: str | None = None, target: str | None = None) -> "Translator":
        """The same model for other languages, by code: de_DE (mBART), de (M2M100), deu_Latn (NLLB), deu (Marian).

        They select the special tokens of a source, and the first token of a translation. None changes nothing. Arrays
        are shared.

        Raises:
            CheckpointError, DataError: as `tokenizers`; or the tokenizer has no such language.
        """
        tokenizers = self.tokenizers.with_languages(source, target)
        config = self.config if target is None else with_target_language(self.config, tokenizers)
        return self.with_config(config, tokenizers)

    def with_glossary(self, terms: Glossary | Mapping[str, str] | str | PathLike[str]) -> "Translator":
        """The same model with the target terms of a glossary in its sources. Tokenizers and arrays are shared.

        `terms`: target terms by source term, or a UTF-8 file with a source term, a tab and a target term per line.

        Raises:
            CheckpointError, DataError: as `tokenizers`; or the file cannot be read, or the source tokenizer lacks the
                tokens around terms because the model was not trained with a glossary.
        """
        glossary, tokenizer = Glossary.of(terms), self.tokenizers.src
        try:
            return Translator(self.checkpoint, self.name, self, glossary=glossary.for_tokenizer(tokenizer))
        except DataError as error:
            raise DataError(f"{self.name}: {error}") from None

    @property
    def lacks_language(self) -> bool:
        """Whether the model needs a target language token and the checkpoint sets none."""
        config, layout = self.config, self.checkpoint.layout
        return lacks_language(config, self.tokenizers, layout in LAYOUTS and family(layout).multilingual)

    @property
    def generation(self) -> Generation | None:
        """The decoding settings of a Hugging Face directory.

        Raises:
            ConversionError: one cannot be applied.
        """
        return generation_of(self.checkpoint.documents, self.config, self.name)

    def decoding(self, **fields: Any) -> DecodingConfig:
        """The decoding settings of a Hugging Face directory, else the defaults, with fields changed.

        Raises:
            ConversionError: as `generation`.
            ConfigError: a field has an invalid value.
        """
        generation_fields = {} if self.generation is None else self.generation.fields
        return decoding_with(generation_fields, fields)

    def translate(
        self,
        texts: Iterable[str],
        *,
        framework: Framework = "flax",
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        forced_bos: str | int | None = None,
        **decoding: Any,
    ) -> list[str]:
        """The best translation of each text of an iterable; empty for an empty text.

        `src_lang`, `tgt_lang`: as `with_languages`; `forced_bos`: as `with_forced_bos`; `decoding`: as `decoding`.
        """
        if src_lang is not None or tgt_lang is not None:
            translator = self.with_languages(src_lang, tgt_lang)
            return translator.translate(texts, framework=framework, forced_bos=forced_bos, **decoding)
        if forced_bos is not None:
            return self.with_forced_bos(forced_bos).translate(texts, framework=framework, **decoding)
        results = self.hypotheses(texts, self.decoding(**decoding), framework)
        return [hypotheses[0].text if hypotheses else "" for hypotheses in results]

    def hypotheses(
        self,
        texts: Iterable[str] | Sources,
        decoding: DecodingConfig,
        framework: Framework = "flax",
        progress: Callable[[int], None] = lambda count: None,
        first: int = 0,
        prefixes: Iterable[str] | None = None,
    ) -> list[list[Hypothesis]]:
        """The `n_best` translations of each text, best first, or as they were drawn; an empty list for an empty text.

        `first`: the number of the first text, on which samples depend. `prefixes`: the beginning of each translation,
        which is empty for none.

        Raises:
            DataError: there is not one prefix per text, or one is too long.
        Texts are truncated to the model's `max_length` tokens; `too_long` lists them.
        """
        sources = self.sources(texts)
        results: list[list[Hypothesis]] = [[] for _ in sources.texts]
        numbers = range(first, first + len(results))
        progress(0)
        for count, (i, hypotheses) in enumerate(self.stream(sources, decoding, framework, numbers, prefixes), 1):
            results[i] = hypotheses
            progress(count)
        return results

    def stream(
        self,
        texts: Iterable[str] | Sources,
        decoding: DecodingConfig,
        framework: Framework = "flax",
        numbers: Sequence[int] | None = None,
        prefixes: Iterable[str] | None = None,
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """(index of a text, its translations) as they are finished, as `hypotheses`; empty texts are omitted.

        `numbers`: the number of each text, on which its samples depend; default: its index.

        Raises:
            DataError: as `hypotheses`.
        """
        texts, ids, _ = self.sources(texts)
        numbers = range(len(texts)) if numbers is None else numbers
        prefix_ids = self._prefix_ids(prefixes, texts, decoding.max_length or self.config.max_length)
        rows = token_batches([*map(len, ids)], self.config, decoding.beam_size)
        order = [i for batch in rows for i in batch.indices]
        batches = (
            Sentences(
                self._sources_of([texts[i] for i in batch.filled], self._padded(ids, batch)),
                np.array([numbers[i] for i in batch.filled]),
                None if prefix_ids is None else [prefix_ids[i] for i in batch.filled],
                num_sentences=len(batch.indices),
            )
            for batch in rows
        )
        try:
            for places, decoded in self._decode(framework, batches, decoding):
                for place, tokens, scores in zip(places, decoded.sentences(), decoded.scores, strict=True):
                    decoded_texts = self.tokenizers.tgt.decode(tokens)
                    yield (
                        order[place],
                        [
                            Hypothesis(text, float(s), tuple(t))
                            for text, s, t in zip(decoded_texts, scores, tokens, strict=False)
                        ],
                    )
        except NotFiniteError as error:
            text = texts[order[error.row]]
            raise NotFiniteError(f"{self.name}, {text[:80]!r}: {NAN_LOGITS}") from None

    def _prefix_ids(self, prefixes: Iterable[str] | None, texts: Sequence[str], longest: int) -> list[list[int]] | None:
        """The ids of each prefix, without special tokens. Raises: DataError, as `hypotheses`."""
        if prefixes is None:
            return None
        prefixes, tokenizer = _sentences("prefixes", prefixes), self.tokenizers.tgt
        if len(prefixes) != len(texts):
            raise DataError(f"{len(prefixes)} prefixes and {len(texts)} texts: each text needs one, empty for none")
        ids = tokenizer.encode(prefixes)
        self._check_ids("tgt", tokenizer, prefixes, ids)
        most = longest - 1 - len(self._forced_ids)
        for text, sentence in zip(prefixes, ids, strict=True):
            if len(sentence) > most:
                raise DataError(f"prefix {text[:80]!r}: has {len(sentence)} tokens; at most {most} leave room for EOS")
        return ids

    def forbidden(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of words or phrases, at the beginning of a text and after a space, for decoding.

        Raises:
            CheckpointError, DataError: as `source_ids`.
        """
        words = [word for word in _sentences("words", words) if word.strip()]
        texts = [*words, *(f" {word}" for word in words)]
        ids = self.tokenizers.tgt.encode(texts)
        self._check_ids("tgt", self.tokenizers.tgt, texts, ids)
        return tuple(dict.fromkeys(tuple(sequence) for sequence in ids if sequence))

    def too_long(self, texts: Iterable[str]) -> list[int]:
        """Indices of the texts with more tokens than the model's `max_length`."""
        return self.sources(texts).too_long

    def score(
        self,
        sources: Iterable[str] | Sources,
        targets: Iterable[str],
        framework: Framework = "flax",
        place: str = "pair",
    ) -> list[float]:
        """log p(target | source) in nats of each pair; a forced first token does not count, as in beam search.

        `place`: what the pairs are, for messages; a number follows.

        Raises:
            DataError: a source is empty, or a side is longer than the model's `max_length`.
        """
        sources = sources if isinstance(sources, Sources) else _sentences("sources", sources)
        targets = _sentences("targets", targets)
        texts, src, too_long = self.sources(sources)
        if len(texts) != len(targets):
            raise DataError(f"{len(texts)} sources and {len(targets)} targets: each source needs one target")
        tgt = self.target_ids(targets)
        long_pairs = {*too_long, *(i for i, ids in enumerate(tgt) if len(ids) > self.config.max_length)}
        for i, ids in enumerate(src):
            if not ids:
                raise DataError(f"{place} {i + 1}: the source {texts[i]!r} has no token; remove the pair")
            if i in long_pairs:
                raise DataError(f"{place} {i + 1}: a side has more than {self.config.max_length} tokens")
        scores = [0.0] * len(src)
        for batch in token_batches([*map(max, map(len, src), map(len, tgt))], self.config):
            padded = [pad([ids[i] for i in batch.filled], self.config.pad_id) for ids in (src, tgt)]
            tokens = self._score(framework, [texts[i] for i in batch.filled], *padded)
            for i, value in zip(batch.indices, tokens[:, len(self._forced_ids) :].sum(1), strict=False):
                scores[i] = float(value)
                if isnan(scores[i]):
                    raise NotFiniteError(f"{place} {i + 1}: {NAN_LOGITS}")
        return scores

    def attention(self, source: str, target: str | Hypothesis) -> Attention:
        """The attention weights of a translation `target` of `source`, by the tokens of a hypothesis if it is one."""
        src = self.source_ids([source])[0]
        if not isinstance(target, Hypothesis):
            tgt = self.target_ids([target])[0]
        else:  # its text may be encoded to other tokens
            tgt = [*target.tokens, self.config.eos_id][: self.config.max_length]
        maps = attention_maps(self.flax, np.array([src]), np.array([tgt]))
        return Attention(maps.cross[0, -1].mean(0), self.tokenizers.tgt.show(tgt), self.tokenizers.src.show(src))

    def source_ids(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text, truncated to the model's `max_length`; an empty list for an empty text.

        Raises:
            CheckpointError, DataError: as `tokenizers`; or a text has a token beyond the model's vocabulary.
        """
        return self.sources(texts).ids

    def sources(self, texts: Iterable[str] | Sources) -> Sources:
        """The texts with their ids, for several calls. Raises: CheckpointError, DataError: as `source_ids`."""
        if isinstance(texts, Sources):
            return texts
        texts, tokenizer = _sentences("texts", texts), self.tokenizers.src
        ids = tokenizer.encode_sources(texts)
        too_long = [i for i, sentence in enumerate(ids) if len(sentence) > self.config.max_length]
        truncated = tokenizer.encode_sources([texts[i] for i in too_long], self.config.max_length)
        for i, sentence in zip(too_long, truncated, strict=True):
            ids[i] = sentence
        if self.glossary is not None:
            spans = [self.glossary.spans(text) for text in texts]
            annotated = encode_annotated(tokenizer, texts, spans, self.config.max_length)
            for i, sentence in annotated.items():
                ids[i] = sentence
            too_long = [i for i in too_long if i not in annotated]  # a target term may have fewer tokens
        self._check_ids("src", tokenizer, texts, ids)
        for i, text in enumerate(texts):
            if len(ids[i]) <= tokenizer.added or not text.strip():  # some tokenizers encode spaces
                ids[i] = []
        return Sources(texts, ids, too_long)

    def target_ids(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text, a forced first token first and EOS last.

        Raises:
            CheckpointError, DataError: as `source_ids`.
        """
        texts = _sentences("texts", texts)
        sentences = self.tokenizers.tgt.encode(texts)
        self._check_ids("tgt", self.tokenizers.tgt, texts, sentences)
        return [[*self._forced_ids, *ids, self.config.eos_id] for ids in sentences]

    @property
    def _forced_ids(self) -> list[int]:
        return [] if self.config.forced_bos_id is None else [self.config.forced_bos_id]

    def _check_ids(self, side: str, tokenizer: Tokenizer, texts: Iterable[str], ids: Sequence[Sequence[int]]) -> None:
        size = getattr(self.config, f"{side}_vocab_size")
        for text, sentence in zip(texts, ids, strict=True):
            if (excess_id := next((i for i in sentence if i >= size), None)) is not None:
                token = tokenizer.token_of(excess_id)
                raise DataError(
                    f"{self.name}: has no token {token!r} (id {excess_id}, {size:,} tokens), as in {text[:100]!r}"
                )

    def _padded(self, ids: Sequence[Sequence[int]], batch: Rows) -> np.ndarray:
        """The sources of a batch for decoding."""
        rows = [ids[i] for i in batch.filled]
        return pad(rows, self.config.pad_id, round_up(max(map(len, rows)), _MULTIPLE, self.config.max_length))

    def _sources_of(self, texts: Sequence[str], src: np.ndarray) -> list[np.ndarray]:
        """The ids of texts by model; `src` has those of the first."""
        return [src]

    def _decode(
        self, framework: Framework, batches: Iterable[Sentences], decoding: DecodingConfig
    ) -> Iterator[tuple[np.ndarray, Decoded]]:
        """The translations as they are finished, with the sentences' places in all batches."""
        if framework == "flax":
            models, arrays = [member.flax for member in self.members], [member._arrays for member in self.members]
            yield from generate_batches(models, batches, decoding, decoding_threads(), arrays)
            return
        from .. import torch_reference

        models, first = [member.torch for member in self.members], 0
        for batch in batches:
            sources = [as_tensor(np.asarray(src)[: batch.num_sentences]) for src in batch.sources]
            numbers, prefixes = np.asarray(batch.numbers)[: batch.num_sentences], batch.prefixes
            prefixes = None if prefixes is None else prefixes[: batch.num_sentences]
            decoded = torch_reference.generate_together(models, sources, decoding, None, numbers, prefixes)
            yield first + np.arange(len(numbers)), decoded
            first += len(numbers)

    def _score(self, framework: Framework, texts: Sequence[str], src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
        """The log-probability of each target token of a block."""
        if framework == "flax":
            return score(self.flax, src, tgt).tokens
        from .. import torch_reference

        return torch_reference.score(self.torch, as_tensor(src), as_tensor(tgt)).tokens


def load(
    path: str | PathLike[str], *, adapter: str | PathLike[str] | None = None, quantize: Quantization | None = None
) -> Translator:
    """Load a trained model: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file.

    `adapter`: the directory of a LoRA adapter, which is merged into the weights of a Hugging Face directory.
    `quantize`: "int8" computes products with weights in 8-bit integers, in Flax only.

    Raises:
        CheckpointError, ConversionError, DataError: there is no checkpoint, or it cannot be read.
        ConfigError: `quantize` has another value.
    """
    if quantize not in (None, *get_args(Quantization)):
        raise ConfigError(f"quantize={quantize!r}: must be None or 'int8'")
    return Translator(load_checkpoint(path, adapter=adapter, weights_only=True), str(path), quantize=quantize)


def _sentences(name: str, texts: Iterable[str]) -> list[str]:
    """The sentences of any iterable. Raises: TypeError if it is one sentence, or holds something else."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        hint = f"; for one sentence, pass [{name[:-1]}]" if isinstance(texts, str) else ""
        raise TypeError(f"{name} is a {type(texts).__name__}: must be a list of sentences{hint}")
    sentences = list(texts)
    for i, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise TypeError(f"{name}[{i}] is a {type(sentence).__name__}: must be a sentence, a str")
    return sentences


def as_tensor(ids: np.ndarray) -> Any:
    """Ids as a tensor of PyTorch."""
    import torch

    return torch.tensor(ids)
