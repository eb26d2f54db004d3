"""One beam search in four backends: n-best lists, scores, and a certificate for each sentence that differs.

The reference is the PyTorch twin's search in float64. Every backend computes in float32 and searches by the same rules.
A backend may differ from the reference only where its rounding errors are as large as the reference's margin: the
smallest error of a sum of log-probabilities that changes a decision of the search.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import flax_transformer, torch_reference
from ...backend.errors import ConversionError
from ...configs.decoding import DecodingConfig
from ...configs.schema import TransformerConfig
from ...convert.checkpoint import Checkpoint
from ...convert.formats.ctranslate2 import Vocabulary, write_into
from ...convert.formats.hugging_face import LAYOUTS, family, write_hugging_face
from ...formulas.decoding import Decoded, collect, decoder_inputs
from ...formulas.padding import pad
from ..oracles.transformers import load_model
from .ctranslate2 import COMMON_RULES, target_prefix, translate_options
from .decoding import transformers_generate

BACKENDS = ("flax", "torch", "transformers", "ctranslate2")
BEAM_SIZES = (1, 5)
_WITHOUT_SCORES = ("transformers", 1)  # (backend, beam size): its greedy search
_BLOCK = 32  # sentences per batch
_SCORE_RATIO = 10  # between the largest errors of two backends; up to 6 in correct ones, on small random models
_SAFETY = 2  # the measured errors are those of the returned hypotheses; of the others, they may be larger

Search = Callable[[np.ndarray, DecodingConfig], Decoded]


@dataclass(frozen=True)
class Certificate:
    """Why the n-best lists of a sentence differ, with sums of log-probabilities by the PyTorch twin in float64."""

    line: int
    rank: int  # of the first hypothesis that differs
    step: int  # first token at which the two hypotheses part, from 1; 0: only their order differs
    sums: tuple[float, float]  # of the reference's hypothesis and of the backend's, in nats
    margin: float  # of the reference's closest decision, in nats
    bound: float  # float32 error of sums that was measured for this sentence, in nats

    @property
    def is_rounding(self) -> bool:
        """Whether rounding can make the difference."""
        return self.margin <= self.bound

    def __str__(self) -> str:
        """One line."""
        verdict = "within rounding" if self.is_rounding else "DIFFERENT"
        place = f"token {self.step}" if self.step else "the order of equal hypotheses"
        sums = f"sums {self.sums[0]:.6f} and {self.sums[1]:.6f}"
        return (
            f"line {self.line}: {verdict}: hypothesis {self.rank}, diverges at {place}, {sums}, "
            f"margin {self.margin:.1e}, float32 error {self.bound:.1e}"
        )


@dataclass
class BackendAgreement:
    """Agreement of a backend with the reference, over all sentences of a text; all hypotheses count."""

    backend: str
    beam_size: int
    equal: int = 0
    # largest difference of the sums of log-probabilities of equal sentences, in nats; None: it returns no scores
    score_error: float | None = 0.0
    certificates: list[Certificate] = field(default_factory=list)
    float32_error: float = 0.0  # the PyTorch twin's own error of sums in float32, the largest of the text, in nats

    @property
    def has_equal_scores(self) -> bool:
        """Whether float32 explains the difference of scores."""
        return self.score_error is None or self.score_error <= _SCORE_RATIO * self.float32_error

    @property
    def ok(self) -> bool:
        """Whether rounding explains every difference of hypotheses and scores."""
        return not self.different and self.has_equal_scores

    @property
    def different(self) -> list[Certificate]:
        """The certificates of differences that rounding cannot explain."""
        return [certificate for certificate in self.certificates if not certificate.is_rounding]

    def document(self) -> dict[str, Any]:
        """The agreement for JSON."""
        certificates = [asdict(c) | {"rounding": c.is_rounding} for c in self.certificates]
        return asdict(self) | {"certificates": certificates, "ok": self.ok}


def compare_backends(
    checkpoint: Checkpoint,
    searches: Mapping[str, Search],
    sources: Mapping[int, Sequence[int]],
    beam_size: int,
    progress: Callable[[int], None] = lambda count: None,
    max_length: int | None = None,
) -> list[BackendAgreement]:
    """Compare the n-best lists of backends with those of the PyTorch twin in float64.

    `sources`: ids of each line of a text, by line number. `progress` receives the number of lines compared.
    `max_length`: of hypotheses; None: the model's.
    """
    reference = in_dtype(checkpoint, "float64").to_torch()
    float32 = in_dtype(checkpoint, "float32").to_torch()
    config = checkpoint.config
    decoding = DecodingConfig(
        beam_size=beam_size, n_best=beam_size, max_length=max_length or config.max_length, **COMMON_RULES
    )
    agreements = [
        BackendAgreement(backend, beam_size, score_error=None if (backend, beam_size) == _WITHOUT_SCORES else 0.0)
        for backend in searches
    ]
    order, float32_error = sorted(sources, key=lambda line: len(sources[line])), 0.0
    progress(0)
    for start in range(0, len(order), _BLOCK):
        lines = order[start : start + _BLOCK]
        block = [*lines, *[lines[-1]] * (_BLOCK - len(lines))]  # one size, because each size is compiled
        src = pad([sources[line] for line in block], config.pad_id, dtype=np.int64)
        expected = torch_reference.generate(reference, torch.from_numpy(src), decoding)
        float32_error = max(float32_error, _float32_error(float32, src, expected))
        for agreement, search in zip(agreements, searches.values(), strict=True):
            decoded = search(src, decoding)
            for row, line in enumerate(lines):
                pair = [_hypotheses(side, row) for side in (expected, decoded)]
                if pair[0] == pair[1]:
                    agreement.equal += 1
                    if agreement.score_error is not None:
                        agreement.score_error = max(agreement.score_error, _score_error(decoded, expected, row))
                else:
                    margin = float(expected.margins[row]) if expected.margins is not None else 0.0
                    certificate = _certify(reference, float32, src[row : row + 1], pair, margin, line)
                    agreement.certificates.append(certificate)
        progress(start + len(lines))
    for agreement in agreements:
        agreement.float32_error = float32_error
    return agreements


def load_searches(
    checkpoint: Checkpoint, backends: Sequence[str], folder: Path
) -> tuple[dict[str, Search], dict[str, str]]:
    """(search by backend, reason by backend that has none); backends read their models from subfolders of `folder`."""
    makers = {"flax": _flax, "torch": _torch, "transformers": _transformers, "ctranslate2": _ctranslate2}
    searches, missing = {}, {}
    for backend in backends:
        try:
            searches[backend] = makers[backend](in_dtype(checkpoint, "float32"), folder)
        except ImportError:
            missing[backend] = f"is not installed; pip install {backend}"
        except ConversionError as error:
            missing[backend] = " ".join(str(error).split())[:300]
    return searches, missing


def in_dtype(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The same checkpoint, with parameters of a dtype, which computes in it."""
    config = checkpoint.config.replace(param_dtype=dtype, compute_dtype=dtype)
    arrays = {name: array.astype(dtype) for name, array in checkpoint.arrays.items()}
    return replace(checkpoint, config=config, arrays=arrays)


