"""Reasons for which a stream ends before its answer, and their causes on the wire."""

from __future__ import annotations

from headwater.proto import common_pb2

DRAINING = "draining"
PREFILLED = "prefilled"
SUPERSEDED = "superseded"
SLOW_READER = "slow_reader"
CAUSES = {
    PREFILLED: common_pb2.LOSS_CAUSE_HANDED_OVER,
    DRAINING: common_pb2.LOSS_CAUSE_HANDED_OVER,
    SUPERSEDED: common_pb2.LOSS_CAUSE_SUPERSEDED,
}
"""Keyed by the reason of a cancel: streams that the engine itself ends, though their answers have
not ended."""
CANCELLED = "cancelled"
"""Reason of a cancel that names none."""
UNWANTED = frozenset({CANCELLED, "client_gone", SLOW_READER})
"""Reasons of cancels after which no prompt continues the answer, since the client has left. With
any other reason the client has the answer, or another attempt continues it."""
LIVE = common_pb2.LOSS_CAUSE_UNSPECIFIED
FINAL = (
    LIVE,
    common_pb2.LOSS_CAUSE_GRAMMAR,
    common_pb2.LOSS_CAUSE_BUSY,
    common_pb2.LOSS_CAUSE_LATE,
    common_pb2.LOSS_CAUSE_REPLACED,
)
"""The request does not go on at another engine."""
MISSING = "the engine does not have the stream"
