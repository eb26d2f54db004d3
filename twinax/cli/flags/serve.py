"""The flags of `twinax serve`."""

from ..process.importing import import_without_gc
from ..usage import check_exists, one_line_errors
from .shared import CheckpointPath, Decoding, Languages, Quantization, Sampling, Switch, flags


@flags
class Serve(Languages, Decoding, Sampling):
    """Translate over HTTP, with LibreTranslate's interface and a page to type into.

    Sentences of several requests are translated together. SIGTERM and Ctrl-C end the server when the running requests
    are answered. Needs the extra "serve".

    Example: twinax serve runs/de_en --src-lang de --tgt-lang en

    Attributes:
        checkpoint: a run, a checkpoint of one, a Hugging Face directory with its tokenizer, a .pt or .safetensors
            file, a fairseq checkpoint or its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        ensemble: further checkpoints with the same target vocabulary, which translate together with the first, by the
            mean of their probabilities.
        log_linear: the ensemble averages log-probabilities instead.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        quantize: int8 computes products with weights in 8-bit integers, which is faster on a CPU with
            AVX512-VNNI or AMX; some translations change.
        glossary: text file with a source term, a tab and its target term per line, which the source then shows; for
            a model that was trained with --corpus.glossary.
        host: address to listen at; other machines reach only one that is not a loopback address.
        port: port to listen at; 0 selects a free one.
        token_file: file with a token that each request must send, as api_key or as bearer token; needed unless the
            host is a loopback address.
        window: milliseconds to wait for further requests before sentences are translated, unless many wait.
        max_bytes: bytes of a request.
        max_sentences: sentences of a request.
        max_waiting: sentences that wait; beyond them a request gets status 503 and the time after which to try again.
    """

    checkpoint: CheckpointPath
    ensemble: tuple[str, ...] = ()
    log_linear: Switch = False
    adapter: str | None = None
    quantize: Quantization | None = None
    glossary: str | None = None
    host: str = "127.0.0.1"
    port: int = 5000
    token_file: str | None = None
    window: float = 5.0
    max_bytes: int = 1_000_000
    max_sentences: int = 2_000
    max_waiting: int = 10_000

    def execute(self) -> int:
        """The exit status. Raises: UsageError."""
        check_exists(self.checkpoint, *self.ensemble, *filter(None, [self.adapter, self.glossary, self.token_file]))
        with one_line_errors():
            return import_without_gc("twinax.cli.text.serve_command").serve(self)
