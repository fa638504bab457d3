"""A request with all fields that Codex 0.171 sends: its own notes on a request need no warning."""

from __future__ import annotations

from tests.helpers.server.running import MODEL

NOTES = {"internal_chat_message_metadata_passthrough": {"content_item_kinds": ["model.base_instructions"]}}


def message(role: str, text: str) -> dict[str, object]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content} | NOTES


BODY = {
    "model": MODEL,
    "stream": True,
    "input": [message("developer", "You are a coding agent."), message("user", "Hello!")],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a22151",
    "client_metadata": {"session_id": "01a22151", "x-codex-turn-metadata": "{}"},
    "max_output_tokens": 4,
}


def test_only_a_tool_that_is_missing_is_told(server):
    answer = server.http.post("/v1/responses", json=BODY)
    assert answer.status_code == 200
    assert answer.headers["warning"] == '199 quire "unknown parameters ignored: tools.1 (web_search)"'
