from __future__ import annotations

import pytest

from headwater.services.runtime.errors import BadRequest, NotFound


def test_an_error_names_the_first_of_many_existing_ones() -> None:
    many = [f"m{i:02}" for i in range(20)]
    named = ", ".join(many[:16])
    assert (
        str(NotFound("model", "x", many))
        == f"the model 'x' does not exist; served: {named} and 4 more"
    )


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (True, "true"), (False, "false"), ("a", "'a'"), (1, "1")]
)
def test_a_value_is_shown_as_a_client_writes_it(value: object, shown: str) -> None:
    assert BadRequest.of("n", value, "2").message == f"n is {shown}; allowed: 2"


def test_the_error_about_a_long_name_shows_its_beginning() -> None:
    assert str(NotFound("model", "m" * 1024)) == f"the model '{'m' * 1024}' does not exist"
    assert str(NotFound("model", "m" * 1_000_000)) == f"the model '{'m' * 1024}'... does not exist"
