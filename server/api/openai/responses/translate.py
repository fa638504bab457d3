"""Requests of /v1/responses -> `GenerationSpec`. Raises BadRequest for requests that no model can serve."""

from __future__ import annotations

from dataclasses import replace

from quire.server.api import needs
from quire.server.api.openai.responses import compaction
from quire.server.api.openai.responses.items import as_items, messages_of
from quire.server.api.openai.responses.namespaces import NAMESPACE, joined
from quire.server.api.openai.responses.protocol import (
    INCLUDED,
    INCLUDES_NOTHING,
    InputItem,
    NamespacedTool,
    ResponsePrompt,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
)
from quire.server.api.openai.tools import MAX_TOOLS, function_tool, known_names, require_distinct, required
from quire.server.errors import BadRequest
from quire.server.generate.transfer import read_transfer
from quire.server.http.parse_body import is_left_out
from quire.server.prompt.encode import encode_conversation
from quire.server.request.ngrams import from_vllm
from quire.server.request.request import Conversation, GenerationSpec, options_of
from quire.server.request.tools import Reasoning, Tool, ToolChoice
from quire.server.structured.structure import Structure
from quire.server.values import Json


def spec(body: ResponsesRequest, history: list[InputItem], **identity: Json) -> GenerationSpec:
    """Return the spec. `history`: earlier items. `identity`: request_id, priority, tenant, background."""
    check(body)
    return GenerationSpec(
        prompts=conversation(body, history),
        options=options_of(
            body,
            max_tokens=0 if prewarms(body) else body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if wants_logprobs(body) else None,
            no_repeat_ngram=from_vllm(body.vllm_xargs),
            prediction=None if body.prediction is None else body.prediction.text,
        ),
        structure=_structure(body.text and body.text.format),
        cache_salt=body.cache_salt,
        prompt_param="input",
        max_tokens_param="max_output_tokens",
        logprobs_param="top_logprobs",
        transfer=read_transfer(body.kv_transfer_params),
        **identity,
    )


def check(body: ResponsesRequest) -> None:
    for i, name in enumerate(body.include or ()):
        if name not in INCLUDED and name not in INCLUDES_NOTHING:
            known = ", ".join((*INCLUDED, *INCLUDES_NOTHING))
            raise BadRequest(f"include.{i}: '{name[:100]}' is not one of {known}.", param=f"include.{i}")
    if body.background and body.store is False:
        raise BadRequest("background needs the response to be stored: store must not be false.", param="background")


def prewarms(body: ResponsesRequest) -> bool:
    """Return whether the request only computes its prompt, for the cache."""
    return body.prompt_cache_options is not None and bool(body.prompt_cache_options.prewarm)


def wants_logprobs(body: ResponsesRequest) -> bool:
    return bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())


def conversation(body: ResponsePrompt, history: list[InputItem]) -> Conversation:
    """Return the whole prompt of a request."""
    items = history + as_items(body.input)
    if not items:
        raise BadRequest("Missing required parameter: input.", param="input", code="missing_required_parameter")
    tools, messages = _tools(body.tools), messages_of(body.instructions, items, "input")
    compacts = compaction.is_asked(body.input)
    if compacts:
        messages.append(compaction.request())
    return Conversation(
        messages,
        chat_template_kwargs=body.chat_template_kwargs or {},
        tools=tools,
        tool_choice=ToolChoice("none") if compacts else _choice(body, tools),
        reasoning=Reasoning(effort=body.reasoning and body.reasoning.effort),
        processor_options=body.mm_processor_kwargs,
    )


