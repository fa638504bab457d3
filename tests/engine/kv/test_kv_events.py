"""KV events, read by a plain ZeroMQ subscriber with vLLM's own types: a router's view of the cache is the cache."""

import json
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from quire.configs.kv_events import read_kv_events
from quire.engine.kv import events
from quire.engine.kv.events import wire_hash
from quire.engine.messages import AddRequest, Call, LoraUse, MediaItem, SamplingParams
from tests.helpers.engine.harness import VOCAB, Engine, fake_config


def vllm_types(array_like: bool) -> type:
    """The types of vLLM 0.33; events were arrays until 0.23, and are maps since."""

    class Event(msgspec.Struct, array_like=array_like, omit_defaults=True, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None
        locality: str | None = None
        ownership: str | None = None
        session_id: str | None = None
        lookahead_token_ids: list[list[int]] | None = None

    class BlockRemoved(Event):
        block_hashes: list[int]
        medium: str | None
        group_idx: int | None = None
        locality: str | None = None
        ownership: str | None = None

    class AllBlocksCleared(Event):
        pass

    class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    return Batch


class Subscriber:
    """Gathers all events of an engine, and what a router would know."""

    def __init__(self, folder, event_format: str = "map", **settings: Any):
        self.has_topic = event_format == "map"
        self.decoder = msgspec.msgpack.Decoder(vllm_types(event_format == "array"))
        self.context = zmq.Context()
        self.socket, self.replay = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.socket.subscribe("kv")
        addresses = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        for socket, address in zip((self.socket, self.replay), addresses):
            socket.connect(address)
        config = {"enable_kv_cache_events": True, "endpoint": addresses[0], "replay_endpoint": addresses[1]}
        config |= {"topic": "kv"} | ({} if self.has_topic else {"event_format": event_format})  # maps by default
        self.engine = Engine(
            fake_config(
                num_gpu_blocks_override=64,
                block_size=4,
                max_num_seqs=4,
                kv_events_config=json.dumps(config),
                **settings,
            )
        )
        self.cached: dict[str, set[tuple[int, int]]] = {medium: set() for medium in ("GPU", "CPU", "STORAGE")}
        self.events: list[Any] = []

    def join(self) -> None:
        """Wait until events arrive: what is published before a subscriber has joined is lost to it."""
        for i in range(100):
            self.engine.add(f"join {i}", [500 + i] * 6, max_tokens=1)
            self.engine.run()
            if self.socket.poll(50):
                return
        raise AssertionError("no event arrived")

    def ask_again(self, first: int) -> list[tuple[int, bytes]]:
        """The replayed batches from a number on."""
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while self.replay.poll(5000):
            empty, *topic, number, payload = self.replay.recv_multipart()
            assert empty == b"" and len(topic) == self.has_topic
            if not payload:
                assert number == b"\xff" * 8 and not any(topic)
                return batches
            assert not topic or topic == [b"kv"]
            batches.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("no end of the replay")

    def apply(self, events: list[Any]) -> None:
        self.events += events
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    assert len(event.extra_keys) == len(event.block_hashes)
                    told = {(event.group_idx, one) for one in event.block_hashes}
                    assert told.isdisjoint(self.cached[event.medium])
                    self.cached[event.medium] |= told
                case "BlockRemoved":
                    for one in event.block_hashes:
                        self.cached[event.medium].remove((event.group_idx, one))
                case "AllBlocksCleared":
                    for known in self.cached.values():
                        known.clear()

    def of_pool(self) -> set[tuple[int, int]]:
        return {(key[0], wire_hash(key)) for key in self.engine.scheduler.kv.pool.pages.by_key}

    def of_tier(self, name: str) -> set[tuple[int, int]]:
        """Of "ram" or "disk"."""
        tier = self.engine.tier(name)
        keys = tier._blocks if name == "ram" else tier._index
        return {(key[0], wire_hash(key)) for key in keys}

    def run(self) -> None:
        self.engine.run()

    def close(self) -> None:
        self.engine.core.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def subscribe(tmp_path):
    opened = []

    def make(*args: Any, **settings: Any) -> Subscriber:
        opened.append(Subscriber(tmp_path, *args, **settings))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.mark.parametrize("event_format", ["array", "map"])
def test_the_wire_form(subscribe, event_format):
    router = subscribe(event_format)
    router.join()
    adapters = [LoraUse("k", "", name="law")]
    message = AddRequest("a", list(range(1, 14)), SamplingParams(max_tokens=1), cache_salt="salt", adapters=adapters)
    router.engine.scheduler.max_loras = router.engine.scheduler.room.max_loras = 1
    router.engine.put(message)
    router.run()
    router.engine.put(Call(1, "reset_prefix_cache"))
    router.engine.turn()
    router.run()
    while router.socket.poll(2000):
        topic, _, payload = router.socket.recv_multipart()
        assert topic == b"kv"
        batch = router.decoder.decode(payload)
        assert batch.data_parallel_rank == 0 and batch.ts > 1.6e9
        router.events += batch.events
        if len(router.events) > 2 and type(router.events[-1]).__name__ == "AllBlocksCleared":
            break
    raw = msgspec.msgpack.decode(router.ask_again(1)[0][1])[1]
    stored = next(event for event in router.events if getattr(event, "lora_name", None))
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == (list(range(1, 13)), 4, None)
    assert stored.lora_name == "law" and stored.extra_keys == [("law", "salt"), ("law",), ("law",)]
    assert stored.kv_cache_spec_kind == "full_attention" and len(stored.block_hashes) == 3
    assert isinstance(raw[0], list if event_format == "array" else dict)


def test_extra_keys_are_in_the_order_of_vllm():
    media = [MediaItem("cat", 2, 6, 6, ""), MediaItem("dog", 9, 2, 2, "")]
    use = LoraUse("k", "", name="law")
    request = SimpleNamespace(adapters=[use], media=media, cache_salt="salt")
    request.images = lambda start, end: [one for one in media if one.offset < end and one.offset + one.length > start]
    found = [events._extra_keys(request, i, 4) for i in range(4)]
    assert found == [["law", ("cat", 2), "salt"], ["law", ("cat", -2)], ["law", ("dog", 1)], ["law"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "ram"), [("full", 0), ("full", 1500), ("full+window:24", 1500), ("full+state", 1 << 20)]
)
def test_a_router_knows_what_is_cached(subscribe, monkeypatch, tmp_path, groups, ram):
    monkeypatch.setenv("FAKE_EXECUTOR", f"groups={groups}")
    chance = random.Random(len(groups) + ram)
    router = subscribe(kv_disk=str(tmp_path / "kv"), kv_disk_gib=12e-6, kv_offload_gib=ram / 2**30, steps_in_flight=2)
    talks, wait = [[chance.randrange(VOCAB) for _ in range(40)] for _ in range(9)], router.engine
    tiers = wait.scheduler.tiers
    for turn in range(40):
        for i in range(2):
            wait.add(f"{turn}.{i}", list(chance.choice(talks)), max_tokens=5)
        router.run()
        if turn % 3:
            tiers.save(64, set(), False)
        tiers.calls.flush(5.0)
        if turn == 9:
            wait.put(Call(turn, "reset_prefix_cache"))
            router.run()
            assert not router.of_tier("disk") and not router.of_tier("ram" if ram else "disk")
        if turn == 20:
            assert wait.scheduler.kv.reset_prefix_cache()  # as an idle engine that gives its memory back
    tiers.stats(now=True)
    wait.put(Call(99, "stats"))
    router.run()
    batches = router.ask_again(0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    for _, payload in batches:
        router.apply(router.decoder.decode(payload).events)
    assert router.cached["GPU"] == router.of_pool()
    assert router.cached["STORAGE"] == router.of_tier("disk") and router.cached["STORAGE"]
    assert router.cached["CPU"] == (router.of_tier("ram") if ram else set())
    kinds = {(type(event).__name__, getattr(event, "medium", None)) for event in router.events}
    media = {"GPU", "STORAGE", *(["CPU"] if ram else [])}
    assert kinds >= {("BlockStored", medium) for medium in media} | {("AllBlocksCleared", None)}
    assert kinds >= {("BlockRemoved", "GPU"), ("BlockRemoved", "STORAGE")} and (
        ram != 1500 or ("BlockRemoved", "CPU") in kinds
    )
    assert tiers.counts.hits > 0
    assert router.ask_again(len(batches) - 1) == batches[-1:]


def test_what_an_earlier_run_left_on_disk_is_told_when_it_is_used(subscribe, tmp_path):
    prompt, settings = list(range(1, 42)), {"kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 0.01}
    first = Engine(fake_config(num_gpu_blocks_override=64, block_size=4, max_num_seqs=4, **settings))
    for name in "ab":
        first.add(name, prompt, max_tokens=1)
        first.run()
    first.core.stop()
    router = subscribe(**settings)
    router.join()
    assert router.of_tier("disk")
    router.engine.add("c", prompt, max_tokens=1)
    router.run()
    for _, payload in router.ask_again(0):
        router.apply(router.decoder.decode(payload).events)
    assert router.cached["STORAGE"] == router.of_tier("disk") and router.cached["STORAGE"] < router.cached["GPU"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object"),
        ('{"enabled": true}', "unknown key enabled"),
        ('{"enable_kv_cache_events": 1}', "must be true or false"),
        ('{"publisher": "kafka"}', "one of zmq, null"),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', "set publisher to zmq"),
        ('{"buffer_steps": 0}', "from 1 to"),
        ('{"endpoint": "5557"}', "tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://*"}', "tcp://HOST:PORT"),
        ('{"topic": 5}', "must be a string"),
    ],
)
def test_bad_settings_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        read_kv_events(text)


def test_settings_of_several_engines():
    assert read_kv_events('{"endpoint": "tcp://*:5557"}') is None
    settings = read_kv_events('{"enable_kv_cache_events": true, "replay_endpoint": "ipc:///tmp/replay", "topic": null}')
    assert settings.for_engine(0) == settings and settings.topic == ""
    third = settings.for_engine(2)
    assert (third.endpoint, third.replay_endpoint) == ("tcp://*:5559", "ipc:///tmp/replay_dp2")
    chosen = read_kv_events('{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}')
    assert chosen.for_engine(2).endpoint == "tcp://*:0"


def test_an_address_that_cannot_be_used_ends_the_start(tmp_path):
    config = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/no/such/folder"}
    with pytest.raises(ValueError, match=r"endpoint ipc://.*cannot be used"):
        Engine(fake_config(kv_events_config=json.dumps(config)))


def test_a_router_that_listens_is_connected_to(tmp_path):
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        socket.subscribe("")
        config = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
        engine = Engine(fake_config(kv_events_config=json.dumps(config), block_size=4, num_gpu_blocks_override=64))
        for i in range(50):  # the first ones may be sent before the connection is there
            engine.add(str(i), [i + 1] * 20, max_tokens=1)
            engine.run()
            if socket.poll(100):
                break
        assert len(socket.recv_multipart()) == 3
        engine.core.stop()
