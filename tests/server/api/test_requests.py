"""What an administrator sees of running requests, and how they are ended."""

from __future__ import annotations

import json
import threading

import pytest

from tests.helpers.server.running import poll, running_server

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400, "ignore_eos": True}
ADMIN = {"x-api-key": "boss"}


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.yaml").write_text("keys: [{name: team, key: team-key}]")
    with running_server(
        model_folder,
        fake="step_delay=0.02",
        max_num_seqs=2,
        api_key_file=str(folder / "keys.yaml"),
        admin_api_key=["boss"],
    ) as running:
        yield running.wait_ready()


class Asking:
    """A request in a thread."""

    def __init__(self, server, request_id: str, path: str = CHAT, **fields):
        def ask() -> None:
            headers = {"x-api-key": "team-key", "x-request-id": request_id}
            self.answer = server.http.post(path, json=LONG | fields, headers=headers)

        self.thread = threading.Thread(target=ask)
        self.thread.start()

    def result(self):
        self.thread.join(20)
        return self.answer


def listed(server) -> list[dict]:
    return server.http.get("/requests", headers=ADMIN).json()["requests"]


def abort(server, *ids: str) -> list[str]:
    answer = server.http.post("/abort_requests", json={"request_ids": list(ids)}, headers=ADMIN)
    assert answer.status_code == 200
    return answer.json()["aborted"]


def test_running_requests_are_listed_and_ended(server):
    running = [Asking(server, f"r-{i}") for i in range(3)]
    rows = poll(lambda: len(found := listed(server)) == 3 and {one["phase"] for one in found} >= {"decode"} and found)
    assert {one["request_id"] for one in rows} == {f"chatcmpl-r-{i}" for i in range(3)}
    assert all(one["key"] == "team" and one["num_prompt_tokens"] > 0 and one["age"] >= 0 for one in rows)
    assert sorted(one["phase"] for one in rows)[-1] == "waiting"  # there are two rows
    load = server.http.get("/load", headers=ADMIN).json()
    assert load["server_load"] >= 3
    assert abort(server, "r-0", "chatcmpl-r-1", "nothing") == ["chatcmpl-r-1", "r-0"]
    by_engine_id = next(one["engine_request_id"] for one in rows if one["request_id"] == "chatcmpl-r-2")
    assert abort(server, by_engine_id) == [by_engine_id]
    for one in running:
        answer = one.result()
        assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "abort"
    poll(lambda: not listed(server) and server.state.client.num_open == 0)
    assert abort(server, "r-0") == []


def test_all_choices_and_streams_end(server):
    one = Asking(server, "several", n=2, stream=True)
    poll(lambda: len(listed(server)) == 2)
    assert abort(server, "several") == ["several"]
    events = [line for line in one.result().text.splitlines() if line.startswith("data: {")]
    reasons = [choice["finish_reason"] for line in events for choice in json.loads(line[6:])["choices"]]
    assert [reason for reason in reasons if reason] == ["abort", "abort"]


def test_only_administrators(server):
    for method, path in (("GET", "/requests"), ("POST", "/abort_requests")):
        answer = server.http.request(method, path, json={"request_ids": []}, headers={"x-api-key": "team-key"})
        assert answer.status_code == 403


def test_a_wrong_body(server):
    for body in ({}, {"request_ids": "x"}, {"request_ids": [1]}):
        answer = server.http.post("/abort_requests", json=body, headers=ADMIN)
        assert answer.status_code == 400 and "request_ids" in answer.text


def test_llama_servers_routes(server):
    props = server.http.get("/props", headers={"x-api-key": "team-key"}).json()
    assert props["total_slots"] == 2 and props["default_generation_settings"]["n_ctx"] == 512
    assert "im_start" in props["chat_template"] and props["modalities"] == {"vision": False, "audio": False}
    assert server.http.get("/slots", headers={"x-api-key": "team-key"}).status_code == 403
    slots = server.http.get("/slots", headers=ADMIN).json()
    assert [one["id"] for one in slots] == [0, 1] and all(one["n_ctx"] == 512 for one in slots)
