"""Callbacks; one that fails is logged and affects neither others nor the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec

import structlog

Arguments = ParamSpec("Arguments")


def call_each(
    listeners: Iterable[Callable[Arguments, None]],
    /,
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> None:
    """Calls every listener. One may remove itself or others meanwhile."""
    for listener in list(listeners):
        try:
            listener(*args, **kwargs)
        except Exception as fault:
            structlog.get_logger().error("listener failed", listener=repr(listener), exc_info=fault)
