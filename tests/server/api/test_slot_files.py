"""POST /slots/{id}?action=save|restore|erase, as llama-server answers."""

from __future__ import annotations

import pytest

from tests.helpers.server.running import MODEL, running_server


@pytest.fixture(scope="module")
def saving(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots")
    with running_server(model_folder, slot_save_path=str(folder), block_size=4) as server:
        server.slot_folder = folder
        yield server.wait_ready()


def post(server, number, action: str, name: str | None = None, **request):
    body = {"json": {"filename": name}} if name is not None else {}
    return server.http.post(f"/slots/{number}", params={"action": action}, **body, **request)


def cached(server, prompt: str) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    usage = server.http.post("/v1/completions", json=body).json()["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def test_save_erase_restore(saving):
    prompt = "A conversation that is saved, forgotten and restored."
    assert cached(saving, prompt) == 0
    saved = post(saving, 0, "save", "talk.bin").json()
    assert saved["id_slot"] == 0 and saved["filename"] == "talk.bin" and saved["timings"]["save_ms"] >= 0
    assert saved["n_saved"] > 8 and saved["n_written"] == (saving.slot_folder / "talk.bin").stat().st_size
    assert post(saving, 0, "erase").json() == {"id_slot": 0, "n_erased": saved["n_saved"]}
    assert cached(saving, prompt) == 0
    post(saving, 0, "erase")
    restored = post(saving, 1, "restore", "talk.bin").json()
    assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
    assert restored["timings"]["restore_ms"] >= 0 and cached(saving, prompt) > 8


@pytest.mark.slow
@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "a\\b", "..", ".", "", ".hidden", "x.rank1", "a\0b", "a\nb", "x" * 300, "a:b", " x"],
)
def test_names_that_lead_elsewhere_are_refused(saving, action, name):
    before = sorted(saving.slot_folder.parent.rglob("*"))
    answer = post(saving, 0, action, name)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "Invalid filename"
    assert sorted(saving.slot_folder.parent.rglob("*")) == before


def test_errors_are_llama_servers(saving, server):
    def error(answer) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["message"]

    status, message = error(post(server, 0, "save", "x"))
    assert status == 501 and message == "This server does not support slots action. Start it with `--slot-save-path`"
    assert error(post(saving, "one", "save", "x")) == (400, "Invalid slot ID")
    assert error(post(saving, 99999, "save", "x")) == (400, "Invalid slot ID")
    assert error(post(saving, 0, "clear", "x")) == (400, "Invalid action")
    assert error(post(saving, 0, "", "x")) == (400, "Invalid action")
    status, message = error(post(saving, 0, "restore", "never-saved"))
    assert status == 400 and message.startswith("Unable to restore slot")
    for body in (b"", b"[]", b'{"filename": 5}', b"\xff"):
        answer = saving.http.post("/slots/0?action=save", content=body)
        assert answer.status_code == 400 and "filename" in answer.json()["error"]["message"]
    assert post(saving, 0, "erase", headers={"Origin": "http://elsewhere"}).status_code == 415
