"""Comments that keep a stream of events open."""

from __future__ import annotations

from headwater.gateway.wire.sse import keep_alive


def test_a_comment_tells_how_long_a_model_will_sleep() -> None:
    assert keep_alive() == b": keep-alive\n\n"
    assert keep_alive(3.2) == b": the model is asleep; awake in about 4 s\n\n"
