"""Tools in namespaces, by which clients group functions, such as those of an MCP server. Models only know flat names,
so such a tool's name is prefixed with that of its namespace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quire.server.api.openai.responses.protocol import ResponseTool

NAMESPACE = "namespace"  # the type of a tool that contains others


class Named(NamedTuple):
    """A tool as clients call it."""

    name: str
    namespace: str | None
    custom: bool


def joined(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def by_joined_name(tools: Iterable[ResponseTool]) -> dict[str, Named]:
    """Return the tools that an answer may call, by the names that the model knows."""
    found: dict[str, Named] = {}
    for tool in tools:
        namespace, members = (tool.name, tool.tools or ()) if tool.type == NAMESPACE else (None, (tool,))
        for one in members:
            name = one.name or ""
            found[joined(namespace, name)] = Named(name, namespace, one.type == "custom")
    return found
