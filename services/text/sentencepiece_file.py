"""A vocabulary of the SentencePiece library (`tokenizer.model`), by the keys that GGUF has for one.
Source: sentencepiece_model.proto of that library."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from .gguf_tokenizer import GgufTokenizerError

FILE_NAME = "tokenizer.model"
PACKAGE = "headwater.sentencepiece"
"""Not the library's own name: a process may have loaded that one too."""
FIELD = descriptor_pb2.FieldDescriptorProto
STRING = FIELD.TYPE_STRING
FLOAT = FIELD.TYPE_FLOAT
INT = FIELD.TYPE_INT32
BOOL = FIELD.TYPE_BOOL
BYTES = FIELD.TYPE_BYTES
MESSAGES: dict[str, dict[str, tuple[int, Any, str]]] = {
    "Piece": {"piece": (1, STRING, ""), "score": (2, FLOAT, "0"), "type": (3, INT, "1")},
    "Trainer": {
        "model_type": (3, INT, "1"),
        "byte_fallback": (35, BOOL, "false"),
        "unk_id": (40, INT, "0"),
        "bos_id": (41, INT, "1"),
        "eos_id": (42, INT, "2"),
        "pad_id": (43, INT, "-1"),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, BYTES, ""),
        "add_dummy_prefix": (3, BOOL, "true"),
        "remove_extra_whitespaces": (4, BOOL, "true"),
    },
}
"""Fields that are read: number, type, default."""
BPE = 2
"""`model_type` of byte-pair merges."""


def read_sentencepiece(path: Path) -> dict[str, Any]:
    """Values by their names behind `tokenizer.ggml.`. Raises `GgufTokenizerError`."""
    model: Any = _message_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        raise GgufTokenizerError(
            FILE_NAME, path.name, "a file of the SentencePiece library"
        ) from None
    trainer = model.trainer
    normalizer = model.normalizer
    if not model.pieces:
        raise GgufTokenizerError("pieces", 0, "one and more")
    if trainer.model_type != BPE:
        allowed = f"{BPE}, byte-pair merges"
        raise GgufTokenizerError("trainer_spec.model_type", trainer.model_type, allowed)
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        allowed = "the identity, which keeps all spaces"
        raise GgufTokenizerError("normalizer_spec", "a change of text", allowed)
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],
        "add_space_prefix": normalizer.add_dummy_prefix,
    }
    for name, token_id in (
        ("unknown", trainer.unk_id),
        ("bos", trainer.bos_id),
        ("eos", trainer.eos_id),
        ("padding", trainer.pad_id),
    ):
        if token_id >= 0:
            values[f"{name}_token_id"] = token_id
    return values


@cache
def _message_class() -> type[Message]:
    file = descriptor_pb2.FileDescriptorProto(
        name="sentencepiece.proto", package=PACKAGE, syntax="proto2"
    )
    for message, fields in MESSAGES.items():
        made = file.message_type.add(name=message)
        for name, (number, kind, default) in fields.items():
            made.field.add(
                name=name,
                number=number,
                type=kind,
                label=FIELD.LABEL_OPTIONAL,
                default_value=default or None,
            )
    model = file.message_type.add(name="Model")
    parts = (("pieces", "Piece"), ("trainer", "Trainer"), ("normalizer", "Normalizer"))
    for number, (name, kind) in enumerate(parts, 1):
        model.field.add(
            name=name,
            number=number,
            type=FIELD.TYPE_MESSAGE,
            type_name=f".{PACKAGE}.{kind}",
            label=FIELD.LABEL_REPEATED if number == 1 else FIELD.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Model"))
