"""Reads SentencePiece models as protocol buffers."""

from importlib.metadata import version
from typing import Any

from tokenizers import normalizers

from ...backend.errors import DataError

CONTROL, USER_DEFINED = 3, 4  # kinds of pieces


def read_sentencepiece(content: bytes, place: str) -> Any:
    """The model's `ModelProto`.

    Raises:
        DataError: it is no SentencePiece model (names the place), or protobuf is too old for sentencepiece.
    """
    from google.protobuf.message import DecodeError
    from google.protobuf.runtime_version import VersionError

    try:
        from sentencepiece import sentencepiece_model_pb2 as schema
    except VersionError:
        names = " does not work with ".join(f"{name} {version(name)}" for name in ("sentencepiece", "protobuf"))
        raise DataError(f"{names}; pip install 'sentencepiece<0.2.3', or upgrade protobuf") from None

    proto: Any = schema.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        proto.ParseFromString(content)
    except DecodeError:
        proto.Clear()
    if not proto.pieces:
        hint = "" if content else ": it is empty; download or copy it again"
        raise DataError(f"{place}: is not a SentencePiece model{hint}")
    if damaged := [i for i, piece in enumerate(proto.pieces) if not isinstance(piece.piece, str)]:
        raise DataError(f"{place}: is damaged: piece {damaged[0]} is not UTF-8")
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        try:
            normalizers.Precompiled(charsmap)
        except Exception:  # the library raises a bare Exception
            raise DataError(f"{place}: is damaged: its table of normalization cannot be read") from None
    return proto
