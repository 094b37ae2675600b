"""Configurations that connect coding agents to a deployment, as `headwater launch` prints them.

Each names the model in every variable in which its agent would otherwise name one of its own.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ANY_KEY = "any"
"""Key for a deployment without keys: agents want one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A deployment that an agent is connected to, and its model."""

    gateway: str
    """Address of the gateway, without a path."""
    model: str
    key: str = ANY_KEY

    @property
    def api(self) -> str:
        """Address of OpenAI's API there."""
        return f"{self.gateway}/v1"


def _exported(**variables: str) -> str:
    """Lines for a shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _claude(to: Target) -> str:
    names = ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_", "SMALL_FAST_")
    models = {f"ANTHROPIC_{name}MODEL": to.model for name in names}
    return _exported(
        ANTHROPIC_BASE_URL=to.gateway,
        ANTHROPIC_AUTH_TOKEN=to.key,
        **models,
        CLAUDE_CODE_SUBAGENT_MODEL=to.model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def _codex(to: Target) -> str:
    """The file ~/.codex/config.toml. Strings of TOML are written as those of JSON."""
    model, api = map(json.dumps, (to.model, to.api))
    # Codex does not start without the variable that it names.
    key = "" if to.key == ANY_KEY else 'env_key = "HEADWATER_API_KEY"\n'
    return (
        f'model = {model}\nmodel_provider = "headwater"\n'
        '[model_providers.headwater]\nname = "Headwater"\n'
        f'base_url = {api}\nwire_api = "responses"\n{key}'
    )


def _opencode(to: Target) -> str:
    """The file opencode.json."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headwater",
        "options": {"baseURL": to.api, "apiKey": to.key},
        "models": {to.model: {}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"headwater/{to.model}",
        "small_model": f"headwater/{to.model}",
        "provider": {"headwater": provider},
    }
    return json.dumps(config, indent=2) + "\n"


def _aider(to: Target) -> str:
    return _exported(
        OPENAI_API_BASE=to.api,
        OPENAI_API_KEY=to.key,
        AIDER_MODEL=f"openai/{to.model}",
        AIDER_WEAK_MODEL=f"openai/{to.model}",
    )


def _continue(to: Target) -> str:
    """The file ~/.continue/config.yaml. Strings of YAML are written as those of JSON."""
    name, model, api, key = map(json.dumps, ("Headwater", to.model, to.api, to.key))
    return (
        f"name: {name}\nversion: 1.0.0\nschema: v1\nmodels:\n"
        f"  - name: {model}\n    provider: openai\n    model: {model}\n"
        f"    apiBase: {api}\n    apiKey: {key}\n    roles: [chat, edit, apply]\n"
    )


def _open_webui(to: Target) -> str:
    return _exported(
        OPENAI_API_BASE_URL=to.api,
        OPENAI_API_KEY=to.key,
        DEFAULT_MODELS=to.model,
        TASK_MODEL_EXTERNAL=to.model,
        ENABLE_OLLAMA_API="false",
    )


AGENTS: Mapping[str, Callable[[Target], str]] = {
    "aider": _aider,
    "claude": _claude,
    "codex": _codex,
    "continue": _continue,
    "open-webui": _open_webui,
    "opencode": _opencode,
}
