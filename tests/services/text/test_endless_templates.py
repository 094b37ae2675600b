"""Templates that would not come to an end, or to one that is too large, without writing anything
meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from headwater.services.runtime.errors import BadRequest
from headwater.services.text import counted_environment
from headwater.services.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
NEST = "{% for a in range(90000) %}{% for b in range(90000) %}"
ENDLESS = {
    "loops in one another": NEST + "{% set x = 1 %}{% endfor %}{% endfor %}",
    "a loop that skips": NEST + "{% continue %}{% endfor %}{% endfor %}",
    "a loop with a condition": (
        "{% for a in range(90000) %}{% for b in range(90000) if b < 0 %}x{% endfor %}{% endfor %}"
    ),
    "loops in a macro": "{% macro m() %}"
    + NEST
    + "{% endfor %}{% endfor %}{% endmacro %}{% set x = m() %}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{% set x = m(n - 1) %}{% set x = m(n - 1) %}{% endif %}{% "
        "endmacro %}{{ m(90) }}"
    ),
    "a loop that calls itself twice": (
        "{% set items = [1, 2] %}"
        "{% for a in items recursive %}{% if loop.depth < 90 %}{% set x = loop(items) %}{% endif "
        "%}{% endfor %}"
    ),
    "a loop in a captured block": "{% set x %}" + NEST + "y{% endfor %}{% endfor %}{% endset %}",
    "a text that is repeated": "{% set x = 'x' * 90000 * 90000 %}",
    "a text that is repeated from the right": "{% set x = 90000 * ('x' * 90000) %}",
    "a list that is repeated": "{% set x = [1] * 10000000000 %}",
    "a tower of powers": "{% set x = 9 ** (9 ** 9) %}",
    "as much Latin as is wanted": "{% set x = lipsum(n=1000000000) %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer than in service: steps of some of these templates are slow.
    monkeypatch.setattr(counted_environment, "MAX_STEPS", 20_000)
    template = ChatTemplate(ENDLESS[name], {})
    with pytest.raises(
        BadRequest, match="messages do not fit the model's chat template: "
    ) as raised:
        template.render(MESSAGES)
    assert raised.value.param == "messages"


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that advances by so much at each reading."""
    times = count()
    return lambda: next(times) * seconds


@pytest.mark.parametrize("name", [name for name in ENDLESS if "loop" in name or "macro" in name])
def test_a_template_whose_steps_are_slow_is_ended_by_processor_time(name: str) -> None:
    """A recursive template took 19 s for all its steps."""
    template = ChatTemplate(ENDLESS[name], {}, clock=ticking(0.1))
    with pytest.raises(
        BadRequest, match=r"it takes more than 2 s of processor time over them"
    ) as raised:
        template.render(MESSAGES)
    assert raised.value.param == "messages"


def test_the_clock_is_read_at_every_sixteenth_step_and_at_every_piece() -> None:
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 0.0

    ChatTemplate("{% for a in range(1600) %}{% set x = a %}{% endfor %}", {}, clock=clock).render(
        MESSAGES
    )
    # 1,600 passes and the call of `range`, after a reading for the deadline; one piece at most.
    assert reads in (101, 102)
    reads = 0
    ChatTemplate("a{{ messages[0].role }}b{{ messages[0].content }}", {}, clock=clock).render(
        MESSAGES
    )
    assert reads == 5


def test_a_render_has_its_own_deadline() -> None:
    template = ChatTemplate(
        "{% for a in range(200) %}{{ a }}{% endfor %}", {}, clock=ticking(0.005)
    )
    assert [template.render(MESSAGES)[:3] for _ in range(5)] == ["012"] * 5


def test_a_client_cannot_lift_the_bound() -> None:
    template = ChatTemplate(NEST + "{% endfor %}{% endfor %}", {})
    with pytest.raises(BadRequest, match="it takes more than 500000 steps"):
        template.render(MESSAGES, variables={"steps of this render": None})


def test_what_templates_do_with_loops_works_as_before() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.content }}{{ ',' if not "
        "loop.last }}"
        "{% else %}nothing{% endfor %}|{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "|{% for x in nowhere %}x{% else %}empty{% endfor %}|{% for i in range(5) if i % 2 %}{{ "
        "i }}{% endfor %}"
        "|{{ 2 ** 10 }} {{ '-' * 3 }} {{ 3 * 4 }} {{ [1] * 2 }}"
        "|{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
        "|{% for m in messages[::-1] %}{{ loop.revindex0 }}{{ loop.previtem is defined }}{% "
        "endfor %}"
    )
    rendered = ChatTemplate(source, {}).render([*MESSAGES, {"role": "user", "content": "Ho"}])
    assert rendered == "1/2 Hi,2/2 Ho|a1|empty|13|1024 --- 12 [1, 1]|123|1False0True"


def test_a_conversation_as_long_as_is_allowed_is_rendered() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", {})
    assert len(template.render(MESSAGES * 16_384)) == 2 * 16_384
