"""Forms with one file, in which clients upload it."""

from __future__ import annotations

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from headwater.services.runtime.errors import BadRequest, UnsupportedMediaType

from .http_exchange import Exchange

OVERHEAD_BYTES = 64 * 1024
"""Bytes of a form beyond those of its file."""


def check_form(media_type: str) -> None:
    """Raises `UnsupportedMediaType` for another type, and for another charset than UTF-8.

    NOTE: the parser decodes fields by the charset that a client names. Some of Python's decoders
    take quadratic time: a field of Punycode held up the gateway for minutes.
    """
    kind, options = parse_options_header(media_type)
    if kind != b"multipart/form-data" or options.get(b"charset", b"utf-8").lower() not in (
        b"utf-8",
        b"utf8",
    ):
        raise UnsupportedMediaType(media_type[:100], "multipart/form-data")


async def read_form(exchange: Exchange, max_file_bytes: int) -> FormData:
    """Reads the form of a request; its caller closes it. Raises `BadRequest`, and as
    `Exchange.chunks` does."""
    chunks = exchange.chunks(max_file_bytes + OVERHEAD_BYTES)
    parser = MultiPartParser(Headers(exchange.headers), chunks, max_files=1, max_fields=8)
    try:
        return await parser.parse()
    except MultiPartException as fault:
        raise BadRequest("file", f"the form cannot be read: {fault.message}") from None
