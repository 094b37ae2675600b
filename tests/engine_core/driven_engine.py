"""An engine that a test drives step by step, and what it answers."""

from __future__ import annotations

from headwater.engine_core.engine import Engine

MOST_STEPS = 3000
"""Number of steps after which a run will not end any more."""


class DrivenEngine:
    """The engine, its tokens by request, and the cached tokens with which each request began."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}

    def step(self) -> None:
        if (output := self.engine.step()) is None:
            return
        at = 0
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            self.tokens[key] += output.token_ids[at : at + count]
            at += count
        self.cached |= {start.key: start.cached_tokens for start in output.starts}

    def run(self) -> None:
        """Steps until no request is left."""
        for _ in range(MOST_STEPS):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("it does not end")
