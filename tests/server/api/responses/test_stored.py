"""What is kept of responses: the store, runs in the background, conversations."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time

import openai
import pytest

from quire.configs.config import Config
from quire.engine.messages import EngineOutput
from quire.server.api.openai.responses import store as stores
from quire.server.api.openai.responses.service import Responses
from quire.server.api.openai.responses.store import Store, Stored
from quire.server.errors import BadRequest, NotFound
from tests.helpers.server.running import MODEL, poll, running_server
from tests.helpers.server.scripted import Script, Stream, scripted_server, write_folder
from tests.helpers.server.templates import CHATML


def stored(key: str, size: int = 10, owner: str = "", previous: str | None = None, status: str = "completed") -> Stored:
    return Stored(f"resp_{key}", owner, previous, status, b"{}" + b" " * size, b"[]")


def ids(store: Store) -> list[str]:
    return [row[0] for row in store._db.execute("SELECT id FROM objects ORDER BY id")]


# ---- the store


def test_the_least_recently_used_make_room_by_count():
    store = Store(None, 1 << 20, max_objects=3)
    for key in "abc":
        assert store.put(stored(key))
    store.get("resp_a", "", "response_id")
    store.put(stored("d"))
    assert ids(store) == ["resp_a", "resp_c", "resp_d"]
    store.put(stored("c"))
    store.put(stored("e", status="in_progress"))
    store.put(stored("f"))
    store.put(stored("g"))
    store.put(stored("h"))
    assert ids(store) == ["resp_e", "resp_g", "resp_h"]  # what runs stays


def test_the_least_recently_used_make_room_by_bytes():
    store = Store(None, 80_000)
    for i in range(30):
        assert store.put(stored(f"{i:02}", 5_000))
        count, size = store._db.execute("SELECT COUNT(*), SUM(size) FROM objects").fetchone()
        assert size <= 80_000
        assert store._db.execute("SELECT count, size FROM totals").fetchone() == (count, size)
    assert ids(store)[-1] == "resp_29" and len(ids(store)) == 15
    assert not store.put(stored("huge", 20_000)) and len(ids(store)) == 15


@pytest.mark.parametrize("size", [200, 1000, 2500, 9000])
def test_the_size_is_about_the_memory(size):
    """A row must not take pages of its own, as one of more than a quarter of a page does in a table without row ids."""
    store = Store(None, 1 << 30)
    for i in range(500):
        store.put(stored(f"{i:032}", size))
    (pages,), (total,) = (store._db.execute(sql).fetchone() for sql in ("PRAGMA page_count", "SELECT size FROM totals"))
    assert pages * 4096 < 1.6 * total


@pytest.mark.parametrize("by", ["bytes", "count"])
def test_an_owner_does_not_remove_what_others_keep(by):
    store = Store(None, 80_000, 10) if by == "count" else Store(None, 80_000)
    size = 100 if by == "count" else 5_000
    for key in ("x", "y"):
        store.put(stored(f"few_{key}", size, "few"))
    for i in range(100):
        assert store.put(stored(f"many_{i:02}", size, "many"))
        sums = "SELECT owner, COUNT(*), SUM(size) FROM objects GROUP BY owner ORDER BY owner"
        assert store._db.execute("SELECT * FROM owners ORDER BY owner").fetchall() == store._db.execute(sums).fetchall()
    kept = ids(store)
    assert kept[:2] == ["resp_few_x", "resp_few_y"] and kept[-1] == "resp_many_99"
    assert store.num_evicted == 102 - len(kept) > 80
    for i in range(40):  # an equal share each
        store.put(stored(f"third_{i:02}", size, "third"))
    owners = dict(store._db.execute("SELECT owner, count FROM owners").fetchall())
    assert owners["few"] == 2 and abs(owners["many"] - owners["third"]) <= 1


def test_running_ones_of_the_largest_owner_stay():
    store = Store(None, 1 << 20, max_objects=3)
    for key in "abc":
        store.put(stored(key, owner="runs", status="in_progress"))
    store.put(stored("d", owner="other"))
    assert ids(store) == ["resp_a", "resp_b", "resp_c"]


def test_totals_of_owners_of_an_older_file(tmp_path):
    path = str(tmp_path / "r.sqlite")
    store = Store(path, 1 << 20)
    for key in "abc":
        store.put(stored(key, owner="one" if key == "a" else "two"))
    store._db.executescript("DROP TABLE owners; DROP TRIGGER owner_added; DROP TRIGGER owner_removed;")
    store.close()
    store = Store(path, 1 << 20)
    counts = store._db.execute("SELECT owner, count FROM owners ORDER BY owner").fetchall()
    assert counts == [("one", 1), ("two", 2)]
    store.delete("resp_a", "one", "response_id")
    assert store._db.execute("SELECT owner FROM owners").fetchall() == [("two",)]
    store.close()


def test_only_the_user_can_read_the_file(tmp_path):
    path = tmp_path / "r.sqlite"
    path.touch(0o644)
    store = Store(str(path), 1 << 20)
    store.put(stored("a"))
    assert {oct(one.stat().st_mode & 0o777) for one in tmp_path.iterdir()} == {"0o600"}
    store.close()


def test_evictions_are_a_metric(model_folder):
    with running_server(model_folder, responses_store_size=1 << 20) as server:
        server.wait_ready()
        for _ in range(12):
            items = [{"type": "message", "role": "user", "content": "x" * 110_000}]
            assert server.http.post("/v1/conversations", json={"items": items}).status_code == 200
        value = next(
            line.split()[-1]
            for line in server.http.get("/metrics").text.splitlines()
            if line.startswith("quire:stored_objects_evicted_total")
        )
        assert 2 <= float(value) <= 5


def test_owners_and_chains():
    store = Store(None, 1 << 20)
    store.put(stored("a", owner="one"))
    store.put(stored("b", owner="one", previous="resp_a"))
    store.put(stored("c", owner="one", previous="resp_b"))
    assert [one.id for one in store.chain("resp_c", "one", 10**6, False)] == ["resp_a", "resp_b", "resp_c"]
    for wrong in (("resp_a", "two", "response_id"), ("resp_a", "one", "conversation"), ("resp_x", "one", "x")):
        with pytest.raises(NotFound):
            store.get(*wrong)
    with pytest.raises(BadRequest, match="oldest"):
        store.chain("resp_c", "one", 40, False)
    assert len(store.chain("resp_c", "one", 40, True)) == 2
    store.put(stored("d", owner="one", status="in_progress"))
    with pytest.raises(BadRequest, match="has not ended"):
        store.chain("resp_d", "one", 10**6, False)
    store.delete("resp_a", "one", "response_id")
    with pytest.raises(NotFound):
        store.chain("resp_c", "one", 10**6, False)


def test_what_ran_in_a_process_that_ended_has_failed(tmp_path, monkeypatch):
    path = str(tmp_path / "responses.sqlite")
    store = Store(path, 1 << 20)
    store.put(Stored("resp_a", "", None, "in_progress", b'{"id":"resp_a","status":"in_progress"}', b"[]"))
    other = Store(path, 1 << 20)
    assert other.get("resp_a", "", "x").status == "in_progress"
    monkeypatch.setattr(stores, "LEASE", 0.05)
    time.sleep(0.06)
    assert store.keep_alive(["resp_a"]) == []
    assert other.get("resp_a", "", "x").status == "in_progress"
    time.sleep(0.06)
    body = json.loads(other.get("resp_a", "", "x").body)
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")


def test_one_process_cancels_what_another_runs(tmp_path):
    path = str(tmp_path / "responses.sqlite")
    runner, other = Store(path, 1 << 20), Store(path, 1 << 20)
    for key in "abc":
        runner.put(stored(key, status="in_progress"))
    other.ask_to_cancel("resp_a")
    other.delete("resp_b", "", "x")
    assert runner.keep_alive(["resp_a", "resp_b", "resp_c"]) == ["resp_a", "resp_b"]
    assert not runner.finish(stored("b")) and runner.finish(stored("a"))
    assert ids(other) == ["resp_a", "resp_c"]


def test_several_frontends_need_a_file(tmp_path):
    config = Config.from_flat(model="x", api_server_count=2)
    with pytest.raises(BadRequest, match="--responses-store"):
        Responses(config.server).require_kept()
    Responses(
        Config.from_flat(model="x", api_server_count=2, responses_store=str(tmp_path / "r")).server
    ).require_kept()
    with pytest.raises(ValueError, match="--responses-store"):
        Responses(Config.from_flat(model="x", responses_store=str(tmp_path / "no" / "folder")).server)


def test_without_a_store_answers_are_not_stored(pair, monkeypatch):
    server, script = pair
    monkeypatch.setattr(server.state.responses, "kept", False)
    script.says("Hi")
    assert ask(server).to_dict()["store"] is False
    for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError, match="--responses-store"):
            ask(server, **fields)
    with pytest.raises(openai.BadRequestError, match="--responses-store"):
        server.openai.responses.retrieve("resp_1")


def test_an_answer_outlives_a_failure_of_the_store(pair, monkeypatch):
    server, script = pair

    def fail(stored):
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(server.state.responses.store, "put", fail)
    script.says("Hi")
    answer = ask(server)
    assert answer.output_text == "Hi" and answer.to_dict()["store"] is False


@pytest.mark.slow
def test_a_file_survives_a_restart(tmp_path):
    folder = write_folder(tmp_path, CHATML)
    path = str(tmp_path / "responses.sqlite")
    with scripted_server(folder, responses_store=path) as (server, script):
        script.says("Hello")
        first = ask(server, input="remember me")
        conversation = server.openai.conversations.create(items=[{"role": "user", "content": "c1"}])
    with scripted_server(folder, responses_store=path) as (server, script):
        assert server.openai.responses.retrieve(first.id) == first
        script.says("again")
        ask(server, previous_response_id=first.id)
        assert "remember me" in prompt(server, script)
        ask(server, conversation=conversation.id)
        assert "c1" in prompt(server, script)


@pytest.mark.slow
def test_keys_see_their_own(model_folder):
    with running_server(model_folder, api_key=["one", "two"]) as server:
        server.wait_ready()
        mine, others = server.openai_with("one"), server.openai_with("two")
        answer = mine.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
        assert mine.responses.retrieve(answer.id).id == answer.id
        conversation = mine.conversations.create()
        running = mine.responses.create(model=MODEL, input="Hi", max_output_tokens=300, background=True)
        for refused in (
            lambda: others.responses.retrieve(answer.id),
            lambda: others.responses.retrieve(running.id),
            lambda: others.responses.cancel(running.id),
            lambda: others.responses.delete(answer.id),
            lambda: others.responses.input_items.list(answer.id),
            lambda: others.responses.create(model=MODEL, input="Hi", previous_response_id=answer.id),
            lambda: others.responses.create(model=MODEL, input=[{"type": "item_reference", "id": answer.output[0].id}]),
            lambda: others.conversations.retrieve(conversation.id),
            lambda: others.responses.create(model=MODEL, input="Hi", conversation=conversation.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        poll(lambda: mine.responses.retrieve(running.id).status in ("completed", "incomplete"))


# ---- in the background


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("stored"), CHATML)) as (server, script):
        yield server, script


def ask(server, **fields):
    return server.openai.responses.create(**{"model": MODEL, "input": "Hi"} | fields)


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


class Held(Stream):
    """Waits before its last output until it is released or aborted."""

    def __init__(self, outputs: list[EngineOutput]):
        super().__init__(outputs)
        self.released = asyncio.Event()

    async def __anext__(self) -> EngineOutput:
        if len(self.outputs) == 1:
            await self.released.wait()
        return await super().__anext__()

    async def aclose(self) -> None:
        self.outputs = []


@pytest.fixture
def held(pair, monkeypatch):
    """The streams of the answers, which end when they are told to."""
    _, script = pair
    streams: list[Held] = []

    def generate(request):
        streams.append(Held(Script.generate(script, request).outputs))
        return streams[-1]

    monkeypatch.setattr(script, "generate", generate)
    return streams


def release(server, stream: Held) -> None:
    server.loop.call_soon_threadsafe(stream.released.set)


def test_background(pair, held):
    server, script = pair
    client = server.openai.responses
    script.says("one two three")
    begun = ask(server, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    poll(lambda: client.retrieve(begun.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        ask(server, previous_response_id=begun.id)
    release(server, held[0])
    poll(lambda: client.retrieve(begun.id).status == "completed")
    answer = client.retrieve(begun.id)
    assert answer.output_text == "one two three" and answer.usage.output_tokens > 3
    assert client.cancel(begun.id) == answer
    poll(lambda: server.state.num_in_flight == 0 and server.state.num_reserved == 0)


def test_background_streams_can_be_resumed(pair, held):
    server, script = pair
    client = server.openai.responses
    script.says("one two three")
    with ask(server, background=True, stream=True) as stream:
        first = [next(stream) for _ in range(6)]
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id, last = first[0].response.id, first[-1].sequence_number
    rest = client.retrieve(response_id, stream=True, starting_after=last)
    release(server, poll(lambda: held and held[0]))
    rest = list(rest)
    events = first + rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == events[-1].response.output_text == "one two three"
    poll(lambda: response_id not in server.state.responses.runs)
    assert list(client.retrieve(response_id, stream=True, starting_after=last)) == rest
    assert list(client.retrieve(response_id, stream=True)) == events


def test_cancel_and_delete_what_runs(pair, held):
    server, script = pair
    client = server.openai.responses
    script.says("one two three")
    cancelled, deleted = ask(server, background=True), ask(server, background=True)
    poll(lambda: len(held) == 2 and all(len(stream.outputs) == 1 for stream in held))
    answer = client.cancel(cancelled.id)
    assert answer.status == "cancelled" and "one" in answer.output_text and answer.output[0].status == "incomplete"
    assert client.retrieve(cancelled.id) == answer
    client.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(deleted.id)
    assert [stream.outputs for stream in held] == [[], []]
    poll(lambda: server.state.num_in_flight == 0 and not server.state.responses.runs)


def test_a_client_that_leaves_does_not_end_a_background_response(pair, held):
    server, script = pair
    script.says("one two three")
    with ask(server, background=True, stream=True) as stream:
        response_id = next(stream).response.id
    poll(lambda: len(held[0].outputs) == 1)
    release(server, held[0])
    poll(lambda: server.openai.responses.retrieve(response_id).status == "completed")


def test_wrong_queries(pair):
    server, script = pair
    script.says("Hi")
    path = f"/v1/responses/{ask(server).id}"
    for query, param in (
        ("?stream=maybe", "stream"),
        ("?starting_after=1", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
    ):
        answer = server.http.get(path + query)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.slow
def test_a_shutdown_ends_what_runs(tmp_path):
    path = str(tmp_path / "responses.sqlite")
    folder = write_folder(tmp_path, CHATML)
    with running_server(folder, fake="step_delay=0.05", responses_store=path, shutdown_timeout=0.2) as server:
        server.wait_ready()
        begun = ask(server, background=True, max_output_tokens=400)
        poll(lambda: server.openai.responses.retrieve(begun.id).status == "in_progress")
    assert Store(path, 1 << 20).get(begun.id, "", "x").status == "failed"


# ---- conversations


def test_conversations(pair):
    server, script = pair
    client = server.openai.conversations
    conversation = client.create(items=[{"role": "user", "content": "c1"}], metadata={"a": "b"})
    assert conversation.metadata == {"a": "b"} and client.retrieve(conversation.id) == conversation
    script.says("answer one")
    first = ask(server, conversation=conversation.id, input="c2")
    assert first.conversation.id == conversation.id
    script.says("answer two")
    list(ask(server, conversation={"id": conversation.id}, input="c3", stream=True))
    assert "c1<|im_end|>\n<|im_start|>user\nc2<|im_end|>\n<|im_start|>assistant\nanswer one" in prompt(server, script)
    items = list(client.items.list(conversation.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == ["c1", "c2", "answer one", "c3", "answer two"]
    assert client.items.retrieve(items[2].id, conversation_id=conversation.id) == items[2]
    client.items.delete(items[0].id, conversation_id=conversation.id)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    added = client.items.create(conversation.id, items=[call])
    client.items.create(conversation.id, items=[{"type": "function_call_output", "call_id": "c", "output": "x"}])
    assert added.data[0].name == "f" and len(list(client.items.list(conversation.id))) == 6
    assert client.update(conversation.id, metadata={}).metadata == {}
    with pytest.raises(openai.BadRequestError, match="part of a conversation"):
        ask(server, previous_response_id=first.id)
    assert client.delete(conversation.id).deleted
    for refused in (
        lambda: client.retrieve(conversation.id),
        lambda: client.items.list(conversation.id),
        lambda: client.delete(conversation.id),
        lambda: ask(server, conversation=conversation.id),
        lambda: client.retrieve(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    for wrong in ({"type": "function_call_output", "call_id": "x", "output": "x"}, {"type": "mesage"}):
        with pytest.raises(openai.BadRequestError, match=r"items\.0"):
            client.create(items=[wrong])
