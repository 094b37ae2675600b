"""Comments that keep a stream of events open."""

from __future__ import annotations

from headwater.gateway.wire.sse import keep_alive


def test_a_comment_names_the_seconds_until_a_model_wakes() -> None:
    assert keep_alive() == b": keep-alive\n\n"
    assert keep_alive(3.2) == b": the model is asleep; awake in about 4 s\n\n"
