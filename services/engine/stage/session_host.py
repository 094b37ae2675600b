"""The server, as a session uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from headwater.engine_core.request import NewRequest

from ...runtime.session.attempt_fence import AttemptFence
from ...runtime.tracing import Tracing
from ..core.figures import CoreFigures
from ..core.messages import Command
from .requests import Limits


class Host(Protocol):
    """The server, as a session uses it."""

    limits: Limits
    tracing: Tracing
    keys: Iterator[int]
    """Names of choices between server and core, never the same twice."""
    fence: AttemptFence

    @property
    def core_figures(self) -> CoreFigures:
        """Newest figures of the core."""

    def check_open(self) -> None:
        """Raises `Unavailable` where no new request is taken now."""

    def enter(self, request: NewRequest, grammar: bytes) -> None:
        """Sends a request to the core, once its grammar, if it has one, is compiled."""

    def send(self, command: Command) -> None:
        """Sends a command to the core, in order."""

    def session_changed(self) -> None:
        """A session's last stream ended."""
