"""axe-core finds nothing: every view and dialog, light and dark, on a wide page and on a phone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.helpers.server.running import running_server
from tests.server.web.browser import Browser, needs_chromium
from tests.server.web.using import MARKDOWN, WEATHER, answered, enter_key, fresh, say, started

AXE = os.environ.get("QUIRE_AXE")  # axe.min.js of the npm package axe-core
pytestmark = [
    needs_chromium,
    pytest.mark.slow,
    pytest.mark.skipif(AXE is None, reason="needs QUIRE_AXE, the path of axe.min.js of the npm package axe-core"),
]
RUN = "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html + n.failureSummary)]))"
CHOOSE = "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change')); }})(document.querySelector('{}'))"
FILE = "(d => (d.items.add(new File(['a note'], 'note.txt', {type: 'text/plain'})), d))(new DataTransfer())"
LOGPROBS = json.dumps([{"token": "a", "logprob": -0.1, "top": [{"token": "b", "logprob": -2.0}]}])
MODELS = [
    {"id": name, "capabilities": [kind], "max_model_len": 512, "size": 1 << 30, "status": {"value": value}}
    for name, kind, value in (
        ("one", "completion", "loaded"),
        ("two", "completion", "unloaded"),
        ("e", "embedding", "loaded"),
    )
]
SEVERAL = (
    "const reached = window.fetch; window.fetch = async (path, options) => path === 'v1/models'"
    f" ? new Response({json.dumps(json.dumps({'data': MODELS}))}) : reached(path, options);"
)


@pytest.fixture(params=["light wide", "dark wide", "light phone", "dark phone"])
def look(page, request):
    colours, width = request.param.split()
    page.dark(colours == "dark")
    if width == "phone":
        page.size(390, 844)
    yield page
    page.size(1280, 800)
    page.dark(False)


def check(page: Browser, state: str) -> None:
    page.js(Path(AXE).read_text() + ";1")
    assert page.js(RUN) == [], state


def chosen_in_menu(page: Browser, item: str) -> None:
    page.js(f"[...document.querySelectorAll('#list .open button')].find(n => n.textContent === '{item}').click()")


def dialogs(page: Browser) -> dict[str, Callable[[], None]]:
    """How each dialog is opened."""
    return {
        "rename": lambda: chosen_in_menu(page, "Rename"),
        "delete": lambda: chosen_in_menu(page, "Delete"),
        "preset": lambda: page.click(".presets button", "Keep as preset"),
        "tools": lambda: (
            page.click("[aria-label='Edit as a form: tools']"),
            page.click(".editor fieldset button", "Add field"),
        ),
        "form of the answer": lambda: (
            page.click("[aria-label='Edit as a form: response_format']"),
            page.js(CHOOSE.format("json_schema", ".editor select")),
            page.click(".editor button", "Add field"),
        ),
        "request": lambda: page.click(".message.assistant button", "Request"),
        "tokens": lambda: page.click(".message.assistant button", "Tokens"),
    }


def test_chat_and_its_dialogs(look, scripted):
    server, script = scripted
    page = look
    fresh(page, server.url + "/")
    page.js(f"document.querySelector('#conversation').dispatchEvent(new DragEvent('drop', {{dataTransfer: {FILE}}}))")
    page.wait("document.querySelector('#attached .file') !== null")
    check(page, "a file in the box")
    for name, text in (("tools", json.dumps(WEATHER)), ("top_p", "7")):  # in place of the settings that were kept
        page.js(f"document.querySelector('#setting-{name}').select()")
        page.type(f"#setting-{name}", text)
    check(page, "a wrong setting")
    page.js("document.querySelector('#setting-top_p').select()")
    page.type("#setting-top_p", "0.7")
    script.says(f"<think>\nhm\n</think>\n\n{MARKDOWN}")
    say(page, "Hello")
    answered(page)
    page.click(".message.assistant button", "Regenerate")
    page.wait("document.querySelector('.versions') !== null")
    answered(page)
    check(page, "versions")
    page.click(".message.user button", "Edit")
    check(page, "editing")
    page.click(".message.user button", "Cancel")
    script.says('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    say(page, "Weather?")
    answered(page, 2)
    page.js(
        "import('/ui/store.js').then(async s => { const c = (await s.all())[0]; Object.assign(c.messages.at(-1), "
        f"{{failed: 'It failed.', logprobs: [{json.dumps(LOGPROBS)}]}}); await s.put(c); }})"
    )
    started(page, server.url + "/")
    check(page, "a call and a failure")
    page.js("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    check(page, "opened details")
    page.js("document.querySelectorAll('.menu').forEach(one => { one.open = false; })")
    for name, open_it in dialogs(page).items():
        open_it()
        check(page, name)
        page.js("document.querySelector('#dialog').close()")
    for toggle in ("#open-list", "#open-settings"):
        page.click(toggle)
        check(page, toggle)
        page.click(toggle)


@pytest.mark.parametrize("path", ["/#watch", "/#compare", "/docs"])
def test_other_views(look, scripted, path):
    look.open(scripted[0].url + path)
    look.wait("document.querySelector('.card dl, .sides, .routes, details') !== null")
    check(look, path)
    if path == "/#compare":
        look.js("document.querySelectorAll('.sides details').forEach(one => { one.open = true; })")
        check(look, "settings of both")


def test_watch_with_several_models(look, scripted):
    added = look.call("Page.addScriptToEvaluateOnNewDocument", source=SEVERAL)["identifier"]
    try:
        started(look, scripted[0].url + "/#watch")
        look.wait("document.querySelectorAll('#models tbody tr').length === 3")
        check(look, "models")
    finally:
        look.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added)


def test_keys_and_mcp_servers(browser, model_folder):
    origin = "http://127.0.0.1:1"
    with running_server(model_folder, api_key=["one"], admin_api_key=["root"], ui_mcp_origins=[origin]) as server:
        browser.open(server.wait_ready().url + "/")
        browser.wait("document.querySelector('#key') !== null && document.querySelector('#dialog').open")
        check(browser, "key")
        enter_key(browser, "one")
        browser.wait("document.querySelector('#mcp') !== null")
        check(browser, "mcp")
        browser.js("location.hash = '#watch'")
        browser.wait("document.querySelector('#admin') !== null")
        check(browser, "locked")
