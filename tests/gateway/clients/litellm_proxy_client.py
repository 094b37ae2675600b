"""What clients see of a gateway behind LiteLLM's proxy, over both APIs: python
litellm_proxy_client.py ROOT MODEL prints one JSON object. It starts the proxy beside itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

root, model = sys.argv[1:]
START_SECONDS = 120
KEY = f"sk-{secrets.token_hex(16)}"
"""Key of the proxy's own clients."""
CONFIG = {
    "model_list": [
        {
            "model_name": "by-openai",
            "litellm_params": {
                "model": f"openai/{model}",
                "api_base": f"{root}/v1",
                "api_key": "any",
                "extra_body": {"reasoning_effort": "none"},
            },
        },
        {
            "model_name": "by-anthropic",
            "litellm_params": {
                "model": f"anthropic/{model}",
                "api_base": root,
                "api_key": "any",
            },
        },
    ],
    "litellm_settings": {"num_retries": 0, "drop_params": True},
}
MESSAGES: Any = [{"role": "user", "content": "Name a river."}]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def ask(address: str) -> dict[str, Any]:
    reported: dict[str, Any] = {}
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    for name in ("by-openai", "by-anthropic"):
        asked: Any = {"model": name, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        reported[name] = {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "usage": whole.usage.completion_tokens if whole.usage else 0,
        }
    speaking = anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0)
    output = speaking.messages.create(
        model="by-anthropic",
        messages=MESSAGES,
        max_tokens=12,
        thinking={"type": "disabled"},
    )
    blocks = [block.model_dump() for block in output.content]
    text = "".join(block.get("text") or block.get("thinking") or "" for block in blocks)
    reported["messages"] = {"text": text, "usage": output.usage.output_tokens}
    return reported


def main() -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        # JSON is YAML.
        config.write_text(json.dumps(CONFIG))
        command = [Path(sys.executable).with_name("litellm"), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        # Without a key it does not start.
        env = os.environ | {"LITELLM_MASTER_KEY": KEY}
        with subprocess.Popen(command, stdout=sys.stderr, env=env) as proxy:
            try:
                wait_for(address, proxy)
                reported = ask(address)
            finally:
                proxy.terminate()
    print(json.dumps({"version": importlib.metadata.version("litellm"), **reported}))


def wait_for(address: str, proxy: subprocess.Popen[bytes]) -> None:
    for _ in range(START_SECONDS * 4):
        if proxy.poll() is not None:
            break
        try:
            if httpx.get(f"{address}/health/liveliness").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise SystemExit("the proxy does not answer")


main()
