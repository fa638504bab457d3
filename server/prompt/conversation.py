"""A conversation -> the text of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire.server.errors import BadRequest
from quire.server.model_info import Preset
from quire.server.prompt.generic_tools import with_generic_tools
from quire.server.prompt.images import Illustrated, Placeholders, after_results
from quire.server.prompt.system_messages import fit_system_messages
from quire.server.prompt.thinking import Thinking, resolve
from quire.server.request import needs
from quire.server.request.request import Conversation
from quire.server.text.chat_template import ChatTemplate

# variables of a template that have fields of their own
RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
    }
)


@dataclass(slots=True)
class Rendered:
    """The prompt, and the facts about it that the answer's parsing needs."""

    text: str
    template: ChatTemplate
    thinking: Thinking
    illustrated: Illustrated | None = None  # for a prompt with images; has its `text`


def render_conversation(conversation: Conversation, state: needs.Prompting) -> Rendered:
    """Return the rendered conversation. Raises BadRequest naming the option at fault."""
    check_conversation(conversation, state)
    conversation = with_first_messages(conversation, state.model.preset)
    tools = [tool.for_template() for tool in conversation.tools]
    if conversation.tool_choice.mode == "none" and state.config.server.exclude_tools_when_tool_choice_none:
        tools = []
    media = conversation.media
    try:
        template = state.tokenizer.template(conversation.chat_template, tools or None)
        messages, tools = _fit_to(template, conversation, tools, state)
        thinking = resolve(conversation.reasoning, template, state.formats)
        documents, variables = conversation.documents, thinking.variables | conversation.chat_template_kwargs
        if media:
            placeholders = Placeholders(state.images.kinds, template)
            messages, tools, documents, variables = map(placeholders.hide, (messages, tools, documents, variables))
        add_generation_prompt = conversation.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not conversation.continue_final_message
        text = state.tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            tools=tools or None,
            documents=documents,
            chat_template=conversation.chat_template,
            variables=variables,
        )
    except ValueError as error:
        raise BadRequest(f"{str(error)[:1].upper()}{str(error)[1:]}.", param="messages") from error
    if not media:
        return Rendered(text, template, thinking)
    illustrated = Illustrated.join(*placeholders.split(text), media, state, "messages")
    return Rendered(illustrated.text, template, thinking, illustrated)


def with_first_messages(conversation: Conversation, preset: Preset) -> Conversation:
    """Return the conversation with the system prompt of the model's name, unless it begins with its own, and then with
    the first messages of that name.
    """
    first, system = list(preset.entry.messages), preset.entry.system
    if not first and not system:
        return conversation
    messages = conversation.messages
    has_own = bool(messages) and messages[0]["role"] in ("system", "developer")
    own, rest = (messages[:1], messages[1:]) if has_own else ([], messages)
    if not has_own and system:
        own = [{"role": "system", "content": system}]
    return replace(conversation, messages=[*own, *first, *rest])


def check_conversation(conversation: Conversation, state: needs.Settings) -> None:
    """Raise BadRequest for options that the server does not allow or that contradict each other."""
    if conversation.chat_template is not None and not state.config.server.trust_request_chat_template:
        raise BadRequest(
            "chat_template is only accepted by a server with --trust-request-chat-template.", param="chat_template"
        )
    if conversation.continue_final_message and conversation.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    if reserved := sorted(RESERVED_KWARGS.intersection(conversation.chat_template_kwargs)):
        raise BadRequest(
            f"chat_template_kwargs must not set {reserved[0]}: the request has a field for it.",
            param="chat_template_kwargs",
        )
    if conversation.continue_final_message and conversation.messages[-1]["role"] != "assistant":
        raise BadRequest(
            "continue_final_message needs a last message of the assistant.", param="continue_final_message"
        )


def _fit_to(
    template: ChatTemplate, conversation: Conversation, tools: list[dict[str, Any]], state: needs.Prompting
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools in a form that the template prints. Raises BadRequest if it cannot print them."""
    messages = after_results(conversation.messages)
    if "developer" not in template.source:  # templates older than this role call it system
        messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
    messages = fit_system_messages(messages, template)
    has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if not tools and not has_calls:
        return messages, tools
    support = template.tool_support
    prints_tools = conversation.chat_template is not None and support.tools  # the request's own template
    if state.formats.generic and not prints_tools and (tools or not support.calls):
        return with_generic_tools(messages, tools), []
    wants_calls = conversation.tool_choice.mode != "none"
    if tools and wants_calls and not support.tools:
        raise BadRequest(
            f"This model's chat template prints no tools. {_without_generic(state)}, or give it a --chat-template that "
            "prints them.",
            param="tools",
        )
    if tools and wants_calls and conversation.parse and state.formats.tools is None:
        raise BadRequest(f"This server reads no calls of tools ({state.formats.tools_reason}).", param="tools")
    if has_calls and not support.calls:
        raise BadRequest(
            f"This model's chat template prints no tool calls and no results of tools. {_without_generic(state)}.",
            param="messages",
        )
    return messages, tools


def _without_generic(state: needs.Settings) -> str:
    server = state.config.server
    flags = ["--no-generic-tool-prompt"] if server.generic_tool_prompt is False else []
    flags += [f"--tool-call-parser {server.tool_call_parser}"] if server.tool_call_parser != "auto" else []
    described = "the server describes tools in a prompt of its own"
    return f"Without {' and '.join(flags)}, {described}" if flags else f"With --generic-tool-prompt, {described}"


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message's content."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
