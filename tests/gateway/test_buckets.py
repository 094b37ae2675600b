"""Sentences that clients get while storage in NATS is out of reach."""

from __future__ import annotations

import nats.errors
import pytest

from headwater.gateway.buckets import or_unavailable
from headwater.services.runtime.errors import Unavailable

SENTENCES = [
    (TimeoutError(), "durable storage in NATS does not answer: no reply in time"),
    (nats.errors.TimeoutError(), "durable storage in NATS does not answer: nats: timeout"),
    (ConnectionRefusedError(111, "refused"), "durable storage in NATS does not answer: [Errno 111] refused"),
]


@pytest.mark.parametrize(("failure", "sentence"), SENTENCES, ids=[row[1][-12:] for row in SENTENCES])
def test_storage_that_does_not_answer_is_named_with_the_reason(failure: Exception, sentence: str) -> None:
    with pytest.raises(Unavailable) as caught, or_unavailable():
        raise failure
    assert (caught.value.message, caught.value.code) == (sentence, "storage_unavailable")
