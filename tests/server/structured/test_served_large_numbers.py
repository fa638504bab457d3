"""Numbers that JSON can write and Python or the engine cannot hold are 400 in every dialect, wherever they are."""

from __future__ import annotations

import pytest

from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS

CHAT = '"messages":[{"role":"user","content":"x"}],"max_tokens":2'
FORMAT = '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"integer","maximum":N}}}'
TOOL = '{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"minimum":N}}}}}'
CALL = '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":N}}}]}'
# by path: members with a number N
FIELDS = {
    "/v1/completions": ['"temperature":N', '"n":N', '"seed":N', '"logit_bias":{"1":N}', '"stop_token_ids":[N]'],
    "/v1/chat/completions": ['"chat_template_kwargs":{"a":N}', FORMAT, '"structured_outputs":{"json":{"enum":[N]}}'],
    "/v1/responses": ['"temperature":N', '"text":{"format":{"type":"json_schema","name":"a","schema":{"const":N}}}'],
    "/v1/messages": ['"temperature":N', '"tools":[{"name":"f","input_schema":{"type":"object","minProperties":N}}]'],
    "/api/chat": ['"options":{"num_predict":N}', '"format":{"type":"integer","maximum":N}', '"images":N'],
    "/invocations": ['"temperature":N'],
    "/generate": ['"parameters":{"max_new_tokens":N}'],
    "/tokenize": ['"add_special_tokens":N'],
}
BASE = {
    "/v1/completions": '"prompt":"a","max_tokens":2',
    "/v1/chat/completions": CHAT,
    "/v1/responses": '"input":"x","max_output_tokens":2',
    "/v1/messages": '"model":"alias",' + CHAT,
    "/api/chat": '"model":"alias","stream":false,"messages":[{"role":"user","content":"x"}]',
    "/invocations": '"prompt":"a","max_tokens":2',
    "/generate": '"inputs":"a"',
    "/tokenize": '"prompt":"a"',
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("numbers"), QWEN3_TOOLS)) as (server, script):
        script.says("1")
        yield server


def post(server, path: str, fields: str):
    content = f"{{{BASE[path]},{fields}}}".encode()
    return server.http.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000])
def test_a_number_that_overflows_is_400(server, path, number):
    for field in FIELDS[path]:
        answer = post(server, path, field.replace("N", number))
        assert answer.status_code == 400, (field, answer.text)
        assert field.split('"')[1] in answer.text or "logit_bias" in field


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", FORMAT),
        ("/v1/chat/completions", '"structured_outputs":{"json":{"enum":[N]}}'),
        ("/v1/responses", '"text":{"format":{"type":"json_schema","name":"a","schema":{"const":N}}}'),
        ("/api/chat", '"format":{"type":"integer","maximum":N}'),
        ("/v1/chat/completions", f'"tool_choice":"required","tools":[{TOOL}]'),
    ],
)
def test_an_integer_beyond_64_bits_in_a_schema_is_no_internal_error(server, path, field):
    answer = post(server, path, field.replace("N", "123456789012345678901234567890"))
    assert answer.status_code in (200, 400), answer.text


def test_a_large_integer_in_a_call_of_the_history_is_kept(server):
    """The model may have written it."""
    body = '"messages":[{"role":"user","content":"x"},' + CALL + ',{"role":"tool","content":"x"}]'
    content = f'{{"model":"alias","stream":false,{body}}}'.replace("N", "123456789012345678901234567890")
    assert server.http.post("/api/chat", content=content.encode()).status_code == 200
