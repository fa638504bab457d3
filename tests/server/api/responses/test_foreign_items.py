"""Conversations that began at OpenAI go on here: every item of its types is rendered or left out with a warning."""

from __future__ import annotations

import typing
from typing import Any

import openai
import pytest
from openai.types.beta import beta_response_input_item_param as beta
from openai.types.responses import response_input_item_param as stable

from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import LLAMA2, QWEN3_TOOLS
from tests.helpers.server.vendor_fields import minimal

QUESTION = {"role": "user", "content": "What did you do?"}
TYPES = {
    kind.__name__: kind
    for kind in (*typing.get_args(stable.ResponseInputItemParam), *typing.get_args(beta.BetaResponseInputItemParam))
}
# the call that an output answers
CALLS = {
    "function_call_output": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    "custom_tool_call_output": {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""},
    "local_shell_call_output": {"type": "local_shell_call", "id": "c", "call_id": "d", "action": {"command": ["ls"]}},
    "shell_call_output": {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    "apply_patch_call_output": {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file"}},
    "program_output": {"type": "program", "call_id": "c", "code": "1"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("foreign"), QWEN3_TOOLS)) as (server, script):
        script.says("Hello.")
        yield server, script


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def ask(server, items: list[dict[str, Any]]) -> tuple[str, Any]:
    """The Warning header, and the response."""
    answer = server.openai.responses.with_raw_response.create(model=MODEL, input=items)
    return answer.headers.get("warning", ""), answer.parse()


def item_of(kind: type) -> dict[str, Any]:
    item = minimal(kind)
    for name in ("call_id", "id"):
        if name in item:
            item[name] = "c"
    if item.get("role") == "x":
        item["role"] = "user"
    return item | ({"call_id": "c"} if item.get("type") == "function_call_output" else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TYPES if not name.endswith("ItemReference")])
def test_no_item_ends_a_conversation(pair, name):
    """And every one comes back from a stored conversation as it went in."""
    server, script = pair
    item = item_of(TYPES[name])
    before = [call] if (call := CALLS.get(item.get("type"))) else []
    warning, response = ask(server, [QUESTION, *before, item, QUESTION])
    assert response.status == "completed" and prompt(server, script).count("What did you do?") == 2
    assert not warning or f"input.{1 + len(before)} ({item['type']})" in warning, warning
    client = server.openai.conversations
    conversation = client.create(items=[QUESTION, *before, item])
    response = server.openai.responses.create(model=MODEL, conversation=conversation.id, input="And now?")
    assert response.status == "completed" and "And now?" in prompt(server, script)
    if item.get("type", "message") != "message":
        stored = server.http.get(f"/v1/conversations/{conversation.id}/items?order=asc").json()["data"][1 + len(before)]
        lost = {field for field in item.keys() - stored.keys() if item[field] not in (None, [])}
        assert lost <= {"phase"} and all(stored[field] == item[field] for field in item.keys() & stored.keys())


LEFT_OUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["q"], "results": None},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "container_id": "cntr", "outputs": []},
    {"type": "mcp_call", "id": "mcp_1", "name": "look", "arguments": "{}", "server_label": "s", "error": None},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": [{"name": "look", "input_schema": {}}]},
    {"type": "mcp_approval_request", "id": "mcpr_1", "name": "look", "arguments": "{}", "server_label": "s"},
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    {"type": "computer_call", "id": "cu_1", "call_id": "c1", "action": {"type": "click", "x": 1}},
    {
        "type": "computer_call_output",
        "call_id": "c1",
        "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"},
    },
    {"type": "image_generation_call", "id": "ig_1", "result": "AAAA", "status": "completed"},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA"},
    {"type": "tool_search_call", "arguments": {"query": "q"}},
    {"type": "something_new_call", "id": "x_1", "whatever": {"a": [1, 2]}},
]


