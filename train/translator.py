"""A trained model with its tokenizers: text in, text out, in either framework."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..configs.data import TokenizerConfig
from ..configs.decoding import DecodingConfig
from ..configs.errors import CheckpointError, DataError
from ..convert.checkpoint import Checkpoint
from ..convert.formats import load as load_checkpoint
from ..convert.hugging_face import family
from ..flax_transformer.decode import generate
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import named_arrays
from ..flax_transformer.scoring import attention_maps, score
from ..formulas.padding import pad, round_up
from .data.prepare import Tokenizers
from .data.tokenization import FILE, Tokenizer

if TYPE_CHECKING:
    from .. import torch_reference

Framework = Literal["flax", "torch"]
_BLOCK = 32  # sentences that are decoded at once
_MULTIPLE = 8  # of which lengths of sources are in a search: each is compiled


class Hypothesis(NamedTuple):
    """A translation of a sentence."""

    text: str
    score: float  # sum of log-probabilities in nats, over the penalty of the length
    tokens: tuple[int, ...]  # ids without the end


class Attention(NamedTuple):
    """Where a translation looks: weights of the last decoder layer, mean of its heads."""

    weights: np.ndarray  # (T, S)
    targets: list[str]  # tokens, the end last
    sources: list[str]


class Translator:
    """A checkpoint and how text becomes its ids.

    Raises:
        CheckpointError: when text is given and there is no tokenizer, or the model does not say how a target starts.
    """

    def __init__(self, checkpoint: Checkpoint, name: str = "the checkpoint", base: "Translator | None" = None):
        self.checkpoint, self.config, self.name = checkpoint, checkpoint.config, name
        self._base = base  # whose tokenizers and arrays it shares

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """Those of both sides.

        Raises:
            CheckpointError: there are none, or twinax cannot read the files that are there.
            DataError: a file is damaged, or has tokens that the model lacks.
        """
        if self._base is not None:
            return self._base.tokenizers
        found = Tokenizers.of_files(self.checkpoint.files, TokenizerConfig(), self.name)
        if found is None:
            carried = ", ".join(sorted({Path(name).name for name in self.checkpoint.files}))
            unread = f"no {FILE}, and {carried} cannot be used yet" if carried else f"no {FILE} or other file of one"
            raise CheckpointError(
                f"{self.name}: has no tokenizer that can be read ({unread}); `twinax convert` with --tokenizer adds one"
            )
        for side, tokenizer in zip(("src", "tgt"), found, strict=True):
            self._check_vocabulary(side, tokenizer)
        return found

    def _check_vocabulary(self, side: str, tokenizer: Tokenizer) -> None:
        """Raises: DataError where text could get an id that the model lacks.

        Special tokens may lie beyond the model's vocabulary, as <mask> does in some BART models: text seldom has them.
        """
        size, fast = getattr(self.config, f"{side}_vocab_size"), tokenizer.fast
        special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
        beyond = [(i, token) for token, i in fast.get_vocab().items() if i >= size and token not in special]
        if beyond:
            number, token = min(beyond)
            raise DataError(
                f"{self.name}: the {side} tokenizer has {len(beyond):,} tokens beyond the model's {size:,} (the first, "
                f"{token!r}, is {number}): it belongs to another model; `twinax convert` with --tokenizer replaces it"
            )

    @cached_property
    def flax(self) -> Transformer:
        """The model in Flax."""
        if self._base is not None:
            return Transformer.from_arrays(self.config, named_arrays(self._base.flax))
        return self.checkpoint.to_flax()

    @cached_property
    def torch(self) -> "torch_reference.Transformer":
        """The model in PyTorch, in evaluation mode."""
        if self._base is not None:
            return type(self._base.torch).from_state_dict(self.config, self._base.torch.state_dict()).eval()
        return self.checkpoint.to_torch().eval()

    def with_forced_bos(self, token: str | int) -> "Translator":
        """The same model with another `forced_bos_id`, by token or id: the first token of every translation.

        In M2M100, NLLB and mBART-50 it names the target language. Tokenizers and arrays are shared.

        Raises:
            CheckpointError, DataError: as `tokenizers`; or there is no such token.
        """
        number = self.tokenizers.tgt.fast.token_to_id(token) if isinstance(token, str) else token
        if number is None:
            near = get_close_matches(str(token), self.tokenizers.tgt.fast.get_vocab(), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"forced_bos={token!r}: the target tokenizer has no such token{hint}")
        if not 0 <= number < self.config.tgt_vocab_size:
            raise DataError(f"forced_bos={token!r}: ids of target tokens are 0 to {self.config.tgt_vocab_size - 1}")
        config = self.config.replace(forced_bos_id=number)
        return Translator(replace(self.checkpoint, config=config), self.name, base=self)

    @property
    def lacks_language(self) -> bool:
        """Whether the first target token of its family names the language, and neither that nor the start is set."""
        config, layout = self.config, self.checkpoint.layout
        multilingual = layout is not None and family(layout).multilingual
        return multilingual and config.forced_bos_id is None and config.decoder_start_id == config.eos_id

    def translate(
        self,
        texts: Sequence[str],
        *,
        framework: Framework = "flax",
        forced_bos: str | int | None = None,
        **decoding: Any,
    ) -> list[str]:
        """The best translation of each text; an empty text's is empty.

        `forced_bos`: as `with_forced_bos`; `decoding`: fields of `DecodingConfig`.
        """
        if forced_bos is not None:
            return self.with_forced_bos(forced_bos).translate(texts, framework=framework, **decoding)
        found = self.hypotheses(texts, DecodingConfig(**decoding), framework)
        return [hypotheses[0].text if hypotheses else "" for hypotheses in found]

    def hypotheses(
        self,
        texts: Sequence[str],
        decoding: DecodingConfig,
        framework: Framework = "flax",
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[list[Hypothesis]]:
        """The `n_best` translations of each text, best first; none of an empty text.

        A text of more than `max_length` tokens is cut there; `too_long` says which.
        """
        ids, found = self.source_ids(texts), [[] for _ in texts]
        todo, done = sorted((i for i in range(len(texts)) if ids[i]), key=lambda i: len(ids[i])), 0
        for rows, src in self._blocks(ids, todo):
            decoded = self._generate(framework)(self._lengthened(src), decoding)
            for i, tokens, scores in zip(rows, decoded.sentences(), decoded.scores, strict=False):
                texts_of = self.tokenizers.tgt.decode(tokens)
                found[i] = [
                    Hypothesis(text, float(s), tuple(t)) for text, s, t in zip(texts_of, scores, tokens, strict=False)
                ]
            done += len(rows)
            progress(done)
        return found

    def too_long(self, texts: Sequence[str]) -> list[int]:
        """Which texts have more tokens than the model takes."""
        ids = self.tokenizers.src.encode_sources(texts)
        return [i for i, sentence in enumerate(ids) if len(sentence) > self.config.max_length]

    def score(self, sources: Sequence[str], targets: Sequence[str], framework: Framework = "flax") -> list[float]:
        """log p(target | source) in nats of each pair.

        Raises:
            DataError: a source is empty, or a side is longer than the model takes.
        """
        src, tgt = self.source_ids(sources), self.target_ids(targets)
        too_long = {*self.too_long(sources), *(i for i, ids in enumerate(tgt) if len(ids) > self.config.max_length)}
        for i, ids in enumerate(src):
            if not ids:
                raise DataError(f"pair {i + 1}: the source {sources[i]!r} has no token")
            if i in too_long:
                raise DataError(f"pair {i + 1}: has a side of more than {self.config.max_length} tokens")
        found = [0.0] * len(src)
        order = sorted(range(len(src)), key=lambda i: (len(src[i]), len(tgt[i])))
        for rows, padded in self._blocks(src, order):
            wanted = pad([tgt[i] for i in _filled(rows, len(padded))], self.config.pad_id)
            for i, value in zip(rows, self._score(framework)(padded, wanted).totals, strict=False):
                found[i] = float(value)
        return found

    def attention(self, source: str, target: str) -> Attention:
        """Where the model looks while it says `target`."""
        src, tgt = self.source_ids([source])[0], self.target_ids([target])[0]
        maps = attention_maps(self.flax, np.array([src]), np.array([tgt]))
        return Attention(maps.cross[0, -1].mean(0), self.tokenizers.tgt.show(tgt), self.tokenizers.src.show(src))

    def source_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, cut to what the model takes; none of an empty text.

        Raises:
            CheckpointError, DataError: as `tokenizers`; or a text has a special token that the model lacks.
        """
        tokenizer = self.tokenizers.src
        found = tokenizer.encode_sources(texts, self.config.max_length)
        self._check_ids("src", tokenizer, texts, found)
        return [ids if len(ids) > tokenizer.added else [] for ids in found]

    def target_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text with the end. Raises: CheckpointError, DataError, as `source_ids`."""
        found = self.tokenizers.tgt.encode(texts)
        self._check_ids("tgt", self.tokenizers.tgt, texts, found)
        return [[*ids, self.config.eos_id] for ids in found]

    def _check_ids(self, side: str, tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        size = getattr(self.config, f"{side}_vocab_size")
        for text, sentence in zip(texts, ids, strict=True):
            if (beyond := next((i for i in sentence if i >= size), None)) is not None:
                token = tokenizer.fast.id_to_token(beyond)
                raise DataError(f"{self.name}: has no token {token!r} ({beyond} of {size:,}), as in {text[:100]!r}")

    def _blocks(self, ids: Sequence[list[int]], order: Sequence[int]) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """(numbers of sentences, their ids): blocks of few sizes, for each is compiled; the last is filled up."""
        size = min(_BLOCK, 1 << max(len(order) - 1, 0).bit_length())
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield rows, pad([ids[i] for i in _filled(rows, size)], self.config.pad_id)

    def _lengthened(self, src: np.ndarray) -> np.ndarray:
        return pad(src, self.config.pad_id, round_up(src.shape[1], _MULTIPLE, self.config.max_length))

    def _generate(self, framework: Framework) -> Callable[..., Any]:
        if framework == "flax":
            return lambda src, decoding: generate(self.flax, src, decoding)
        from .. import torch_reference

        return lambda src, decoding: torch_reference.generate(self.torch, _tensor(src), decoding)

    def _score(self, framework: Framework) -> Callable[..., Any]:
        if framework == "flax":
            return lambda src, tgt: score(self.flax, src, tgt)
        from .. import torch_reference

        return lambda src, tgt: torch_reference.score(self.torch, _tensor(src), _tensor(tgt))


def load(path: str | PathLike[str]) -> Translator:
    """A trained model: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file.

    Raises:
        CheckpointError, ConversionError, DataError: there is no checkpoint, or it cannot be read.
    """
    return Translator(load_checkpoint(path), str(path))


def _filled(rows: Sequence[int], size: int) -> list[int]:
    return [*rows, *[rows[-1]] * (size - len(rows))]


def _tensor(ids: np.ndarray) -> Any:
    import torch

    return torch.tensor(ids)
