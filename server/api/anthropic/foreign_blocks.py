"""Blocks that this server never makes, in conversations that began at Anthropic.

Calls of tools that Anthropic ran are rendered with their results, documents and search results with their text. Other
blocks are left out of the prompt, and named in the Warning header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.anthropic.block import NOTHING, OF_BLOCK, BaseBlock, JsonObject, Name
from quire.server.errors import BadRequest
from quire.server.prompt.foreign import is_given, readable
from quire.server.request.limits import Text


class ForeignBlock(BaseBlock):
    harmless: ClassVar = OF_BLOCK | {"citations", "caller", "server_name"}


class ForeignCall(ForeignBlock):
    id: Name
    name: Name
    input: JsonObject


class ServerToolUse(ForeignCall, tag="server_tool_use"):
    pass


class McpToolUse(ForeignCall, tag="mcp_tool_use"):
    pass


class ForeignResult(ForeignBlock):
    tool_use_id: Name
    content: msgspec.Raw | UnsetType = UNSET
    is_error: bool | None = None


class WebSearchResult(ForeignResult, tag="web_search_tool_result"):
    pass


class WebFetchResult(ForeignResult, tag="web_fetch_tool_result"):
    pass


class CodeExecutionResult(ForeignResult, tag="code_execution_tool_result"):
    pass


class BashResult(ForeignResult, tag="bash_code_execution_tool_result"):
    pass


class TextEditorResult(ForeignResult, tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchResult(ForeignResult, tag="tool_search_tool_result"):
    pass


class AdvisorResult(ForeignResult, tag="advisor_tool_result"):
    pass


class McpResult(ForeignResult, tag="mcp_tool_result"):
    pass


class Compaction(ForeignBlock, tag="compaction"):
    """A summary of earlier messages. None: it failed."""

    content: Text | None = None

    harmless: ClassVar = ForeignBlock.harmless | {"encrypted_content", "signature", "tool_changes"}


class Idle(ForeignBlock):
    """A block without content for the model."""


class RedactedThinking(Idle, tag="redacted_thinking"):
    pass


class ContainerUpload(Idle, tag="container_upload"):
    pass


class Fallback(Idle, tag="fallback"):
    pass


class McpToolListing(Idle, tag="mcp_tool_listing"):
    pass


class ToolAddition(Idle, tag="tool_addition"):
    pass


class ToolRemoval(Idle, tag="tool_removal"):
    pass


class ToolReference(Idle, tag="tool_reference"):
    pass


class BrowserState(Idle, tag="browser_state"):
    pass


class _DocumentSource(msgspec.Struct, kw_only=True):
    type: Name
    data: Text | None = None
    content: msgspec.Raw | UnsetType = UNSET

    harmless: ClassVar = frozenset({"media_type", "url", "file_id"})
    unsupported: ClassVar = NOTHING


class Document(ForeignBlock, tag="document"):
    source: _DocumentSource
    title: Text | None = None
    context: Text | None = None


class SearchResult(ForeignBlock, tag="search_result"):
    content: msgspec.Raw
    source: Text | None = None
    title: Text | None = None


OfAssistant = (
    ServerToolUse
    | McpToolUse
    | WebSearchResult
    | WebFetchResult
    | CodeExecutionResult
    | BashResult
    | TextEditorResult
    | ToolSearchResult
    | AdvisorResult
    | McpResult
    | Compaction
    | RedactedThinking
    | ContainerUpload
    | Fallback
    | McpToolListing
    | ToolAddition
    | ToolRemoval
)
OfResult = Document | SearchResult | ToolReference | BrowserState


def kind_of(block: msgspec.Struct) -> str:
    """Return the `type` of a block."""
    return type(block).__struct_config__.tag


def left_out(blocks: Sequence[msgspec.Struct]) -> dict[int, str]:
    """Return the places and types of the blocks of a message or result that no prompt has, among them calls whose
    result is not in the same message.
    """
    if not any(isinstance(block, ForeignBlock) for block in blocks):
        return {}
    answered = {block.tool_use_id for block in blocks if isinstance(block, ForeignResult)}
    return {i: kind_of(block) for i, block in enumerate(blocks) if _is_left_out(block, answered)}


def _is_left_out(block: msgspec.Struct, answered: set[str]) -> bool:
    match block:
        case ForeignCall():
            return block.id not in answered
        case Compaction():
            return block.content is None
    return isinstance(block, Idle)


def call_of(block: ForeignCall | None, result: ForeignResult) -> dict[str, object]:
    """Return the call of a result, as templates expect it; `block` is None if the message has only the result, whose
    type names the tool.
    """
    name = kind_of(result).removesuffix("_tool_result") if block is None else block.name
    arguments = {} if block is None else block.input
    return {"id": result.tool_use_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_of(block: ForeignResult, path: str) -> str:
    """Return the text of a result. Raises BadRequest."""
    text = readable(block.content, f"{path}.content") if is_given(block.content) else ""
    return f"Error: {text}" if block.is_error else text


def text_of(block: Document | SearchResult, path: str) -> str:
    """Return the text of a document or a search result. Raises BadRequest for a file that would have to be read."""
    if isinstance(block, SearchResult):
        text = readable(block.content, f"{path}.content")
        return "\n".join(filter(None, (block.title, block.source, text)))
    source, where = block.source, f"{path}.source"
    if source.type == "text" and source.data is not None:
        text = source.data
    elif source.type == "content" and is_given(source.content):
        text = readable(source.content, f"{where}.content")
    else:
        raise BadRequest(
            f"{where}.type: documents of type '{source.type[:100]}' are not read by this server, only text.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    return "\n".join(filter(None, (block.title, block.context, text)))
