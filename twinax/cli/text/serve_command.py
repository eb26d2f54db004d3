"""The command that serves a model over HTTP."""

import os
import sys
from pathlib import Path

from ...backend.errors import MissingPackageError
from ...formulas.decoding import together
from ...inference.translator import Translator
from ..flags.serve import Serve
from ..usage import UsageError
from .text_commands import check_decoding, decoding_config, decoding_in, load_translator, sampling_fields


def serve(flags: Serve) -> int:
    """Serve until a signal; return the exit status."""
    try:
        from ...inference.serving import app, directions, engine, requests, server
    except ImportError as error:
        raise MissingPackageError(
            f"twinax serve: needs {error.name}, which is not installed: pip install 'twinax[serve]'"
        ) from None
    settings = {**flags.decoding, "log_linear": flags.log_linear or None}
    settings |= sampling_fields(flags, flags.beam_size)
    check_decoding(settings)
    for name in ("max_bytes", "max_sentences", "max_waiting"):
        if getattr(flags, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(flags, name)}: must be at least 1")
    if not 0 <= flags.window <= 1000:
        raise UsageError(f"--window {flags.window}: must be 0 to 1000 milliseconds")
    token = None if flags.token_file is None else _token(flags.token_file)
    loopback = server.is_loopback(flags.host)
    if token is None and not loopback:
        raise UsageError(
            f"--host {flags.host}: other machines reach it; set a token with --token-file, or keep to 127.0.0.1"
        )
    if not 0 <= flags.port <= 65535:
        raise UsageError(f"--port {flags.port}: must be 0 to 65535")
    try:
        bound = server.bound_socket(flags.host, flags.port)
    except OSError as error:
        raise UsageError(f"{flags.host}:{flags.port}: cannot be listened at: {error.strerror or error}") from None
    with bound:
        translator = load_translator(flags.checkpoint, flags.adapter, flags.quantize, flags.ensemble)
        names = (flags.src_lang, flags.tgt_lang)
        translator = _in_languages(translator, flags)
        translator = translator if flags.glossary is None else translator.with_glossary(flags.glossary)
        decoding = decoding_config(translator, settings, flags.ignore_generation_config)
        together([member.config for member in translator.members], decoding)  # fails if it cannot translate
        pairs = directions.Directions(translator, *names)
        name = " + ".join(Path(member.name).name for member in translator.members)  # no path of this machine
        limits = requests.Limits(flags.max_bytes, min(flags.max_sentences, flags.max_waiting), decoding.beam_size)
        service = app.Service.of(
            name,
            engine.Engine(pairs, decoding, flags.mbr),
            limits,
            flags.window / 1000,
            flags.max_waiting,
            token,
            app.LOOPBACK if loopback else None,
        )
        host, port = bound.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"twinax: {name}: http://{address}:{port} (Ctrl-C ends)", file=sys.stderr, flush=True)
        server.run(app.application(service), bound)
    return 0


def _in_languages(translator: Translator, flags: Serve) -> Translator:
    """The translator with the default languages; for a model without them, the flags are only names."""
    languages = translator.tokenizers.src.languages
    if languages is None:
        return decoding_in(translator, None, None, flags.forced_bos)
    source = None if languages.role == "source_prefix" else flags.src_lang
    if flags.forced_bos is None and source is None and flags.tgt_lang is None:
        return translator  # a request names them
    return decoding_in(translator, source, flags.tgt_lang, flags.forced_bos)


def _token(path: str) -> str:
    """The token of a file. Raises: UsageError if it has none, or others can read it."""
    if Path(path).stat().st_mode & 0o077 and os.name == "posix":
        raise UsageError(f"--token-file {path}: other users can read it; run: chmod 600 {path}")
    token = Path(path).read_text(encoding="utf-8").strip()
    if len(token) < 16 or not token.isascii():
        raise UsageError(f"--token-file {path}: the token must have at least 16 ASCII characters")
    return token
