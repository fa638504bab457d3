"""Conversations that began at Anthropic go on here: every block of its types is rendered or left out with a warning."""

from __future__ import annotations

import typing
from typing import Any

import anthropic
import pytest
from anthropic.types import content_block_param as stable
from anthropic.types.beta import beta_content_block_param as beta
from typing_extensions import is_typeddict

from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS
from tests.helpers.server.vendor_fields import minimal

QUESTION = {"role": "user", "content": "What did you do?"}
OWN = {"TextBlockParam", "ImageBlockParam", "ThinkingBlockParam", "ToolUseBlockParam", "ToolResultBlockParam"}
TYPES = {
    kind.__name__.removeprefix("Beta"): kind
    for kind in (*typing.get_args(stable.ContentBlockParam), *typing.get_args(beta.BetaContentBlockParam))
    if is_typeddict(kind) and kind.__name__.removeprefix("Beta") not in OWN
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("blocks"), QWEN3_TOOLS)) as (server, script):
        script.says("Hello.")
        yield server, script


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def ask(server, messages: list[dict[str, Any]]) -> str:
    """The Warning header."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)
    answer = client.messages.with_raw_response.create(model=MODEL, max_tokens=200, messages=messages)
    assert answer.parse().content[0].text == "Hello."
    return answer.headers.get("warning", "")


def told(*names: str) -> str:
    return f'199 quire "parameters without effect here: {", ".join(names)}"' if names else ""


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_no_block_ends_a_conversation(pair, name):
    server, script = pair
    block = minimal(TYPES[name])
    if block["type"] == "document":
        block["source"] = {"type": "text", "media_type": "text/plain", "data": "x"}
    of_user = block["type"] in ("document", "search_result", "container_upload")
    message = {"role": "user" if of_user else "assistant", "content": [{"type": "text", "text": "So:"}, block]}
    warning = ask(server, [QUESTION, message, QUESTION])
    assert not warning or warning == told(f"messages.1.content.1 ({block['type']})")
    assert prompt(server, script).count("What did you do?") == 2 and "So:" in prompt(server, script)


LEFT_OUT = [
    {"type": "redacted_thinking", "data": "gAAAA"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "look", "server_name": "s", "input": {}},
    {"type": "container_upload", "file_id": "file_1"},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": [{"name": "look"}]},
    {"type": "compaction", "content": None},
]


def test_what_has_no_text_is_left_out_with_a_warning(pair):
    server, script = pair
    text = {"type": "text", "text": "Much."}
    assert not ask(server, [QUESTION, said(text), QUESTION])
    without = prompt(server, script)
    for blocks in (LEFT_OUT, *([block] for block in LEFT_OUT)):
        names = [f"messages.1.content.{i} ({block['type']})" for i, block in enumerate(blocks)]
        assert ask(server, [QUESTION, said(*blocks, text), QUESTION]) == told(*names)
        assert prompt(server, script) == without
    counted = server.http.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": [QUESTION, said(*LEFT_OUT, text), QUESTION]}
    )
    assert counted.headers["warning"].count("messages.1.content.") == len(LEFT_OUT)


def search(number: int) -> list[dict[str, Any]]:
    found = {
        "type": "web_search_result",
        "title": f"Page {number}",
        "url": f"https://example.com/{number}",
        "encrypted_content": "gAAAA",
        "page_age": None,
    }
    tool_use_id = f"srvtoolu_{number}"
    return [
        {"type": "server_tool_use", "id": tool_use_id, "name": "web_search", "input": {"query": f"query {number}"}},
        {"type": "web_search_tool_result", "tool_use_id": tool_use_id, "content": [found]},
    ]


RESULTS = {
    "code_execution": (
        {
            "type": "code_execution_tool_result",
            "content": {"type": "code_execution_result", "stdout": "4\n", "stderr": "", "return_code": 0},
        },
        '"stdout":"4\\n"',
    ),
    "web_fetch": (
        {
            "type": "web_fetch_tool_result",
            "content": {
                "type": "web_fetch_result",
                "url": "https://example.com",
                "content": {"type": "document", "source": {"type": "text", "data": "It is green."}},
            },
        },
        "It is green.",
    ),
    "mcp text": ({"type": "mcp_tool_result", "content": "It is blue."}, "<tool_response>\nIt is blue.\n"),
    "mcp blocks": (
        {"type": "mcp_tool_result", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]},
        "<tool_response>\nIt\nis\n",
    ),
    "mcp error": ({"type": "mcp_tool_result", "content": "no", "is_error": True}, "<tool_response>\nError: no\n"),
    "nothing": ({"type": "mcp_tool_result"}, "<tool_response>\n\n"),
}


def test_searches_are_rendered_in_their_place(pair):
    server, script = pair
    first, second = {"type": "text", "text": "I search."}, {"type": "text", "text": "It is red."}
    thought = {"type": "thinking", "thinking": "hmmm", "signature": "x"}
    assert not ask(server, [QUESTION, said(thought, first, *search(1), *search(2), second), QUESTION])
    sent = prompt(server, script)
    texts = ["What did", "I search.", '"query 1"', "Page 1", '"query 2"', "Page 2", "It is red.", "What did"]
    places = [sent.index(text) for text in texts[:-1]] + [sent.rindex(texts[-1])]
    assert places == sorted(places) and "gAAAA" not in sent and sent.count("<tool_response>") == 2


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_rendered(pair, name):
    server, script = pair
    result, text = RESULTS[name]
    call = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_fetch", "input": {"n": 5}}
    assert not ask(server, [QUESTION, said(call, result | {"tool_use_id": "srvtoolu_1"}), QUESTION])
    assert text in prompt(server, script) and '"n": 5' in prompt(server, script)


def test_a_paused_turn_goes_on(pair):
    """The call is in one message, its result in the next; the last message may end with a result."""
    server, script = pair
    call, result = search(1)
    warning = ask(server, [QUESTION, said(call), said(result)])
    assert warning == told("messages.1.content.0 (server_tool_use)")
    sent = prompt(server, script)
    assert '"name": "web_search"' in sent and "Page 1" in sent and sent.endswith("<|im_start|>assistant\n")


def test_calls_of_the_client_stay_beside_those_of_the_server(pair):
    server, script = pair
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]}
    assert not ask(server, [QUESTION, said(*search(1), {"type": "text", "text": "Then:"}, use), result])
    sent = prompt(server, script)
    assert sent.index("Page 1") < sent.index("Then:") < sent.index("Zürich") < sent.index("rain")


def test_a_summary_is_the_assistants_text(pair):
    server, script = pair
    summary = {"type": "compaction", "content": "We spoke of colours.", "encrypted_content": "gAAAA"}
    assert not ask(server, [QUESTION, said(summary), QUESTION])
    assert "We spoke of colours." in prompt(server, script) and "gAAAA" not in prompt(server, script)


def test_texts_of_documents_and_search_results(pair):
    server, script = pair
    document = {"type": "document", "title": "Colours", "context": "of 1900", "citations": {"enabled": True}}
    text = {"type": "text", "media_type": "text/plain", "data": "It is green."}
    content = {"type": "content", "content": [{"type": "text", "text": "It is grey."}]}
    found = {
        "type": "search_result",
        "source": "https://example.com",
        "title": "More colours",
        "content": [{"type": "text", "text": "It is gold."}],
    }
    marked = document | {"source": text, "cache_control": {"type": "ephemeral"}}
    blocks = [marked, document | {"source": content}, found]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [*blocks, {"type": "tool_reference"}]}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    text = "Colours\nof 1900\nIt is green.\nColours\nof 1900\nIt is grey.\n"
    text += "More colours\nhttps://example.com\nIt is gold."
    assert not ask(server, [{"role": "user", "content": blocks}])
    assert f"<|im_start|>user\n{text}<|im_end|>" in prompt(server, script)
    warning = ask(server, [QUESTION, said(use), {"role": "user", "content": [result]}])
    assert warning == told("messages.2.content.0.content.3 (tool_reference)")
    assert f"<tool_response>\n{text}\n</tool_response>" in prompt(server, script)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "AAAA"}}]}],
            "messages.0.content.0.source.type: documents of type 'base64' are not read",
        ),
        ([{"role": "user", "content": search(1)}], "content.0: a message of role user has no server_tool_use"),
        ([QUESTION, said({"type": "document", "source": {"type": "text", "data": "x"}})], "has no document block"),
    ],
)
def test_blocks_in_the_wrong_place_are_refused(pair, messages, words):
    server, _ = pair
    with pytest.raises(anthropic.BadRequestError, match=words):
        ask(server, messages)
