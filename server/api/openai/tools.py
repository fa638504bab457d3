"""Tools, tool choices and tool calls in OpenAI's words, and their translation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from quire.server.errors import BadRequest
from quire.server.http.parse_body import MAX_NESTING, deeper_than
from quire.server.request.limits import Text
from quire.server.request.tools import Tool, ToolChoice, custom_arguments, require_object

MAX_TOOLS = 1024
MAX_CALLS = 1024  # per message
MAX_SCHEMA_FIELDS = 4096  # per object of a schema
MAX_DESCRIPTION = 2**17
MAX_GRAMMAR = 2**17

T = TypeVar("T")

ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.:/-]+$(?![\s\S])")]
CallId = Annotated[str, Meta(max_length=256)]
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION)]
Schema = Annotated[dict[str, Any], Meta(max_length=MAX_SCHEMA_FIELDS)]
_NO_FIELDS: dict[str, tuple] = {}


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: ToolName
    description: Description | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    harmless: ClassVar = frozenset({"cache_control"})
    unsupported: ClassVar = _NO_FIELDS


class Grammar(msgspec.Struct, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)]

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class CustomFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class CustomTool(msgspec.Struct, kw_only=True):
    name: ToolName
    description: Description | None = None
    format: CustomFormat | None = None

    harmless: ClassVar = frozenset({"cache_control"})
    unsupported: ClassVar = _NO_FIELDS


class ToolDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["function", "custom"]
    function: FunctionTool | None = None
    custom: CustomTool | None = None

    harmless: ClassVar = frozenset({"cache_control"})
    unsupported: ClassVar = _NO_FIELDS


Tools = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
Functions = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


class ToolReference(msgspec.Struct, kw_only=True):
    name: ToolName

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class AllowedTool(msgspec.Struct, kw_only=True):
    type: Literal["function", "custom"]
    function: ToolReference | None = None
    custom: ToolReference | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class NamedChoice(msgspec.Struct, kw_only=True):
    type: Literal["function", "custom", "allowed_tools"]
    function: ToolReference | None = None
    custom: ToolReference | None = None
    allowed_tools: AllowedTools | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class CalledFunction(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(max_length=256)]  # a model may have made it up
    arguments: Text | Schema | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class CalledCustom(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(max_length=256)]
    input: Text

    harmless: ClassVar = frozenset()
    unsupported: ClassVar = _NO_FIELDS


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call in the history."""

    id: CallId | None = None
    type: Annotated[str, Meta(max_length=256)] = "function"  # custom, or another server's name of function
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    harmless: ClassVar = frozenset({"index"})
    unsupported: ClassVar = _NO_FIELDS


MessageToolCalls = Annotated[list[MessageToolCall], Meta(max_length=MAX_CALLS)]


Choice = Literal["none", "auto", "required"] | NamedChoice
FunctionChoice = Literal["none", "auto"] | ToolReference


# ---- definitions


def tools_of(definitions: list[ToolDefinition] | None, functions: list[FunctionTool] | None) -> list[Tool]:
    """Return the tools of a request, in `tools` or the older `functions`. Raises BadRequest."""
    if definitions and functions:
        raise BadRequest("functions is the old form of tools: give one of them.", param="functions")
    param = "functions" if functions else "tools"
    tools = [function_tool(function, f"functions.{i}") for i, function in enumerate(functions or ())]
    tools += [_tool(tool, f"tools.{i}") for i, tool in enumerate(definitions or ())]
    require_distinct(tools, param)
    return tools


def require_distinct(tools: list[Tool], param: str) -> None:
    """Raise BadRequest if two tools have the same name."""
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise BadRequest(f"{param}: two tools are named '{tool.name}'.", param=param)
        names.add(tool.name)


