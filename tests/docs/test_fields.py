"""The page of fields is that of the structs that decode bodies."""

from __future__ import annotations

import re

import msgspec

from headwater.gateway.http.document import BODIES
from tests.docs.fields import PAGE, page


def test_the_page_of_fields_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.docs.fields`"


def test_every_field_of_an_endpoint_has_its_row() -> None:
    sections = dict(re.findall(r"^##+ (.+)\n((?:(?!##).*\n?)*)", page(), re.M))
    for path, (kind, _) in BODIES.items():
        (section,) = (
            text for title, text in sections.items() if f"POST {path}" in title.split(", ")
        )
        shared = list(re.findall(r"fields of \[(.+?)\]", section))
        while shared:
            section += sections[name := shared.pop()]
            shared += list(re.findall(r"fields of \[(.+?)\]", sections[name]))
        rows = set(re.findall(r"^\| `(.+?)`", section, re.M))
        names = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert names == rows, path
