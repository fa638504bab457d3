"""A conversation becomes one item, and goes on from it, as Codex does it with `openai_base_url`."""

from __future__ import annotations

import json

import openai
import pytest

from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
BEFORE = [
    {"role": "user", "content": "What colour is the sky?"},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "azure"},
]
ASKED = [*BEFORE, {"type": "compaction_trigger"}]
SUMMARY = 'The sky is azure, é🙂.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
THOUGHTS = "<think>\nhm\n</think>\n\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("compaction"), QWEN3_TOOLS)) as (server, script):
        yield server, script


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def compact(server, script, says=THOUGHTS + SUMMARY, **fields):
    script.says(says)
    return server.openai.responses.with_raw_response.create(model=MODEL, input=ASKED, tools=[TOOL], **fields)


@pytest.mark.parametrize("says", [SUMMARY, THOUGHTS + SUMMARY, "  " + SUMMARY])
def test_the_output_is_one_item(pair, says):
    """Without thoughts and calls: the client expects nothing else."""
    server, script = pair
    answer = compact(server, script, says)
    response = answer.parse()
    (item,) = response.output
    assert item.type == "compaction" and response.status == "completed" and "warning" not in answer.headers
    text = prompt(server, script)
    assert '"name": "look"' in text and text.index("azure") < text.rindex("<|im_start|>user\nSummarize")

    script.says("Azure.")
    items = [item.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    answer = server.openai.responses.with_raw_response.create(model=MODEL, input=items)
    assert "warning" not in answer.headers and answer.parse().output_text == "Azure."
    assert f"\n{SUMMARY}<|im_end|>\n<|im_start|>user\nSure?" in prompt(server, script)


def test_a_stream_and_its_replay(pair):
    server, script = pair
    script.says(THOUGHTS + SUMMARY)
    told = list(server.openai.responses.create(model=MODEL, input=ASKED, stream=True))
    kinds = ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert [event.type for event in told] == [f"response.{kind}" for kind in kinds]
    (item,) = told[-1].response.output
    assert told[3].item == item and told[2].item.id == item.id
    again = server.http.get(f"/v1/responses/{told[0].response.id}?stream=true").text
    events = [json.loads(line.removeprefix("data: ")) for line in again.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == [event.type for event in told]
    assert events[3]["item"]["encrypted_content"] == item.encrypted_content


def test_a_stored_conversation_goes_on(pair):
    server, script = pair
    first = compact(server, script).parse()
    script.says("Azure.")
    server.openai.responses.create(model=MODEL, input="Sure?", previous_response_id=first.id)
    text = prompt(server, script)
    assert SUMMARY in text and "Summarize" not in text  # the item that asked is done with


def test_without_words_it_is_an_empty_summary(pair):
    server, script = pair
    (item,) = compact(server, script, "").parse().output
    assert item.type == "compaction"


def test_it_counts_as_its_prompt(pair):
    server, _ = pair
    count = server.openai.responses.input_tokens.count
    assert count(model=MODEL, input=ASKED).input_tokens > count(model=MODEL, input=BEFORE).input_tokens


def test_a_damaged_item_is_named(pair):
    item = {"type": "compaction", "encrypted_content": "quire1.A"}
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.encrypted_content is damaged"):
        pair[0].openai.responses.create(model=MODEL, input=[item, BEFORE[0]])
