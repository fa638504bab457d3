"""What servers, models and people may do to the page: garbage, cut connections, scripts in names, very long names."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.server.web.browser import Browser, needs_chromium
from tests.server.web.using import answered, fresh, last, say, started

pytestmark = [needs_chromium, pytest.mark.slow]
SCRIPT = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
LONG = "name-" * 100
READABLE = "The answer of v1/chat/completions cannot be read. Another program may answer in the server's place."
# window.answers: what the next requests for an answer get instead of the server's; the last one stays
ANSWERS = """
{ const reached = window.fetch;
window.answers = ANSWERS;
window.fetch = async (path, options) => {
  if (!/^v1.(chat|streams)/.test(path) || !window.answers.length) return reached(path, options);
  const next = window.answers.length > 1 ? window.answers.shift() : window.answers[0];
  const {status = 200, body, type = 'application/json'} = next;
  if (status === 0) throw new TypeError('Failed to fetch');
  return new Response(body, {status, headers: {'Content-Type': type}});
}; 0; }
"""
EVENTS = "text/event-stream"
HALF = 'id: 1\ndata: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
LOADING = {"status": 503, "body": json.dumps({"error": {"code": "model_loading", "message": "Loading: 40 %."}})}


def instead(page: Browser, *answers: dict) -> None:
    page.js(ANSWERS.replace("ANSWERS", json.dumps(answers)))


def real(page: Browser) -> None:
    page.js("window.answers = []; 0")


NOTICE = "document.querySelector('#notice').innerText"


@pytest.mark.parametrize(
    "answer, told",
    [
        ({"body": f"<html>{SCRIPT}</html>", "type": "text/html"}, READABLE),
        ({"body": "data: nonsense\n\n", "type": EVENTS}, READABLE),
        ({"body": 'data: {"choices": 5}\n\n', "type": EVENTS}, READABLE),
        ({"status": 500, "body": f"<h1>{SCRIPT}</h1>", "type": "text/html"}, "The server answered HTTP 500."),
        ({"status": 500, "body": '{"error": {"message": {"a": 1}}}'}, "The server answered HTTP 500."),
        ({"status": 400, "body": json.dumps({"error": {"message": SCRIPT}})}, SCRIPT),
    ],
)
def test_garbage_is_told_and_the_message_stays(page, scripted, answer, told):
    server, script = scripted
    fresh(page, server.url + "/")
    instead(page, answer)
    say(page, "Keep me")
    page.wait(f"{NOTICE}.includes({json.dumps(told)})")
    assert page.js("[document.querySelector('#input').value, document.title]") == ["Keep me", "quire"]
    real(page)
    script.says("there")
    page.click("#notice button", "Try again")
    answered(page)
    assert last(page) == "there"


def test_garbage_midway_keeps_what_came(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    instead(page, {"body": f"{HALF}data: [1\n\n", "type": EVENTS})
    say(page, "All")
    page.wait("document.querySelector('.message.assistant .problem') !== null")
    assert last(page) == "Half" and READABLE in last(page, ".problem")
    real(page)
    script.says(" of it")
    page.click(".message .problem button", "Try again")
    page.wait("document.querySelector('.message.assistant .text').innerText === 'Half of it'")


def test_a_proxy_without_its_server_is_waited_for(page, scripted):
    fresh(page, scripted[0].url + "/")
    rest = 'id: 2\ndata: {"choices": [{"delta": {"content": " of it"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    instead(
        page,
        {"body": HALF, "type": EVENTS},
        {"status": 502, "body": "<h1>Bad Gateway</h1>", "type": "text/html"},
        {"status": 0},
        {"body": rest, "type": EVENTS},
    )
    say(page, "All")
    page.wait("document.querySelector('.message.assistant .text')?.innerText === 'Half of it'")
    page.wait("document.querySelector('#stop').hidden")
    assert page.js("document.querySelector('.message.assistant .problem')") is None


def test_a_model_that_loads_is_waited_for_and_stop_ends_it(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    instead(page, LOADING)
    say(page, "First")
    page.wait("document.querySelector('.message .note')?.innerText === 'Loading: 40 %.'")
    script.says("loaded")
    real(page)
    answered(page)
    assert last(page) == "loaded"
    instead(page, LOADING)
    say(page, "Second")
    page.wait("document.querySelector('.message .note')?.innerText === 'Loading: 40 %.'")
    page.press("Escape")
    page.wait("document.querySelector('#stop').hidden")
    assert last(page, ".figures") == "stopped"


def test_a_key_that_has_expired_is_asked_for_at_each_message(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    instead(page, {"status": 401, "body": '{"error": {"message": "The key has expired."}}'})
    say(page, "With a key")
    for _ in range(2):  # closed, and asked again by the next try
        page.wait("document.querySelector('#dialog').open && document.querySelector('#key') !== null")
        page.press("Escape")
        page.wait(f"{NOTICE}.startsWith('The key has expired.')")
        page.click("#notice button", "Try again")
    page.wait("document.querySelector('#dialog').open")
    real(page)
    script.says("known")
    page.type("#key", "another")
    page.press("Enter")
    answered(page)
    assert last(page) == "known"


@pytest.fixture
def before(page):
    """Run scripts before those of the page."""
    added = []

    def add(source: str) -> None:
        added.append(page.call("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"])

    yield add
    for identifier in added:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=identifier)


def test_the_page_starts_by_itself_once_the_server_answers(page, before, scripted):
    before(
        "const reached = window.fetch; window.down = true;"
        "window.fetch = (...all) => window.down ? Promise.reject(new TypeError('Failed to fetch')) : reached(...all);"
    )
    page.open(scripted[0].url + "/")
    page.wait(f"{NOTICE} === 'The server cannot be reached. Trying again …'")
    page.js("window.down = false; 0")
    page.wait(
        "document.querySelector('#settings input') !== null && document.querySelector('#notice').innerText === ''"
    )


@pytest.mark.parametrize("body, path", [("<html>", "v1/models"), ('{"data": 5}', "v1/models"), ("[]", "v1/models")])
def test_a_page_of_another_program_is_told_at_the_start(page, before, scripted, body, path):
    before(f"window.fetch = async () => new Response({json.dumps(body)});")
    page.open(scripted[0].url + "/")
    page.wait(f"{NOTICE}.startsWith('The answer of {path} cannot be read.')")


def test_a_browser_that_keeps_nothing_can_still_chat(page, before, scripted):
    """As with cookies blocked: every use of a storage throws."""
    before(
        "for (const name of ['localStorage', 'sessionStorage', 'indexedDB']) Object.defineProperty(window, name, "
        "{get() { throw new DOMException('Access is denied.', 'SecurityError'); }});"
        "navigator.locks.request = async () => { throw new DOMException('Access is denied.', 'SecurityError'); };"
    )
    server, script = scripted
    started(page, server.url + "/")
    page.wait(f"{NOTICE} === 'The browser does not keep this conversation: Access is denied.'")
    script.says("not kept")
    say(page, "Hello")
    answered(page)
    assert last(page) == "not kept"
    page.click("#theme")
    page.click("#theme")
    page.click("#theme")


# ---- names

NAMES = [SCRIPT, LONG, "\u05e9\u05dc\u05d5\u05dd " * 20]


@pytest.mark.parametrize("size", [(1200, 800, 1), (600, 400, 2), (390, 844, 1), (320, 568, 1)])  # 600: zoom of 200 %
def test_names_are_text_and_break_no_layout(page, before, scripted, size):
    server, _ = scripted
    model = server.http.get("/v1/models").json()["data"][0]
    cards = [model] + [model | {"id": name, "parent": model["id"]} for name in NAMES]
    calls = [{"id": f"c{i}", "function": {"name": name, "arguments": name}} for i, name in enumerate(NAMES)]
    messages = [
        {"role": "user", "content": "\n".join(NAMES), "files": [{"name": name, "text": name} for name in NAMES]},
        {
            "role": "assistant",
            "content": "\n\n".join(f"## {name}\n\n- {name}\n\n`{name}`" for name in NAMES),
            "calls": calls,
        },
    ]
    one = {"id": "names", "title": SCRIPT + LONG, "created": 1, "updated": 9e15, "revision": 0, "system": "",
           "settings": {"model": LONG}, "messages": messages}  # fmt: skip
    before(
        "const reached = window.fetch; window.fetch = async (path, options) => path === 'v1/models'"
        f" ? new Response({json.dumps(json.dumps({'data': cards}))}) : reached(path, options);"
    )
    page.size(*size)
    try:
        started(page, server.url + "/")
        page.js(
            f"import('/ui/store.js').then(async s => {{ await s.remove('names'); await s.put({json.dumps(one)}); }})"
        )
        page.js(
            "import('/ui/store.js').then(s => s.putPreset("
            f"{{name: {json.dumps(SCRIPT + LONG)}, system: '', settings: {{}}}}))"
        )
        started(page, server.url + "/")
        page.js("[...document.querySelectorAll('#list .title')].find(node => node.textContent.startsWith('<')).click()")
        page.wait("document.querySelectorAll('.message .call').length === 3")
        assert page.js("[document.title, document.querySelectorAll('main img, main script').length]") == ["quire", 0]
        assert page.js("document.querySelector('#model').value") == LONG
        for view in ("chat", "compare", "watch"):
            page.js(f"location.hash = '#{view}'")
            page.wait(f"!document.querySelector('#{view}').hidden")
            assert page.js("document.documentElement.scrollWidth") <= size[0], view
        page.js("location.hash = '#chat'")
        boxes = "[...document.querySelectorAll('#messages, #composer, #settings, #list')]"
        assert page.js(f"{boxes}.filter(node => node.scrollWidth > node.clientWidth + 1).map(node => node.id)") == []
        box = page.js("(r => [r.top, r.bottom, innerHeight])(document.querySelector('#input').getBoundingClientRect())")
        assert 0 < box[0] < box[1] <= box[2]
        rtl = "getComputedStyle([...document.querySelectorAll('.text h4')].at(-1)).unicodeBidi"
        assert page.js(rtl) == "plaintext"
    finally:
        page.js(
            "import('/ui/store.js').then(async s => { await s.remove('names'); "
            "for (const {name} of await s.presets()) await s.removePreset(name); })"
        )
        page.size(1280, 800)


def test_paper_is_light_and_motion_is_left_out_where_it_is_not_wanted(page, scripted):
    started(page, scripted[0].url + "/")
    page.js("document.documentElement.dataset.theme = 'dark'")
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert page.js("getComputedStyle(document.body).color") == "rgb(26, 29, 36)"
    finally:
        page.call("Emulation.setEmulatedMedia", media="")
    moves = "getComputedStyle(document.querySelector('#new')).transitionDuration"
    assert page.js(moves) != "0s"
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert page.js(moves) == "0s"
    page.call("Emulation.setEmulatedMedia", features=[])
