"""The server of `twinax serve` with CTranslate2 as the model.

`python -m benchmarks.serving.ctranslate2_server MODEL TOKENIZER PORT`.
"""

import os
import sys
from collections.abc import Iterator, Sequence

import ctranslate2
from tokenizers import Tokenizer

from twinax.backend.errors import DataError
from twinax.configs.decoding import DecodingConfig
from twinax.inference.serving import server
from twinax.inference.serving.app import LOOPBACK, Service, application
from twinax.inference.serving.engine import Engine, Task, Translated
from twinax.inference.serving.requests import Limits
from twinax.inference.translator import Hypothesis

BEAM_SIZE, LONGEST, BATCH = 5, 256, 32


class _Directions:
    """One language pair, whose names are those of `twinax serve` without names."""

    sources, targets, source, target = ("source",), ("target",), "source", "target"

    def pair(self, source: str | None, target: str | None) -> tuple[str, str]:
        """The pair."""
        if source not in (None, "source") or target not in (None, "target"):
            raise DataError(f"source={source!r}, target={target!r}: there is no such language")
        return "source", "target"


class _Engine(Engine):
    """Translates with CTranslate2."""

    def __init__(self, model: str, tokenizer: str):
        super().__init__(_Directions(), DecodingConfig(beam_size=BEAM_SIZE))  # pyright: ignore[reportArgumentType]
        self._tokenizer = Tokenizer.from_file(tokenizer)
        self._translator = ctranslate2.Translator(model, inter_threads=1, intra_threads=os.cpu_count() or 1)

    def _translate(self, task: Task, items: Sequence[tuple[str, int]]) -> Iterator[tuple[int, Translated]]:
        sources = [encoding.tokens for encoding in self._tokenizer.encode_batch([text for text, _ in items])]
        results = self._translator.translate_batch(
            sources, beam_size=task.beam_size, max_batch_size=BATCH, max_decoding_length=LONGEST, max_input_length=0
        )
        ids = [[self._tokenizer.token_to_id(token) for token in result.hypotheses[0]] for result in results]
        for i, text in enumerate(self._tokenizer.decode_batch(ids)):
            yield i, Translated([Hypothesis(text, 0.0, tuple(ids[i]))], False)


def main(model: str, tokenizer: str, port: int) -> None:
    """Serve until a signal."""
    service = Service.of("CTranslate2", _Engine(model, tokenizer), Limits(1_000_000, 2_000, BEAM_SIZE), hosts=LOOPBACK)
    with server.bound_socket("127.0.0.1", port) as bound:
        print(f"http://127.0.0.1:{bound.getsockname()[1]} (Ctrl-C ends)", file=sys.stderr, flush=True)
        server.run(application(service), bound)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
