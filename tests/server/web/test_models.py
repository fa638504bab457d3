"""What the page knows of models: what each does, its limits, how far it is loaded."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.server.web.browser import needs_chromium
from tests.server.web.using import answered, fresh, last, say, started

pytestmark = [needs_chromium, pytest.mark.slow]
CARDS = """
const reached = window.fetch;
window.cards = CARDS;
window.held = null;
window.fetch = async (path, options) => {
  if (path === 'v1/models') return new Response(JSON.stringify({data: window.cards}));
  if (path === 'v1/chat/completions') await window.held;
  return reached(path, options);
};
"""
CHOOSE = (
    "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change')); }})(document.querySelector('#model'))"  # a model
)


@pytest.fixture
def several(page, scripted):
    """The page, to which the server seems to have four models; the first two have the names of the real one."""
    chat, alias = (card["id"] for card in scripted[0].http.get("/v1/models").json()["data"])
    cards = [
        {"id": "vectors", "capabilities": ["embedding"], "max_model_len": 256, "status": {"value": "loaded"}},
        {"id": chat, "capabilities": ["completion"], "max_model_len": 100, "status": {"value": "loaded"}},
        {"id": alias, "capabilities": [], "max_model_len": None, "status": {"value": "unloaded"}},
        {"id": "ears", "capabilities": ["transcription"], "max_model_len": 448, "status": {"value": "loaded"}},
    ]
    source = CARDS.replace("CARDS", json.dumps(cards))
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]
    yield page, chat, alias
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_only_models_that_answer_can_be_chosen(several, scripted):
    page, chat, alias = several
    fresh(page, scripted[0].url + "/")
    options = page.js("[...document.querySelector('#model').options].map(o => [o.innerText, o.disabled])")
    assert options == [
        ["vectors: makes embeddings", True],
        [chat, False],
        [alias, False],
        ["ears: turns speech into text", True],
    ]
    assert page.js("document.querySelector('#model').value") == chat
    assert page.js("document.querySelector('#speak').hidden") is False  # by another model than the one that answers
    page.js("location.hash = '#compare'")
    page.wait("document.querySelectorAll('.sides select[aria-label^=Model]').length === 2")
    chosen = "[...document.querySelectorAll('.sides select[aria-label^=Model] option:disabled')].map(o => o.value)"
    assert page.js(chosen) == ["vectors", "ears"] * 2


def test_adapters_are_chosen_and_come_and_go(several, scripted):
    page, chat, alias = several
    server, script = scripted
    adapter = {"id": alias, "parent": chat, "capabilities": ["completion"], "max_model_len": 100}
    fresh(page, server.url + "/")
    page.js(f"window.cards = [window.cards[1], {json.dumps(adapter)}]; 0")
    script.says("read again")
    say(page, "Which are there?")
    answered(page)  # after an answer the page reads what is served
    label = f"{alias} (adapter of {chat})"
    options = "[...document.querySelector('#model').options].map(o => o.innerText)"
    page.wait(f"JSON.stringify({options}) === JSON.stringify({json.dumps([chat, label])})")
    page.js(CHOOSE.format(alias))
    script.says("adapted")
    say(page, "And you?")
    answered(page, 2)
    page.click(".message.assistant:last-child button", "Request")
    assert f'"model": "{alias}"' in page.js("document.querySelector('#dialog').innerText")
    page.click("#dialog button", "Close")
    page.js("window.cards.pop(); 0")
    script.says("gone")
    say(page, "Still?")
    answered(page, 3)
    page.click("#new")
    page.click("#list .title", "Which are there?")
    page.wait(
        f"document.querySelector('#notice').innerText === 'The server no longer has {alias}: {chat} answers here now.'"
    )


def test_limits_are_those_of_the_chosen_model(several, scripted):
    page, chat, alias = several
    fresh(page, scripted[0].url + "/")
    page.js(CHOOSE.format(chat))  # the page keeps the one that was chosen last
    field = "document.querySelector('#setting-max_tokens')"
    page.type("#setting-max_tokens", "101")
    assert page.js(f"{field}.getAttribute('aria-invalid')") == "true"
    page.js(CHOOSE.format(alias))  # not loaded yet, so its limit is not known
    assert page.js(f"[{field}.value, {field}.getAttribute('aria-invalid')]") == ["101", "false"]


def test_a_request_tells_how_far_its_model_is_loaded(several, scripted):
    page, _, alias = several
    server, script = scripted
    fresh(page, server.url + "/")
    page.js(CHOOSE.format(alias))
    page.js("window.held = new Promise(done => { window.release = done; }); 0")
    page.js("Object.assign(window.cards[2], {status: {value: 'loading', phase: 'weights', progress: 0.4}}); 0")
    script.says("loaded")
    say(page, "Load")
    page.wait(f"document.querySelector('.message .note')?.innerText === 'Loading {alias} … weights 40 %'")
    page.js("Object.assign(window.cards[2], {status: {value: 'loaded'}, max_model_len: 4096}); window.release(); 0")
    answered(page)
    assert last(page) == "loaded"
    page.wait("document.querySelector('#context').innerText.includes('of 4,096 tokens')")  # known now


def test_a_single_model_is_not_asked_about_its_loading(page, scripted):
    server, _ = scripted
    started(page, server.url + "/")
    cards = server.http.get("/v1/models").json()["data"]
    assert all("completion" in card["capabilities"] and "status" not in card for card in cards)
