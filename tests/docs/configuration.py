"""docs/configuration.md, made from the settings themselves: `python -m tests.docs.configuration`
writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater.gateway.settings import GatewaySettings
from headwater.services.engine.programs.stage_host import StageSettings
from headwater.services.engine.settings import EngineSettings
from headwater.services.output_processor.__main__ import OutputProcessorSettings
from headwater.services.processor.__main__ import ProcessorSettings
from headwater.services.runtime.security_settings import StageSecuritySettings
from headwater.services.stack.flags import variable_of
from headwater.services.stack.settings import StackSettings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Every setting is a flag and an environment variable: `--max-num-seqs` is `HEADWATER_MAX_NUM_SEQS`. A flag wins over the
variable, and the variable over the default. A list is a flag that is given several times, or a variable with commas.

- `headwater up` reads the table [`headwater up`](#headwater-up). It passes the other variables to its stages, and each
  stage reads those of its own table: `HEADWATER_MAX_NUM_SEQS=64 headwater up`.
- A stage that is started on its own (`headwater serve gateway`, `processor`, `output-processor`, `engine`) reads its
  own table and the table [Every stage](#every-stage). A pipeline stage on another host (`headwater serve stage`) reads
  its own table alone.
- `headwater up --help` and `headwater serve STAGE --help` show the same settings.
- `headwater up` and stages that are started on their own warn about a variable `HEADWATER_…` that nothing reads, and
  name the most similar variable that is read.

`python -m tests.docs.configuration` writes this page from the settings; a test compares the two.

## Variables of commands

| variable | meaning |
|---|---|
| `HEADWATER_BASE_URL` | address of the gateway for commands, with or without `/v1` |
| `HEADWATER_API_KEY` | API key that `chat`, `run`, `launch` and `bench serve` send |
| `HEADWATER_ADMIN_KEY`, `HEADWATER_ADMIN_KEY_FILE` | the administrator's key, or a file whose first key is used |
| `HEADWATER_STATE_DIR`, `HEADWATER_CACHE` | folder of a deployment's state; folder of models and compiled kernels |
| `HF_TOKEN` | token of the Hugging Face Hub, for gated models |
"""
STAGES: dict[str, tuple[str, type]] = {
    "Gateway": ("`headwater serve gateway`", GatewaySettings),
    "Processor": ("`headwater serve processor`", ProcessorSettings),
    "Output processor": ("`headwater serve output-processor`", OutputProcessorSettings),
    "Engine": ("`headwater serve engine`", EngineSettings),
    "Pipeline stage on another host": ("`headwater serve stage`", StageSettings),
}
SHARED = {field.name for field in dataclasses.fields(StageSecuritySettings)}


def page() -> str:
    parts = [
        HEAD,
        "## `headwater up`\n\n"
        + _table(_row(variable_of(each), each) for each in _fields(StackSettings)),
    ]
    for title, (command, settings) in STAGES.items():
        rows = (
            _row(_variable(each), each) for each in _fields(settings) if each.name not in SHARED
        )
        parts.append(f"## {title}\n\n{command}\n\n{_table(rows)}")
    shared = _table(_row(_variable(each), each) for each in _fields(StageSecuritySettings))
    parts.append(
        "## Every stage\n\nTLS and the token between stages: "
        f"[security.md](security.md).\n\n{shared}"
    )
    return "\n".join(parts)


def _fields(settings: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(settings)


def _variable(field: dataclasses.Field[Any]) -> str:
    return f"HEADWATER_{field.name.upper()}"


def _row(variable: str, field: dataclasses.Field[Any]) -> str:
    return f"| `{variable}` | {_default(field)} | {field.metadata['help'].replace('|', '&#124;')} |"


def _default(field: dataclasses.Field[Any]) -> str:
    if (shown := field.metadata.get("shown")) is not None:
        return f"`{shown}`"
    if field.default in (None, "", (), dataclasses.MISSING):
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _table(rows: Iterator[str]) -> str:
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