def _tool(tool: ToolDefinition, path: str) -> Tool:
    if tool.type == "function":
        return function_tool(required(tool.function, f"{path}.function"), f"{path}.function")
    custom = required(tool.custom, f"{path}.custom")
    grammar = None
    if custom.format is not None and custom.format.type == "grammar":
        given = required(custom.format.grammar, f"{path}.custom.format.grammar")
        grammar = given.syntax, given.definition
    return Tool(custom.name, custom.description, custom=True, grammar=grammar)


def function_tool(function: FunctionTool, path: str) -> Tool:
    """Return the tool. Raises BadRequest for parameters that are nested too deeply."""
    if deeper_than(function.parameters, MAX_NESTING):
        raise BadRequest(
            f"{path}.parameters is nested more than {MAX_NESTING} levels deep.", param=f"{path}.parameters"
        )
    require_object(function.parameters, f"{path}.parameters")
    return Tool(function.name, function.description, function.parameters, bool(function.strict))


def required(value: T | None, path: str) -> T:
    """Return `value`. Raises BadRequest if it is None."""
    if value is None:
        raise BadRequest(f"Missing required parameter: {path}.", param=path, code="missing_required_parameter")
    return value


# ---- choices


def choice_of(
    choice: Choice | None, function_call: FunctionChoice | None, tools: list[Tool], parallel: bool
) -> ToolChoice:
    """Return the choice of tools by `tool_choice` or the older `function_call`. Raises BadRequest if the tools exclude
    it.
    """
    param, wanted = ("tool_choice", choice) if function_call is None else ("function_call", function_call)
    if choice is not None and function_call is not None:
        raise BadRequest("function_call is the old form of tool_choice: give one of them.", param=param)
    if wanted == "none" or not (tools or wanted):
        return ToolChoice("none")
    if not tools:
        raise BadRequest(f"{param} is only allowed when tools are given.", param=param)
    if wanted is None or isinstance(wanted, str):
        return ToolChoice(wanted or "auto", None, parallel)
    if isinstance(wanted, ToolReference):
        return ToolChoice("required", known_names([(wanted.name, False)], tools, f"{param}.name"), False)
    if wanted.type == "allowed_tools":
        allowed, path = required(wanted.allowed_tools, f"{param}.allowed_tools"), f"{param}.allowed_tools.tools"
        names = [_reference(tool, f"{path}.{i}") for i, tool in enumerate(allowed.tools)]
        return ToolChoice(allowed.mode, known_names(names, tools, path), parallel)
    path = f"{param}.{wanted.type}"
    return ToolChoice("required", known_names([_reference(wanted, param)], tools, f"{path}.name"), False)


def _reference(tool: NamedChoice | AllowedTool, path: str) -> tuple[str, bool]:
    """Return the name of the tool, and whether it is a custom one."""
    named = required(tool.function if tool.type == "function" else tool.custom, f"{path}.{tool.type}")
    return named.name, tool.type == "custom"


def known_names(references: list[tuple[str, bool]], tools: list[Tool], param: str) -> frozenset[str]:
    """Return the names of tools; a reference is (name, is custom). Raises BadRequest for one that is not in `tools`."""
    known = {(tool.name, tool.custom) for tool in tools}
    for name, custom in references:
        if (name, custom) not in known:
            raise BadRequest(
                f"{param}: there is no {'custom tool' if custom else 'function'} '{name}' in tools.", param=param
            )
    return frozenset(name for name, _ in references)


# ---- calls in the history


def template_call(call: MessageToolCall, path: str) -> dict[str, Any]:
    """Return a call in the form that templates expect. Raises BadRequest."""
    if call.type != "custom":
        function = required(call.function, f"{path}.function")
        name, arguments = function.name, function.arguments or ""
        if deeper_than(arguments, MAX_NESTING):
            raise BadRequest(f"{path}: the arguments are nested more than {MAX_NESTING} levels deep.", param=path)
    else:
        custom = required(call.custom, f"{path}.custom")
        name, arguments = custom.name, custom_arguments(custom.input)
    out = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return out if call.id is None else {"id": call.id} | out
