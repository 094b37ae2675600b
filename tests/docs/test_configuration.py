"""The page of settings is that of the settings."""

from __future__ import annotations

import dataclasses

from tests.docs.configuration import PAGE, SHARED, STAGES, page


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.docs.configuration`"


def test_every_setting_of_a_stage_has_its_row() -> None:
    text = page()
    names = {
        field.name for _, settings in STAGES.values() for field in dataclasses.fields(settings)
    } | SHARED
    assert [name for name in names if f"| `HEADWATER_{name.upper()}` |" not in text] == []
