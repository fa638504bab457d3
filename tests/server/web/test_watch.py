"""The view of the running server: requests, the last hour, warnings."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from quire.configs.log_ring import LogRing
from quire.engine.messages import EngineCalls
from quire.server.api.ops import status
from tests.helpers.server.running import poll, running_server, write_model_folder
from tests.server.web.browser import needs_chromium
from tests.server.web.using import answered, enter_key, fresh, last, say, started

UNLOADED = [["one", "unloaded", "Load"], ["two", "unloaded", "Load"]]
pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture(scope="module")
def steady(model_folder):
    with running_server(model_folder, fake="step_delay=0.05", max_model_len="2000") as server:
        yield server.wait_ready()


def test_running_requests_are_shown_and_aborted(page, browser, steady):
    fresh(page, steady.url + "/")
    say(page, "Go on and on")
    page.wait("document.querySelector('.message.assistant .text')?.innerText.length > 5")
    tab = browser.tab()
    try:
        tab.open(steady.url + "/#watch")
        cells = "[...document.querySelectorAll('#running tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
        tab.wait(f"(rows => rows.length === 1 && Number(rows[0][5]) > 0 && Number(rows[0][6]) > 5)({cells})")
        row = tab.js(cells)[0]
        assert row[0] == "127.0.0.1" and row[1] == "decode" and 0 < float(row[6]) <= 21
        tab.click("#running button", "Abort")
        tab.wait(
            "document.querySelector('#running .note').innerText === 'None.' && !document.querySelector('#running .note').hidden"  # noqa: E501
        )
    finally:
        tab.close()
    answered(page)
    assert last(page, ".figures").endswith("ended by the server")
    poll(lambda: not steady.state.client.load)


def test_the_last_hour_is_the_servers_own(page, steady):
    history = steady.state.history
    history._readings.clear()
    text = steady.http.get("/metrics").text
    for i in range(4):
        lines = [
            f"{line.rsplit(' ', 1)[0]} {5000 * i}" if line.startswith("quire:generation_tokens_total{") else line
            for line in text.splitlines()
        ]
        history.add("\n".join(lines).encode())
    packed = history._readings.copy()
    history._readings.clear()
    history._readings.extend((1000.0 + 20 * i, one) for i, (_, one) in enumerate(packed))
    started(page, steady.url + "/#watch")
    page.wait("document.querySelector('.plot polyline')?.getAttribute('points')")
    page.js("(s => { s.value = 'hour'; s.dispatchEvent(new Event('change')); })(document.querySelector('#range'))")
    rate = "document.querySelectorAll('.plot')[1].querySelector('output').innerText"
    page.wait(f"{rate} === '250'")  # 5000 tokens in 20 seconds
    points = "document.querySelectorAll('.plot')[1].querySelector('polyline').getAttribute('points').split(' ').length"
    assert page.js(points) == 3


def test_the_history_keeps_what_the_plots_read_and_is_bounded(steady):
    history = type(steady.state.history)()
    text = steady.http.get("/metrics").content
    for _ in range(400):
        history.add(text)
    found = history.readings()
    assert len(found) == 180 and "quire:num_requests_running{" in found[0].metrics
    assert "_bucket{" in found[0].metrics and "vllm:" not in found[0].metrics and len(found[0].metrics) < len(text) / 3


def test_warnings_of_the_log_are_shown(page, scripted):
    ring = LogRing()
    logging.getLogger().addHandler(ring)
    try:
        logging.getLogger("quire.engine").warning("a step took %.1f s: 3 requests", 2.5)
        logging.getLogger("quire.engine").info("nothing to see")
        started(page, scripted[0].url + "/#watch")
        page.wait("document.querySelector('#warnings td') !== null")
        text = page.js("document.querySelector('#warnings').innerText")
        assert "Warnings (1 slow steps)" in text and "a step took 2.5 s: 3 requests" in text and "nothing" not in text
    finally:
        logging.getLogger().removeHandler(ring)


def test_a_key_of_no_administrator_reads_no_history(model_folder):
    with running_server(model_folder, api_key=["one", "two"], admin_api_key=["root"]) as server:
        server.wait_ready()
        assert server.http.get("/metrics/history", headers={"x-api-key": "one"}).status_code == 403
        assert server.http.get("/metrics/history", headers={"x-api-key": "root"}).status_code == 200


def test_an_admin_key_shows_requests_and_ends_them(browser, model_folder):
    settings = {"api_key": ["one"], "admin_api_key": ["root"], "max_model_len": "2000"}
    with running_server(model_folder, fake="step_delay=0.05", **settings) as server:
        server.wait_ready()
        browser.open("about:blank")
        browser.open(server.url + "/")
        enter_key(browser, "one")
        browser.wait("document.querySelector('#settings input') !== null")
        say(browser, "Go on and on")
        browser.wait("document.querySelector('.message.assistant .text')?.innerText.length > 5")
        browser.js("location.hash = '#watch'")
        browser.wait("document.querySelector('#admin') !== null")
        assert browser.js("document.querySelector('#running').hidden") is True
        browser.click("#admin button")
        enter_key(browser, "root")
        browser.click("#running button", "Abort")
        poll(lambda: not server.state.client.load)
        browser.js("location.hash = '#chat'")
        answered(browser)
        assert last(browser, ".figures").endswith("ended by the server")


def test_tiers_of_the_cache_are_shown_and_reading_again_disturbs_nothing(page, scripted, monkeypatch):
    """The facts are read every two seconds: focus, scrolling and selected text stay."""
    tiers = {"used_bytes": {"ram": 3 << 20, "disk": 5 << 30}, "hit_tokens": 1200, "fetch_seconds": 0.5}

    asked = status._asked

    async def tell(state, call):
        return tiers if call is EngineCalls.describe_tiers else await asked(state, call)

    monkeypatch.setattr(status, "_asked", tell)
    page.size(600, 800)
    try:
        started(page, scripted[0].url + "/#watch")
        rows = (
            "[...document.querySelectorAll('#tiers tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
        )
        page.wait("document.querySelector('#tiers') !== null")
        assert page.js(rows) == [
            ["used_bytes ram", "3.0 MiB"],
            ["used_bytes disk", "5.00 GiB"],
            ["hit_tokens", "1,200"],
            ["fetch_seconds", "0.5"],
        ]
        page.js(
            "document.querySelector('#tiers .wide').focus(); "
            "getSelection().selectAllChildren(document.querySelector('#tiers h2'))"
        )
        tiers["hit_tokens"] = 1300
        page.wait(f"{rows}[2][1] === '1,300'")
        assert page.js("document.activeElement === document.querySelector('#tiers .wide')") is True
        assert page.js("getSelection().toString()") == "Tiers of the KV cache"
    finally:
        page.size(1280, 800)


def test_several_models_are_shown_loaded_and_unloaded(page, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_model_folder(tmp_path / name)
    first, second = str(tmp_path / "one"), str(tmp_path / "two")
    with running_server(first, models=[second], served_model_name=[]) as server:
        started(page, server.wait_ready().url + "/#watch")
        cells = "[...document.querySelectorAll('#models tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
        page.wait(f"JSON.stringify({cells}.map(r => [r[0], r[1], r[4]])) === JSON.stringify({UNLOADED})")
        page.click("#models tbody tr:nth-child(2) button", "Load")
        page.wait(f"{cells}[1][1] === 'loaded'", 60)
        page.click("#models tbody tr:nth-child(2) button", "Unload")
        page.wait(f"{cells}[1][1] === 'unloaded'", 60)
        assert page.js(f"{cells}[0][1]") == "unloaded"