def _flax(checkpoint: Checkpoint, folder: Path) -> Search:
    model = checkpoint.to_flax()
    return lambda src, decoding: flax_transformer.generate(model, src, decoding)


def _torch(checkpoint: Checkpoint, folder: Path) -> Search:
    model = checkpoint.to_torch()
    return lambda src, decoding: torch_reference.generate(model, torch.from_numpy(src), decoding)


def _transformers(checkpoint: Checkpoint, folder: Path) -> Search:
    """`generate` of the family's class, without its own settings of decoding."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # `generate` warns about rules of beams in greedy search
    config = checkpoint.config
    layout = _layout_of(checkpoint)
    path = folder / "transformers"
    write_hugging_face(replace(checkpoint, files={}), path, layout)
    model = load_model(path, replace(checkpoint, layout=layout))
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=config.pad_id,
        bos_token_id=config.bos_id,
        eos_token_id=config.eos_id,
        decoder_start_token_id=config.decoder_start_id,
    )
    return lambda src, decoding: transformers_generate(model, config, src, decoding)


def _layout_of(checkpoint: Checkpoint) -> str:
    """The family of `transformers` that has this model. Raises: ConversionError if there is none."""
    if checkpoint.layout in LAYOUTS:
        return checkpoint.layout
    for layout in LAYOUTS:
        try:
            family(layout).settings(checkpoint.config)
        except ConversionError:
            continue
        return layout
    raise ConversionError(f"has no family with this model, of {', '.join(LAYOUTS)}")


def _ctranslate2(checkpoint: Checkpoint, folder: Path) -> Search:
    """`translate_batch`; each token is an id in brackets, so that no tokenizer is needed."""
    import ctranslate2

    config = checkpoint.config
    path = folder / "ctranslate2"
    path.mkdir()
    names = [f"<{i}>" for i in range(max(config.src_vocab_size, config.tgt_vocab_size))]
    source, target = (Vocabulary(names[:size], names[0]) for size in (config.src_vocab_size, config.tgt_vocab_size))
    write_into(path, config, checkpoint.arrays, source, target)
    translator = ctranslate2.Translator(str(path), device="cpu", compute_type="float32")

    def search(src: np.ndarray, decoding: DecodingConfig) -> Decoded:
        options = translate_options(config, decoding, names)
        sentences = [[names[i] for i in row if i != config.pad_id] for row in src]
        prefix = target_prefix(config, names)
        results = translator.translate_batch(sentences, prefix and [prefix] * len(sentences), **options)
        return _decoded(
            [result.hypotheses for result in results], [result.scores for result in results], config, decoding
        )

    return search


def _decoded(
    hypotheses: Sequence[Sequence[Sequence[str]]],
    scores: Sequence[Sequence[float]],
    config: TransformerConfig,
    decoding: DecodingConfig,
) -> Decoded:
    """The result of a search of CTranslate2, whose tokens are ids in brackets."""
    lengths = [len(names) for n_best in hypotheses for names in n_best]
    longest = max(decoding.max_length or config.max_length, *lengths)  # a hypothesis without EOS has all of it
    tokens = np.full((len(hypotheses), decoding.n_best, longest + 1), config.pad_id)
    sums = np.full(tokens.shape[:2], -np.inf)
    for row, n_best in enumerate(hypotheses):
        for rank, names in enumerate(n_best):
            tokens[row, rank, 1 : len(names) + 1] = [int(name[1:-1]) for name in names]
            tokens[row, rank, len(names) + 1 :] = config.pad_id
            sums[row, rank] = scores[row][rank]
    return collect(tokens, sums, config, decoding)


def _hypotheses(decoded: Decoded, row: int) -> list[tuple[int, ...]]:
    """The hypotheses of a sentence with EOS, best first."""
    pairs = zip(decoded.tokens[row], decoded.lengths[row], strict=True)
    return [tuple(tokens[:n].tolist()) for tokens, n in pairs if n]


def _score_error(decoded: Decoded, expected: Decoded, row: int) -> float:
    lengths = expected.lengths[row]
    valid = lengths > 0
    return float((np.abs(decoded.scores[row] - expected.scores[row])[valid] * lengths[valid]).max(initial=0))


def _float32_error(float32: torch_reference.Transformer, src: np.ndarray, expected: Decoded) -> float:
    """The largest error of the float32 model's sums of the reference's hypotheses, by teacher forcing."""
    rows = [(row, rank) for row, rank in np.argwhere(expected.lengths > 0)]
    hypotheses = [tuple(expected.tokens[row, rank][: expected.lengths[row, rank]].tolist()) for row, rank in rows]
    sums = _partial_sums(float32, src[[row for row, _ in rows]], hypotheses)
    exact = [expected.scores[row, rank] * expected.lengths[row, rank] for row, rank in rows]
    return float(max(abs(partial[-1] - total) for partial, total in zip(sums, exact, strict=True)))


def _certify(
    reference: torch_reference.Transformer,
    float32: torch_reference.Transformer,
    src: np.ndarray,
    pair: Sequence[Sequence[tuple[int, ...]]],
    margin: float,
    line: int,
) -> Certificate:
    """The certificate of a sentence (1, S) whose n-best lists differ."""
    hypotheses = [*dict.fromkeys((*pair[0], *pair[1]))]
    sources = np.repeat(src, len(hypotheses), axis=0)
    partial_sums = [_partial_sums(model, sources, hypotheses) for model in (reference, float32)]
    errors = [abs(a - b) for sums in zip(*partial_sums, strict=True) for a, b in zip(*sums, strict=True) if a > -np.inf]
    bound = _SAFETY * float(max(errors))
    longest = max(map(len, pair))
    lists = [[*side, *[()] * (longest - len(side))] for side in pair]
    rank = next(i for i, (a, b) in enumerate(zip(*lists, strict=True)) if a != b)
    a, b = lists[0][rank], lists[1][rank]
    step = next((i for i, tokens in enumerate(zip(a, b, strict=False)) if tokens[0] != tokens[1]), min(len(a), len(b)))
    only_order = {*pair[0]} == {*pair[1]}
    sums = tuple(float(partial_sums[0][hypotheses.index(h)][-1]) if h else float("nan") for h in (a, b))
    return Certificate(line, rank + 1, 0 if only_order else step + 1, (sums[0], sums[1]), margin, bound)


def _partial_sums(
    model: torch_reference.Transformer, src: np.ndarray, hypotheses: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """The sum of log-probabilities after each token of each hypothesis, by teacher forcing, as the search counts it."""
    config = model.config
    targets = pad(hypotheses, config.pad_id, dtype=np.int64)
    inputs = torch.from_numpy(decoder_inputs(targets, config))
    with torch.no_grad():
        logits = model(torch.from_numpy(src), inputs)
    if config.pad_id != config.eos_id:
        logits[..., config.pad_id] = -torch.inf
    tokens = logits.log_softmax(-1).gather(-1, torch.from_numpy(targets)[..., None])[..., 0].numpy()
    tokens[:, 0] *= config.forced_bos_id is None
    return [np.cumsum(row[: len(h)], dtype=np.float64) for row, h in zip(tokens, hypotheses, strict=True)]
