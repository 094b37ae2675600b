"""The end of an X.509 certificate's validity (RFC 5280, section 4.1), read from its DER encoding:
the packages of the front stages have no reader of certificates."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION = 0xA0
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18


def certificate_end(file: Path) -> float | None:
    """End of the first certificate in a PEM file, in seconds since 1970; None where it has none
    that can be read."""
    try:
        if (found := _PEM.search(file.read_text())) is None:
            return None
        return _end_of(ssl.PEM_cert_to_DER_cert(found[0]))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _end_of(der: bytes) -> float:
    """Raises `ValueError`, `IndexError`, `StopIteration` for what is no certificate."""
    [(_, certificate)] = _elements(der)
    to_be_signed = next(_elements(certificate))[1]
    fields = [field for field in _elements(to_be_signed) if field[0] != _VERSION]
    _serial, _algorithm, _issuer, (_, validity), *_ = fields
    _, (tag, end) = _elements(validity)
    if tag not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError(tag)
    text = end.decode("ascii")
    if tag == _UTC_TIME:
        # Years 50 to 99 are those of the twentieth century.
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element that follows another."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length = int.from_bytes(der[at : at + num_bytes])
            at += num_bytes
        if at + length > len(der):
            raise ValueError("an element is cut off")
        yield tag, der[at : at + length]
        at += length
