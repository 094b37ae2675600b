"""JSON values whose decoding costs more than their bytes suggest. Each is text of one value, to be
put into any body."""

from __future__ import annotations

from functools import cache

MIB = 1 << 20


@cache
def exponents(count: int = 600_000) -> bytes:
    """Short numbers with a large exponent: each takes a correctly rounded division by a power of
    ten. 3.6 MB by default, and 5 kB as gzip."""
    return b"[" + b",".join([b"1e308"] * count) + b"]"


@cache
def nested(depth: int = 900) -> bytes:
    """Lists in each other, as deep as decoders recurse without an error."""
    return b"[" * depth + b"]" * depth


@cache
def many_nested(depth: int = 60, count: int = 30_000) -> bytes:
    """A list of nested lists, none of them deep enough to be refused."""
    return b"[" + b",".join([b"[" * depth + b"]" * depth] * count) + b"]"


@cache
def keys(count: int = 250_000) -> bytes:
    """An object with many names, each of which becomes a string and an entry of a hash table."""
    return b"{" + b",".join(b'"k%d":1' % i for i in range(count)) + b"}"


@cache
def escapes(count: int = 600_000) -> bytes:
    r"""A string of `\u0061`: six bytes are read for each that is kept."""
    return b'"' + rb"\u0061" * count + b'"'


@cache
def digits(length: int = 3 * MIB) -> bytes:
    """One integer, which takes time quadratic in its digits to parse, unless its length is refused
    first."""
    return b"9" * length


@cache
def many_digits(length: int = 4000, count: int = 900) -> bytes:
    """Whole numbers that are each just short enough to be read."""
    return b"[" + b",".join([b"9" * length] * count) + b"]"


@cache
def long_text(length: int = 3 * MIB) -> bytes:
    """One string, without an escape."""
    return b'"' + b"x" * length + b'"'