def truncate(prompt: Conversation, body: ResponsePrompt, state: needs.Prompting, num_output: int) -> None:
    """Leave out, if the request wants it, the oldest turns of `prompt`, whose images are loaded, until the context has
    room for `num_output` more tokens. Messages before the first turn, and the last turn, stay.
    """
    if body.truncation != "auto":
        return
    limit = max(state.model.max_model_len - num_output, 0)
    starts = [i for i, message in enumerate(prompt.messages) if message["role"] == "user"]
    if not starts:
        return
    messages = prompt.messages
    low, high = 0, len(starts) - 1  # binary search for the number of turns to leave out
    while low < high:
        middle = (low + high) // 2
        prompt.messages = messages[: starts[0]] + messages[starts[middle] :]
        if len(encode_conversation(prompt, state, False)) <= limit:
            high = middle
        else:
            low = middle + 1
    prompt.messages = messages[: starts[0]] + messages[starts[low] :]


def _tools(given: list[ResponseTool] | None) -> list[Tool]:
    tools: list[Tool] = []
    for i, tool in enumerate(given or ()):
        if tool.type == NAMESPACE:
            tools += _namespace_tools(tool, f"tools.{i}")
        elif tool.tools is not None:
            raise BadRequest(f"tools.{i}.tools: only a tool of the type namespace has tools.", param=f"tools.{i}.tools")
        elif not is_left_out(tool):
            tools.append(_tool(tool, f"tools.{i}"))
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools: there are {len(tools)} with those of namespaces, which is more than {MAX_TOOLS}.")
    require_distinct(tools, "tools")
    return tools


def _namespace_tools(group: ResponseTool, path: str) -> list[Tool]:
    """Return the tools of a namespace. Its description is prefixed to that of the first tool, because templates know
    no groups.
    """
    namespace, members = required(group.name, f"{path}.name"), required(group.tools, f"{path}.tools")
    tools = [_tool(tool, f"{path}.tools.{i}") for i, tool in enumerate(members) if not is_left_out(tool)]
    tools = [replace(tool, name=joined(namespace, tool.name)) for tool in tools]
    if tools and group.description:
        words = "\n\n".join(filter(None, (group.description, tools[0].description)))
        tools[0] = replace(tools[0], description=words)
    return tools


def _tool(tool: NamespacedTool, path: str) -> Tool:
    if tool.type not in ("function", "custom"):
        raise BadRequest(
            f"{path}.type: this server runs no tools of type '{tool.type[:100]}', only function and custom.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    name = required(tool.name, f"{path}.name")
    if tool.type == "function":
        return function_tool(tool, path)
    grammar = None
    if tool.format is not None and tool.format.type == "grammar":
        syntax = required(tool.format.syntax, f"{path}.format.syntax")
        grammar = syntax, required(tool.format.definition, f"{path}.format.definition")
    return Tool(name, tool.description, custom=True, grammar=grammar)


def _choice(body: ResponsePrompt, tools: list[Tool]) -> ToolChoice:
    wanted, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if not tools and (wanted is None or wanted in ("none", "auto")):
        return ToolChoice("none")
    if not tools:
        raise BadRequest("tool_choice is only allowed when tools are given.", param="tool_choice")
    if wanted is None or isinstance(wanted, str):
        return ToolChoice(wanted or "auto", None, parallel)
    if wanted.type == "allowed_tools":
        names = [(tool.name, tool.type == "custom") for tool in required(wanted.tools, "tool_choice.tools")]
        mode = required(wanted.mode, "tool_choice.mode")
        return ToolChoice(mode, known_names(names, tools, "tool_choice.tools"), parallel)
    if wanted.type not in ("function", "custom"):
        raise BadRequest(
            f"tool_choice.type: this server runs no tools of type '{wanted.type[:100]}'.", param="tool_choice.type"
        )
    name = required(wanted.name, "tool_choice.name")
    known = known_names([(name, wanted.type == "custom")], tools, "tool_choice.name")
    return ToolChoice("required", known, False)


def _structure(format: TextFormat | None) -> Structure | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Structure(kind="json_object", param="text.format")
    param = "text.format.schema"
    return Structure(kind="json_schema", value=required(format.schema, param), param=param)
