"""LoRA adapters that are loaded and unloaded while several frontends serve."""

from __future__ import annotations

import shutil
import threading

import pytest

from tests.helpers.models.lora import make_adapter
from tests.helpers.server.running import poll
from tests.server.frontends.test_fleet import connections, fleet, frontends, wait_open

pytestmark = pytest.mark.slow


@pytest.fixture
def adapters(checkpoint, tmp_path):
    """The folder for --lora-dir with the adapters `one` and `two`, and adapters elsewhere."""
    for seed, name in enumerate(("dir/one", "dir/two", "outside")):
        make_adapter(tmp_path / "adapters" / name, checkpoint("llama-tied"), 4, seed=seed)
    return tmp_path / "adapters"


def change(http, verb, name, **fields):
    return http.post(f"/v1/{verb}_lora_adapter", json={"lora_name": name, **fields})


def listed(http):
    """(id, name, scale) of the adapters, and the names that /v1/models has beside the base model's."""
    ids = [(one["id"], one["name"], one["scale"]) for one in http.get("/lora-adapters").json()]
    cards = http.get("/v1/models").json()["data"]
    assert {card["id"] for card in cards if card["parent"]} == {name for _, name, _ in ids}
    return ids


def status(http, name):
    return http.post("/v1/completions", json={"model": name, "prompt": "hello", "max_tokens": 2}).status_code


def test_changes_are_seen_by_all_frontends_when_they_are_answered(model_folder, adapters, tmp_path):
    base = adapters / "dir"
    with fleet(model_folder, tmp_path, lora_dir=str(base)) as server:
        wait_open(server)
        https = connections(server)
        start = [(0, "one", 0.0), (1, "two", 0.0)]
        assert [listed(http) for http in https] == [start, start]

        shutil.copytree(base / "two", base / "three")
        for number in range(4):  # the answer is the barrier: no waiting between a change and a look elsewhere
            here, there = https[number % 2], https[1 - number % 2]
            assert change(here, "load", "three", lora_path=str(base / "three")).status_code == 200
            assert status(there, "three") == status(here, "three") == 200
            assert listed(here) == listed(there) == [*start, (2 + number, "three", 0.0)]
            taken = change(there, "load", "three", lora_path=str(base / "three"))
            assert taken.status_code == 409 and taken.json()["error"]["param"] == "lora_name"
            assert change(there, "unload", "three").status_code == 200
            assert status(here, "three") == status(there, "three") == 404
        missing = change(https[0], "unload", "three").json()["error"]
        assert missing["code"] == "model_not_found" and missing["param"] == "lora_name"
        for http in https:
            assert change(http, "unload", "three").status_code == 404
            assert change(http, "load", "x", lora_path=str(adapters / "outside")).status_code == 403
            assert change(http, "load", "x", lora_path=str(base / "none")).status_code == 400
            assert http.post("/lora-adapters", json=[{"id": 77, "scale": 1}]).status_code == 400
        assert https[1].post("/lora-adapters", json=[{"id": 1, "scale": 0.5}]).status_code == 200
        assert listed(https[0]) == listed(https[1]) == [(0, "one", 0.0), (1, "two", 0.5)]

        _race(https, str(base / "one"))
        assert change(https[0], "unload", "raced").status_code == 200
        assert change(https[0], "load", "late", lora_path=str(base / "three")).status_code == 200
        assert change(https[1], "unload", "one").status_code == 200
        shutil.rmtree(base)  # the files are not needed any more, by a new frontend neither
        present = listed(https[0])
        assert [name for _, name, _ in present] == ["two", "late"]
        frontends(server)[0].kill()
        poll(lambda: "frontend 0 died (signal SIGKILL)" in server.log)
        poll(lambda: len(frontends(server)) == 2)
        new, old = connections(server)
        poll(lambda: new.get("/ready").status_code == 200)
        assert listed(new) == listed(old) == present
        assert status(new, "late") == 200 and status(new, "one") == 404
        assert change(new, "unload", "late").status_code == 200 and status(old, "late") == 404
        assert "Traceback" not in server.log


def _race(https, path):
    """One of two loads of a name at the same time is refused."""
    codes = []

    def load(http):
        codes.append(change(http, "load", "raced", lora_path=path).status_code)

    threads = [threading.Thread(target=load, args=(http,)) for http in https]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, 409]
