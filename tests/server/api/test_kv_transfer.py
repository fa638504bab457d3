"""`kv_transfer_params`: the sequence of llm-d's sidecar and vllm-router, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.helpers.server.running import MODEL, running_server
from tests.server.test_launch import free_port

# what both routers send to the first server
FIRST = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
TEXT = "A prompt of some length. " * 8
BODIES = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 6, "temperature": 0, "seed": 1, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": TEXT}],
        "max_completion_tokens": 6,
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
    },
    "/v1/responses": {"input": TEXT, "max_output_tokens": 6, "temperature": 0, "store": False},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6},
}


@pytest.fixture(scope="module")
def pair(model_folder):
    """(producer, consumer)"""
    with ExitStack() as stack:
        found = []
        for role in ("kv_producer", "kv_consumer"):
            config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": free_port()}
            found.append(
                stack.enter_context(running_server(model_folder, block_size=16, kv_transfer_config=json.dumps(config)))
            )
        yield [one.wait_ready() for one in found]


def text_of(answer: dict) -> str:
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def prefilled(producer, path: str) -> dict:
    body = BODIES[path] | {"kv_transfer_params": FIRST, "stream": False}
    body |= {name: 1 for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body}
    answer = producer.http.post(path, json=body, headers={"X-Request-Id": "___prefill_addr_a:1___decode_addr_b:2_5"})
    assert answer.status_code == 200, answer.text
    found = answer.json()["kv_transfer_params"]
    assert found["do_remote_prefill"] and not found["do_remote_decode"] and "5" in found["remote_request_id"]
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_request_goes_on_at_the_second_server(pair, server, path):
    producer, consumer = pair
    found = prefilled(producer, path)
    answer = consumer.http.post(path, json=BODIES[path] | {"kv_transfer_params": found}).json()
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    assert details.get("cached_tokens", usage.get("cache_read_input_tokens")) >= 16
    assert "kv_transfer_params" not in answer
    if "choices" not in answer:
        return  # the others have no seed
    assert text_of(answer) == text_of(server.http.post(path, json=BODIES[path]).json())
    stream = BODIES[path] | {"kv_transfer_params": found, "stream": True}
    events = [line for line in consumer.http.post(path, json=stream).text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line[6:])["choices"][0] for line in events]
    assert "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in parts) == text_of(answer)


def test_a_list_of_prompts_is_computed(pair):
    """Several prompts have no common parameters, and those of one serve the prompt that they are of."""
    producer, consumer = pair
    several = BODIES["/v1/completions"] | {"prompt": [TEXT, "Something else. " * 8], "max_tokens": 2}
    sent = producer.http.post("/v1/completions", json=several | {"kv_transfer_params": FIRST})
    assert sent.status_code == 200 and "kv_transfer_params" not in sent.json()
    found = prefilled(producer, "/v1/completions")
    answer = consumer.http.post("/v1/completions", json=several | {"kv_transfer_params": found, "n": 2})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 4


def test_a_request_id_that_is_used_twice(pair):
    """A retry of a router comes while the first attempt runs."""
    producer, consumer = pair
    found = prefilled(producer, "/v1/completions")
    body = BODIES["/v1/completions"] | {"kv_transfer_params": found, "max_tokens": 200}

    def ask(_):
        return consumer.http.post("/v1/completions", json=body, headers={"X-Request-Id": "the same"})

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    assert {one.status_code for one in answers} == {200}
    assert len({text_of(one.json()) for one in answers}) == 1


def test_a_first_server_that_sent_nothing_leaves_the_prompt_to_the_second(pair):
    _, consumer = pair
    for params in (None, {}, {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": None}):
        body = BODIES["/v1/completions"] | {"kv_transfer_params": params}
        assert consumer.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_prefill": "yes"},
        {"remote_host": 5},
        {"remote_host": "a b"},
        {"remote_host": "user@host"},
        {"remote_host": "x" * 300},
        {"remote_host": "8.8.8.8"},
        {"remote_host": "169.254.169.254"},
        {"remote_host": "prefill.example"},
        {"remote_port": "5600"},
        {"remote_port": 1 << 20},
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [[True]]},
        {"remote_block_ids": [[0]] * 100},
    ],
)
def test_bad_parameters_are_refused(pair, change):
    _, consumer = pair
    good = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [[0]]}
    body = BODIES["/v1/completions"] | {"kv_transfer_params": good | change}
    answer = consumer.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
    assert next(iter(change)) in answer.json()["error"]["message"]


def test_a_server_without_the_setting_refuses_them(server):
    answer = server.http.post("/v1/completions", json=BODIES["/v1/completions"] | {"kv_transfer_params": FIRST})
    assert answer.status_code == 400 and "--kv-transfer-config" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_blocks_that_another_server_should_have_and_has_not(pair):
    _, consumer = pair
    params = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": free_port(),
        "remote_block_ids": [list(range(1000))],
    }
    body = BODIES["/v1/completions"] | {"prompt": "Another prompt of some length. " * 8, "kv_transfer_params": params}
    answer = consumer.http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
