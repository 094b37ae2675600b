"""The page of fields is that of the structs that decode bodies."""

from __future__ import annotations

import msgspec

from headwater.gateway.http.document import BODIES
from tests.docs.fields import PAGE, page


def test_the_page_of_fields_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.docs.fields`"


def test_every_field_of_an_endpoint_has_its_row() -> None:
    text = page()
    for path, (kind, _) in BODIES.items():
        section = text.partition(f"## POST {path}\n")[2].partition("\n## ")[0]
        names = [field.encode_name for field in msgspec.structs.fields(kind)]
        assert [name for name in names if f"| `{name}` |" not in section] == [], path
