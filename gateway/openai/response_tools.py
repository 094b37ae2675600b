"""Tools of a response under the names that the contract knows them by. Knows no items."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.request_limits import bounded_tools

from ..wire.noted import note
from ..wire.required import given
from .response_schema import (
    TOOL_NAME,
    GroupedTool,
    ResponsesRequest,
    ResponseTool,
    ToolFields,
)
from .schema import TextGrammar
from .tools_to_pb import function_to_pb, offered_as, text_to_pb, tool_choice_word

_SERVED = ("function", "custom", "namespace")
_MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{_MAX_NAME}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A function or a custom tool that the answer may call."""

    name: str
    """The contract's name for it."""
    own_name: str
    namespace: str | None
    tool: GroupedTool | ResponseTool
    description: str
    at: str
    """Path of the tool in the client's request."""


class ResponseTools:
    """The tools of a request that the answer may call.

    A tool of a namespace is offered as `namespace__name`. A name that is too long or taken ends in
    a hash of both. Tools that OpenAI hosts are passed over.
    """

    def __init__(self, tools: Sequence[ResponseTool] | None) -> None:
        """Raises `BadRequest` for a name that is missing or cannot be used."""
        self.served = [tool for tool in tools or () if tool.type in _SERVED]
        """The client's tools without hosted ones."""
        self._by_name: dict[str, OfferedTool] = {}
        self._name_of: dict[tuple[str | None, str], str] = {}
        self._offered: list[OfferedTool] = []
        for i, tool in enumerate(tools or ()):
            if tool.type not in _SERVED:
                note("hosted tool passed over", tool.type, type=tool.type)
            elif tool.type != "namespace":
                self._add(self._plain(tool, f"tools[{i}]"))
        for i, tool in enumerate(tools or ()):
            if tool.type == "namespace":
                self._add_namespace(tool, f"tools[{i}]")

    def to_pb(self) -> list[common_pb2.Tool]:
        """The tools in the contract's form. Raises `BadRequest` beyond a limit."""
        return bounded_tools(map(_tool_to_pb, self._offered))

    def choice_to_pb(self, asked: ResponsesRequest) -> processor_pb2.Conversation:
        """Tool choice by a tool's name, or by a word with the tools that it allows where these are
        not all. Raises `BadRequest`."""
        choice = asked.tool_choice
        if isinstance(choice, str) or choice is None:
            # Clients send `auto` whether or not they have tools.
            word = tool_choice_word(choice) if self._offered or choice != "auto" else None
            return processor_pb2.Conversation(tool_choice=word)
        if choice.type != "allowed_tools":
            own_name = given("tool_choice.name", choice.name, "the name of a tool")
            name = self._chosen(choice.type, own_name, choice.namespace, "tool_choice")
            return processor_pb2.Conversation(tool_choice=name, tool_choice_is_name=True)
        allowed = enumerate(
            given("tool_choice.tools", choice.tools, "at least one tool, by its name")
        )
        names = [
            self._chosen(tool.type, tool.name, tool.namespace, f"tool_choice.tools[{i}]")
            for i, tool in allowed
        ]
        return processor_pb2.Conversation(
            tool_choice=given("tool_choice.mode", choice.mode, "auto or required"),
            allowed_tools=names,
        )

    def name_of(self, namespace: str | None, name: str) -> str:
        """The contract's name for a tool by the client's, also for one that is not offered any
        more."""
        known = self._name_of.get((namespace, name))
        return known or (name if namespace is None else _joined(namespace, name))

    def own_names(self) -> dict[str, tuple[str, str]]:
        """Namespaces and names of tools of namespaces, by the contract's names."""
        return {
            each.name: (each.namespace, each.own_name)
            for each in self._offered
            if each.namespace is not None
        }

    def places(self) -> dict[str, str]:
        """Client's names of fields of tools, by the contract's names."""
        renamed: dict[str, str] = {}
        for i, each in enumerate(self._offered):
            renamed |= {
                f"tools[{i}].{kind}.name": f"{each.at}.name" for kind in ("function", "custom")
            }
            renamed[f"tools[{i}].function.parameters"] = f"{each.at}.parameters"
            definition = f"{each.at}.format.definition"
            renamed[f"tools[{i}].custom.format.grammar.definition"] = definition
        return renamed

    def _add(self, tool: OfferedTool) -> None:
        self._offered.append(tool)
        self._by_name.setdefault(tool.name, tool)
        self._name_of.setdefault((tool.namespace, tool.own_name), tool.name)

    def _plain(self, tool: ResponseTool, at: str) -> OfferedTool:
        name = given(f"{at}.name", tool.name, TOOL_NAME)
        return OfferedTool(
            name=name,
            own_name=name,
            namespace=None,
            tool=tool,
            description=tool.description or "",
            at=at,
        )

    def _add_namespace(self, group: ResponseTool, at: str) -> None:
        namespace = _checked(group.name, f"{at}.name")
        for k, tool in enumerate(group.tools or ()):
            own_name = _checked(tool.name, f"{at}.tools[{k}].name")
            name = self.name_of(namespace, own_name)
            taken = self._by_name.get(name)
            if taken is not None and (taken.namespace, taken.own_name) != (namespace, own_name):
                name = _hashed(namespace, own_name)
            # The first tool introduces the others of its namespace.
            about = [group.description if k == 0 else None, tool.description]
            self._add(
                OfferedTool(
                    name=name,
                    own_name=own_name,
                    namespace=namespace,
                    tool=tool,
                    description="\n\n".join(filter(None, about)),
                    at=f"{at}.tools[{k}]",
                )
            )

    def _chosen(self, kind: str, name: str, namespace: str | None, at: str) -> str:
        """Contract's name for a chosen tool. Without a namespace it is a tool outside of all, or
        the only one of this name."""
        chosen = self.name_of(namespace, name)
        if namespace is None and chosen not in self._by_name:
            alike = [each.name for each in self._offered if each.own_name == name]
            chosen = alike[0] if len(alike) == 1 else name
        kinds: Mapping[str, str] = {each.name: each.tool.type for each in self._offered}
        return offered_as(kind, chosen, at, kinds)


def _checked(name: str | None, at: str) -> str:
    if not _NAME.fullmatch(name := given(at, name, TOOL_NAME)):
        raise BadRequest.of(at, name, TOOL_NAME)
    return name


def _joined(namespace: str, name: str) -> str:
    joined = f"{namespace}__{name}"
    return joined if len(joined) <= _MAX_NAME else _hashed(namespace, name)


def _hashed(namespace: str, name: str) -> str:
    digest = blake2b(f"{namespace} {name}".encode(), digest_size=4).hexdigest()
    return f"{f'{namespace}__{name}'[: _MAX_NAME - len(digest) - 1]}_{digest}"


def _tool_to_pb(offered: OfferedTool) -> common_pb2.Tool:
    tool = offered.tool
    if tool.type == "function":
        return function_to_pb(tool, offered.name, offered.description)
    return common_pb2.Tool(
        name=offered.name,
        description=offered.description,
        custom_input=text_to_pb(_grammar_of(tool, f"{offered.at}.format")),
    )


def _grammar_of(tool: ToolFields, at: str) -> TextGrammar | None:
    form = tool.format
    if form is None or form.type != "grammar":
        return None
    definition = given(
        f"{at}.definition", form.definition, "a Lark grammar or a regular expression"
    )
    return TextGrammar(
        definition=definition, syntax=given(f"{at}.syntax", form.syntax, "lark or regex")
    )
