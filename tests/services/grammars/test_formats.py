"""Formats of dates and times: what the calendar has, and leap seconds where RFC 3339 allows
them."""

from __future__ import annotations

import datetime
import json

import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.structured_output import grammar_of
from tests.services.grammars.walks import Walker

TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2020-02-29", "2000-02-29", "0000-02-29", "2021-02-28", "2021-12-31"],
        ["2021-02-29", "1900-02-29", "2100-02-29", "2020-02-30", "2021-04-31", "2021-13-01"],
    ),
    "time": (
        ["23:59:59Z", "00:00:00.5+23:59", "23:59:60Z", "23:59:60.9z", "23:59:60-00:00"],
        ["10:30:60Z", "22:59:60Z", "23:58:60Z", "23:59:61Z", "23:59:60+01:00", "24:00:00Z", "1:00:00Z"],
    ),
    "date-time": (
        ["2020-02-29T10:00:00Z", "2016-12-31T23:59:60Z", "2015-06-30t23:59:60.5+00:00"],
        ["2021-02-29T10:00:00Z", "2016-12-30T23:59:60Z", "2016-12-31T22:59:60Z", "2016-02-30T23:59:60Z"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("more", [{}, {"pattern": "0"}], ids=["alone", "beside a pattern"])
def test_a_format_takes(name: str, more: dict[str, str], walker: Walker) -> None:
    schema = {"type": "string", "format": name} | more
    grammar = grammar_of(
        StructuredOutput(json_schema=json.dumps(schema), whitespace_pattern=""), {}
    )
    right, wrong = TEXTS[name]
    taken = [text for text in right if walker.takes(grammar, json.dumps(text))]
    assert taken == [text for text in right if more == {} or "0" in text]
    assert [text for text in wrong if walker.takes(grammar, json.dumps(text))] == []


def test_a_date_is_a_day_of_the_calendar_in_every_year(walker: Walker) -> None:
    grammar = grammar_of(StructuredOutput(json_schema='{"format": "date", "type": "string"}'), {})
    for year in [*range(1, 10_000, 97), *range(1996, 2010), 9999]:
        try:
            datetime.date(year, 2, 29)
            is_leap = True
        except ValueError:
            is_leap = False
        assert walker.takes(grammar, f'"{year:04}-02-29"') == is_leap, year
