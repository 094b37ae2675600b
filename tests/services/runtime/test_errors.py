from __future__ import annotations

from headwater.services.runtime.errors import NotFound


def test_of_many_that_there_are_the_first_are_named() -> None:
    many = [f"m{i:02}" for i in range(20)]
    named = ", ".join(many[:16])
    assert str(NotFound("model", "x", many)) == f"the model 'x' does not exist; served: {named} and 4 more"
