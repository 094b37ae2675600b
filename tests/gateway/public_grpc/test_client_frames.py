"""Frames that a client sends over gRPC, as gRPC gets them."""

from __future__ import annotations

import struct

import pytest

from headwater.gateway.public_grpc.client_frames import ClientFrames, HeadTooLong, with_max_streams
from tests.gateway.public_grpc.raw_http2 import (
    ACK,
    CONTINUATION,
    END_HEADERS,
    HEADERS,
    MAX_CONCURRENT_STREAMS,
    PREFACE,
    SETTINGS,
    frame,
)

DATA = 0
BEGIN = PREFACE + frame(SETTINGS, 0, 0, b"\0\1\0\0\0\0")
ACKNOWLEDGED = frame(SETTINGS, ACK, 0, b"")
CALL = frame(HEADERS, 0, 1, b"head") + frame(CONTINUATION, END_HEADERS, 1, b"rest")
BODY = frame(DATA, 1, 1, b"x" * 40)


@pytest.mark.parametrize("piece_len", [1, 2, 5, 9, 10, 33, 1000])
def test_settings_are_acknowledged_before_the_first_call_and_by_the_client_no_more(
    piece_len: int,
) -> None:
    frames = ClientFrames(100)
    sent = BEGIN + CALL + ACKNOWLEDGED + BODY + ACKNOWLEDGED + CALL
    got = b"".join(
        frames.forwarded(sent[at : at + piece_len]) for at in range(0, len(sent), piece_len)
    )
    # The second acknowledgement is of later settings.
    assert got == BEGIN + ACKNOWLEDGED + CALL + BODY + ACKNOWLEDGED + CALL


def test_a_client_is_known_to_have_acknowledged() -> None:
    frames = ClientFrames(100)
    assert frames.forwarded(BEGIN) == BEGIN
    assert not frames.has_acknowledged
    assert frames.forwarded(ACKNOWLEDGED) == ACKNOWLEDGED
    assert frames.has_acknowledged


def test_a_head_is_bounded_with_the_heads_of_its_frames() -> None:
    frames = ClientFrames(100)
    frames.forwarded(BEGIN + frame(HEADERS, END_HEADERS, 1, b"x" * 91) + BODY)
    # Another call's head counts anew.
    frames.forwarded(frame(HEADERS, 0, 3, b"") + frame(CONTINUATION, 0, 3, b"") * 10)
    with pytest.raises(HeadTooLong):
        frames.forwarded(frame(CONTINUATION, 0, 3, b""))


def test_a_client_hears_of_another_number_of_calls_and_nothing_else_changes() -> None:
    def settings(number: int) -> bytes:
        values = ((4, 65535), (MAX_CONCURRENT_STREAMS, number), (6, 16384))
        return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *each) for each in values))

    assert with_max_streams(settings(256) + BODY, 128) == settings(128) + BODY
