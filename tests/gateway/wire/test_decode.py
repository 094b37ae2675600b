"""Bodies that are refused before they are decoded."""

from __future__ import annotations

import pytest

from headwater.bench.hostile.posts import template_kwargs
from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.schema import ChatCompletionRequest
from headwater.services.runtime.client_json import WHOLE_BYTES
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.json_limits import MAX_FIELD_VALUES, TOO_COSTLY


def test_many_variables_of_the_chat_template_are_refused_at_the_gateway() -> None:
    """The gateway decoded and encoded them for a fifth of a second, and a processor refused."""
    with pytest.raises(BadRequest, match=f"allowed: {MAX_FIELD_VALUES}$") as refused:
        decode(template_kwargs("m", 0).body, ChatCompletionRequest)
    assert (refused.value.param, refused.value.code) == ("chat_template_kwargs", TOO_COSTLY)


def test_a_long_body_with_variables_is_decoded_as_a_short_one() -> None:
    body = b'{"model":"m","messages":[],"chat_template_kwargs":{"x":[1,2]}%s}'
    long = decode(body % (b" " * WHOLE_BYTES), ChatCompletionRequest)
    assert long == decode(body % b"", ChatCompletionRequest)
    assert long.chat_template_kwargs == {"x": [1, 2]}
