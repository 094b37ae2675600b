"""Calls as the models of each format write them, written here from the published chat templates and
not from our tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _functions(arguments: dict[str, Any], margin: str) -> str:
    return "".join(
        f"<parameter={name}>{margin}{_bare(value)}{margin}</parameter>\n"
        for name, value in arguments.items()
    )


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{_functions(arguments, chr(10))}</function>\n</tool_call>"
        for name, arguments in calls
    )


def _seed_oss(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n{_functions(arguments, '')}</function>\n"
        "</seed:tool_call>"
        for name, arguments in calls
    )


def _pairs(arguments: dict[str, Any], gap: str, tags: str) -> str:
    key, value = tags.format("arg_key"), tags.format("arg_value")
    return "".join(
        f"<{key}>{name}</{key}>{gap}<{value}>{_bare(argument)}</{value}>{gap}"
        for name, argument in arguments.items()
    )


def _glm(gap: str, tags: str = "{}") -> Callable[[Sequence[Call]], str]:
    call = tags.format("tool_call")
    return lambda calls: gap.join(
        f"<{call}>{name}{gap}{_pairs(arguments, gap, tags)}</{call}>" for name, arguments in calls
    )


def _hy(tags: str) -> Callable[[Sequence[Call]], str]:
    section, call, end = map(tags.format, ("tool_calls", "tool_call", "tool_sep"))
    return lambda calls: (
        f"<{section}>\n"
        + "".join(
            f"<{call}>{name}<{end}>\n{_pairs(arguments, chr(10), tags)}</{call}>\n"
            for name, arguments in calls
        )
        + f"</{section}>"
    )


def _functionary(calls: Sequence[Call]) -> str:
    return "".join(f"<function={name}>{_json(arguments)}</function>" for name, arguments in calls)


def _step3(calls: Sequence[Call]) -> str:
    def block(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<steptml:parameter name="{key}">{_bare(value)}</steptml:parameter>'
            for key, value in arguments.items()
        )
        return f'<steptml:invoke name="{name}">{inner}</steptml:invoke>'

    inner = "\n".join(
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{block(name, arguments)}<｜tool_call_end｜>"
        for name, arguments in calls
    )
    return f"<｜tool_calls_begin｜>\n{inner}\n<｜tool_calls_end｜>"


def _solar_open2(calls: Sequence[Call]) -> str:
    def inner(arguments: dict[str, Any]) -> str:
        return "".join(
            f"<|tool_arg:start|>{key}<|tool_arg:value|>{_bare(value)}<|tool_arg:end|>\n"
            for key, value in arguments.items()
        )

    return "\n".join(
        f"<|tool_call:start|>{name}\n{inner(arguments)}<|tool_call:end|>"
        for name, arguments in calls
    )


def _minimax_m2(calls: Sequence[Call]) -> str:
    blocks = [
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_bare(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        + "</invoke>"
        for name, arguments in calls
    ]
    return "<minimax:tool_call>\n" + "\n".join(blocks) + "\n</minimax:tool_call>"


def _dsml(section: str) -> Callable[[Sequence[Call]], str]:
    def parameter(name: str, value: Any) -> str:
        sign = "true" if isinstance(value, str) else "false"
        return (
            f'<｜DSML｜parameter name="{name}" string="{sign}">{_bare(value)}</｜DSML｜parameter>\n'
        )

    def block(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(parameter(key, value) for key, value in arguments.items())
        return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>'

    return lambda calls: (
        f"<｜DSML｜{section}>\n"
        + "\n".join(block(name, arguments) for name, arguments in calls)
        + f"\n</｜DSML｜{section}>"
    )


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _objects(
    begin: str, end: str, between: str, key: str = "arguments"
) -> Callable[[Sequence[Call]], str]:
    return lambda calls: between.join(
        f'{begin}{{"name": "{name}", "{key}": {_json(arguments)}}}{end}'
        for name, arguments in calls
    )


def _objects_on_lines(calls: Sequence[Call]) -> str:
    return f"<tool_calls>\n{_objects('', '', chr(10))(calls)}\n</tool_calls>"


def _apertus(calls: Sequence[Call]) -> str:
    inner = ", ".join(f'{{"{name}": {_json(arguments)}}}' for name, arguments in calls)
    return f"<|tools_prefix|>[{inner}]<|tools_suffix|>"


def _glm4(calls: Sequence[Call]) -> str:
    return "<|assistant|>".join(f"{name}\n{_json(arguments)}" for name, arguments in calls)


def _llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(
        f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls
    )


def _mistral_tekken(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    inner = ", ".join(
        f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{inner}]"


def _lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>"


def _lines(begin: str, end: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: (
        f"{begin}\n" + "".join(f"{_pythonic([call])[1:-1]}\n" for call in calls) + end
    )


def _list(begin: str, end: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: (
        f"{begin}["
        + ", ".join(
            f'{{"name": "{name}", "arguments": {_json(arguments)}}}' for name, arguments in calls
        )
        + f"]{end}"
    )


def gemma_value(value: Any, quote: str = '<|"|>') -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(each, quote) for each in value)}]"
    if isinstance(value, dict):
        names = (key if key.isidentifier() else gemma_value(key, quote) for key in value)
        members = zip(names, (gemma_value(each, quote) for each in value.values()), strict=True)
        return "{" + ",".join(map(":".join, members)) + "}"
    return json.dumps(value)


def _gemma(begin: str, end: str, quote: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(
        f"{begin}call:{name}{gemma_value(arguments, quote)}{end}" for name, arguments in calls
    )


def _command(calls: Sequence[Call]) -> str:
    inner = ", ".join(
        f'{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {_json(arguments)}}}'
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[{inner}]<|END_ACTION|>"


def _gpt_oss(calls: Sequence[Call]) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        for name, arguments in calls
    )


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gpt_oss": _gpt_oss,
    "hermes": _objects("<tool_call>\n", "\n</tool_call>", "\n"),
    "longcat": _objects("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
    "internlm": _objects("<|action_start|><|plugin|>\n", "<|action_end|>", "", "parameters"),
    "gigachat3": _objects("<|message_sep|>\n\nfunction call<|role_sep|>\n", "", ""),
    "granite_20b_fc": _objects("<function_call> ", "", " "),
    "apertus": _apertus,
    "minimax_m1": _objects_on_lines,
    "glm4": _glm4,
    "llama3_json": _llama3_json,
    "mistral": _list("[TOOL_CALLS]", ""),
    "nemotron": _list("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini": _list("<|tool_call|>", "<|/tool_call|>"),
    "granite": _list("<|tool_call|>", ""),
    "jamba": _list("<tool_calls>", "</tool_calls>"),
    "xlam": _list("", ""),
    "command": _command,
    "mistral_tekken": _mistral_tekken,
    "pythonic": _pythonic,
    "lfm2": _lfm2,
    "olmo3": _lines("<function_calls>", "</function_calls>"),
    "gemma3": _lines("```tool_code", "```"),
    "qwen3_coder": _qwen3_coder,
    "seed_oss": _seed_oss,
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "hy_v3": _hy("{}:opensource"),
    "hy_v3_preview": _hy("{}"),
    "functionary_v31": _functionary,
    "longcat_xml": _glm("\n", "longcat_{}"),
    "step3": _step3,
    "solar_open2": _solar_open2,
    "minimax_m2": _minimax_m2,
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi_k2,
}
BARE = frozenset(
    {
        "qwen3_coder",
        "seed_oss",
        "glm45",
        "glm47",
        "hy_v3",
        "hy_v3_preview",
        "longcat_xml",
        "step3",
        "solar_open2",
        "minimax_m2",
        "deepseek_v4",
        "deepseek_v32",
    }
)
"""Formats that write strings without quotes."""
CONTENT = {"gpt_oss": "<|channel|>final<|message|>{}"}
"""Content as formats write it that have text before it."""


def written_content(form: str, text: str) -> str:
    return CONTENT.get(form, "{}").format(text)
