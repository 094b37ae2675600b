"""A sandbox that ends every template: passes of loops and calls are counted and timed, products of
sizes bounded.

A template that writes nothing gives its caller no chance to look at a clock, and a render may run
on an event loop. What takes time in a template takes it by loops, by calls (macros may call
themselves twice) and by `*` and `**`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000
"""Number of passes of loops and calls in a render: thirty for each of 16,384 messages, and about a
second (2026-11-22)."""
MAX_CPU_SECONDS = 2.0
"""Seconds of processor time of a render. A call of a recursive macro takes up to a hundred times as
long as a pass of a loop."""
STEPS_PER_CLOCK_READ = 16
"""Number of steps between two reads of a thread's processor time, each of which is a system
call."""
MAX_PRODUCT_LEN = 1 << 20
"""Largest length of a text or list that is repeated."""
MAX_POWER_BITS = 4096
STEPS = "steps of this render"
"""Name of the count in a context; no template can write it."""
_COUNTED = "counted"
_OPERATORS = {"*": operator.mul, "**": operator.pow}


class Steps:
    """Steps and processor time that one render has left. A render stays on one thread."""

    __slots__ = ("_clock", "_deadline", "left")

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.left = MAX_STEPS
        self._clock = clock
        self._deadline = clock() + MAX_CPU_SECONDS

    def take(self) -> None:
        """Counts steps. Raises `TemplateError` when no steps or no time are left."""
        self.left -= 1
        if self.left < 0:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps over them")
        if self.left % STEPS_PER_CLOCK_READ == 0:
            self.check_time()

    def check_time(self) -> None:
        """Raises `TemplateError` when no time is left."""
        if self._clock() > self._deadline:
            raise jinja2.TemplateError(
                f"it takes more than {MAX_CPU_SECONDS:g} s of processor time over them"
            )


class CountedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox. Contexts of its templates hold a `Steps` under `STEPS`."""

    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_COUNTED] = _counted
        # A template chooses the length of its text.
        self.globals.pop("lipsum")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return template

    def call(self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        __context[STEPS].take()
        return super().call(__context, __obj, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        return _OPERATORS[operator](left, right)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    steps: Steps = context[STEPS]
    for item in items:
        steps.take()
        yield item


def _check_product(left: Any, right: Any) -> None:
    """Raises `TemplateError` for a product that is too large. Products of numbers are as long as
    both together."""
    for many, times in ((left, right), (right, left)):
        if (
            isinstance(many, str | list | tuple)
            and isinstance(times, int)
            and len(many) * times > MAX_PRODUCT_LEN
        ):
            raise jinja2.TemplateError(f"it repeats something to more than {MAX_PRODUCT_LEN} parts")


def _check_power(base: Any, exponent: Any) -> None:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * exponent > MAX_POWER_BITS
    ):
        raise jinja2.TemplateError(f"it makes a number of more than {MAX_POWER_BITS} bits")
