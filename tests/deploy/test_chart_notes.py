"""The notes that Helm prints after an install, with a first chat request to paste."""

from __future__ import annotations

import platform
import re

import pytest

from tests.deploy.chart import notes

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

pytestmark = pytest.mark.long


def test_the_first_chat_has_its_key_and_the_scheme_of_the_gateway() -> None:
    plain, with_tls = notes([{}, {"clientTls": {"secret": "tls"}}])
    for text in (plain, with_tls):
        assert set(re.findall(r"\$(\w+)", text)) <= set(re.findall(r"^  (\w+)=", text, re.M))
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in plain
    assert "curl --insecure https://127.0.0.1:8000/v1/chat/completions" in with_tls