def test_what_has_no_text_is_left_out_with_a_warning(pair):
    server, script = pair
    warning, _ = ask(server, [QUESTION, {"role": "assistant", "content": "Much."}, QUESTION])
    without = prompt(server, script)
    for items in (LEFT_OUT, *([item] for item in LEFT_OUT)):
        warning, _ = ask(server, [QUESTION, *items, {"role": "assistant", "content": "Much."}, QUESTION])
        told = ", ".join(f"input.{i} ({item['type']})" for i, item in enumerate(items, 1))
        assert warning == f'199 quire "parameters without effect here: {told}"'
        assert prompt(server, script) == without
    answer = server.openai.responses.input_tokens.with_raw_response.count(model=MODEL, input=[QUESTION, *LEFT_OUT])
    assert "input.14 (something_new_call)" in answer.headers["warning"]


def test_left_out_items_are_no_error_of_strict_parameters(tmp_path):
    with scripted_server(write_folder(tmp_path, QWEN3_TOOLS), strict_params=True) as (server, script):
        script.says("Hello.")
        assert "(compaction)" in ask(server, [QUESTION, *LEFT_OUT, QUESTION])[0]


RENDERED = [
    (
        [
            {
                "type": "local_shell_call",
                "id": "lsh_1",
                "call_id": "call_1",
                "action": {"type": "exec", "command": ["ls", "-l"], "env": {}},
                "status": "completed",
            },
            {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.txt"},
        ],
        ["local_shell", '"command": ["ls", "-l"]', "<tool_response>\na.txt\n"],
    ),
    (  # as Codex answers it
        [
            {"type": "local_shell_call", "call_id": "call_1", "action": {"type": "exec", "command": ["pwd"]}},
            {"type": "function_call_output", "call_id": "call_1", "output": "/home"},
        ],
        ["local_shell", '"command": ["pwd"]', "<tool_response>\n/home\n"],
    ),
    (
        [
            {"type": "shell_call", "call_id": "call_1", "action": {"commands": ["ls", "false"]}},
            {
                "type": "shell_call_output",
                "call_id": "call_1",
                "output": [
                    {"stdout": "a.txt\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                    {"stdout": "", "stderr": "no!", "outcome": {"type": "timeout"}},
                ],
            },
        ],
        ['"name": "shell"', '"commands": ["ls", "false"]', '"stdout":"a.txt\\n"', '"exit_code":0', '"stderr":"no!"'],
    ),
    (
        [
            {
                "type": "apply_patch_call",
                "call_id": "call_1",
                "operation": {"type": "update_file", "path": "a.py", "diff": "@@ é"},
                "status": "completed",
            },
            {"type": "apply_patch_call_output", "call_id": "call_1", "status": "failed"},
        ],
        ["apply_patch", '"path": "a.py"', "@@ é", "<tool_response>\nfailed\n"],
    ),
    (
        [{"type": "mcp_call", "id": "mcp_1", "name": "look", "arguments": '{"at": 5}', "output": "a sign"}],
        ['"name": "look"', '"at": 5', "<tool_response>\na sign\n"],
    ),
    (
        [{"type": "mcp_call", "id": "mcp_1", "name": "look", "arguments": "{}", "output": None, "error": "too dark"}],
        ["<tool_response>\nError: too dark\n"],
    ),
    (
        [
            {
                "type": "code_interpreter_call",
                "id": "ci_1",
                "code": "print('é')",
                "container_id": "cntr_1",
                "outputs": [{"type": "logs", "logs": "é\n"}, {"type": "image", "url": "data:image/png;base64,AAAA"}],
                "status": "completed",
            }
        ],
        ["code_interpreter", "print('é')", '"logs":"é\\n"'],
    ),
    (
        [
            {
                "type": "file_search_call",
                "id": "fs_1",
                "queries": ["colours"],
                "results": [{"file_id": "f", "filename": "a.txt", "text": "It is green.", "score": 0.5}],
            }
        ],
        ["file_search", '"queries": ["colours"]', "It is green."],
    ),
    (
        [
            {
                "type": "web_search_call",
                "id": "ws_1",
                "action": {"type": "search", "query": "colours"},
                "results": [{"title": "All colours", "encrypted_content": "gAAAA"}],
            }
        ],
        ["web_search", '"query": "colours"', "All colours"],
    ),
]


@pytest.mark.parametrize(("items", "texts"), RENDERED, ids=[items[0]["type"] for items, _ in RENDERED])
def test_calls_are_rendered_with_their_results(pair, items, texts):
    """In the order of the items, without files, and the conversation goes on from what is stored."""
    server, script = pair
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hmmm"}]}
    said = {"role": "assistant", "content": "Much."}
    warning, first = ask(server, [QUESTION, thought, *items, said, QUESTION])
    sent = prompt(server, script)
    assert not warning
    places = [sent.index(text) for text in texts]
    assert sent.index("What did") < min(places) and max(places) < sent.index("Much.")
    assert "AAAA" not in sent and places == sorted(places)
    server.openai.responses.create(model=MODEL, previous_response_id=first.id, input="More?")
    assert prompt(server, script).startswith(sent.removesuffix("<|im_start|>assistant\n"))


@pytest.mark.slow
def test_a_template_that_wants_turns_takes_calls_and_results(tmp_path):
    """It knows no tools: calls and results are text, and a result and the user's words after it are one message."""
    template = LLAMA2.replace("bos_token", "''").replace("eos_token", "''")
    with scripted_server(write_folder(tmp_path, template)) as (server, script):
        script.says("Hello.")
        said = {"role": "assistant", "content": "Much."}
        for items, _ in RENDERED:
            for after in ([], [QUESTION], [said, QUESTION], [*items, *items, QUESTION]):
                assert not ask(server, [QUESTION, *items, *after])[0]
        ask(server, [QUESTION, *RENDERED[5][0], QUESTION])
        assert "Result: Error: too dark\nWhat did you do? [/INST]" in prompt(server, script)


def test_outputs_need_their_call(pair):
    server, _ = pair
    for kind, field in (("shell_call_output", "output"), ("program_output", "result")):
        with pytest.raises(openai.BadRequestError, match="no call before it"):
            ask(server, [QUESTION, {"type": kind, "call_id": "c", field: "x"}])
    conversation = server.openai.conversations.create(items=[QUESTION, CALLS["local_shell_call_output"]])
    items = server.openai.conversations.items
    items.create(conversation.id, items=[{"type": "local_shell_call_output", "id": "c", "output": "x"}])
    with pytest.raises(openai.BadRequestError, match="no call before it"):
        items.create(conversation.id, items=[{"type": "local_shell_call_output", "id": "other", "output": "x"}])


def test_parts_of_the_assistants_message(pair):
    server, script = pair
    parts = [
        {"type": "output_text", "text": "One.", "annotations": []},
        {"type": "output_audio", "data": "AAAA", "transcript": "Two."},
        {"type": "refusal", "refusal": "No."},
        {"type": "new_text", "text": "Three."},
    ]
    warning, _ = ask(server, [QUESTION, {"role": "assistant", "content": parts}, QUESTION])
    assert warning == '199 quire "parameters without effect here: input.1.content.1 (output_audio)"'
    assert "One.No.Three." in prompt(server, script)


def test_fields_of_calls_are_hints(pair):
    server, _ = pair
    call = CALLS["function_call_output"] | {"namespace": "crm", "async": True}
    warning, _ = ask(server, [QUESTION, call, {"type": "function_call_output", "call_id": "c", "output": "x"}])
    assert warning == '199 quire "parameters without effect here: input.1.async"'


@pytest.mark.parametrize(
    "item",
    [
        {"type": "code_interpreter_call", "code": "1", "outputs": [[[]]]},
        {"type": "code_interpreter_call", "outputs": [10**400]},
        {"type": "shell_call", "call_id": "c", "action": 5},
        {"type": "apply_patch_call", "call_id": "c", "operation": None},
        {"type": "mcp_call", "error": {"a": ["b"]}},
        {"type": "file_search_call", "queries": {}, "results": "x"},
        {"type": "web_search_call", "results": [1, None]},
    ],
)
def test_odd_items_are_no_error_of_the_server(pair, item):
    server, _ = pair
    body = {"model": MODEL, "input": [QUESTION, item, QUESTION]}
    assert server.http.post("/v1/responses", json=body).status_code in (200, 400)


def test_results_that_are_nested_too_deeply_are_refused(pair):
    server, _ = pair
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    item = {"type": "code_interpreter_call", "code": "1", "outputs": deep}
    with pytest.raises(openai.BadRequestError, match=r"input\.1\.outputs: nested more than 64 levels"):
        ask(server, [QUESTION, item])
