"""The page on a phone: panels, touch targets, the box, installing, speech."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.helpers.models.speech_models import build_whisper
from tests.helpers.server.running import running_server
from tests.server.web.browser import needs_chromium
from tests.server.web.using import answered, fresh, say, started, with_versions

pytestmark = [needs_chromium, pytest.mark.slow]
SHOWN = "getComputedStyle(document.querySelector('{}')).display !== 'none'"
SMALL = """
[...document.querySelectorAll('button, input, select, summary, textarea, header a')].filter(node => {
  const {width, height} = node.getBoundingClientRect();
  return width && height && getComputedStyle(node).visibility !== 'hidden' && (width < 44 || height < 44);
}).map(node => `${node.outerHTML.slice(0, 90)} ${node.offsetWidth} x ${node.offsetHeight}`)
"""
HEAR = """
window.heard = [];
const reached = window.fetch;
window.fetch = async (path, options) => {
  const response = await reached(path, options);
  if (path !== 'v1/audio/transcriptions') return response;
  const head = new Uint8Array(await options.body.get('file').slice(0, 44).arrayBuffer());
  window.heard.push({head: String.fromCharCode(...head), size: options.body.get('file').size, status: response.status,
    text: (await response.clone().json()).text});
  return response;
};
0
"""


@pytest.fixture
def phone(page):
    page.size(390, 844)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    yield page
    page.call("Emulation.setTouchEmulationEnabled", enabled=False)
    page.size(1280, 800)


def tap(page, x: int, y: int) -> None:
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])


def test_the_panel_of_conversations_closes(phone, scripted):
    server, script = scripted
    fresh(phone, server.url + "/")
    script.says("yes")
    say(phone, "On the phone")
    answered(phone)
    shown = SHOWN.format("#list")
    assert phone.js(shown) is False
    phone.click("#open-list")
    assert phone.js(shown) is True
    phone.click("#list .title", "On the phone")  # chosen
    assert phone.js(shown) is False and phone.js("document.querySelector('#open-list').ariaExpanded") == "false"
    phone.click("#open-list")
    tap(phone, 380, 400)  # beside it
    phone.wait(f"!({shown})")
    phone.click("#open-list")
    phone.press("Escape")
    assert phone.js(shown) is False
    phone.click("#open-list")
    phone.click("#open-settings")  # one at a time
    assert phone.js(shown) is False and phone.js(SHOWN.format("#settings")) is True


def test_touch_targets_have_44_points(phone, scripted):
    server, script = scripted
    fresh(phone, server.url + "/")
    with_versions(phone, script, "yes\n\n```python\nprint(1)\n```", "Touch")
    assert phone.js(SMALL) == []
    for toggle in ("#open-list", "#open-settings"):
        phone.click(toggle)
        assert phone.js(SMALL) == []
    phone.js("location.hash = '#watch'")
    phone.wait("document.querySelector('.card dl') !== null")
    assert phone.js(SMALL) == []


def test_the_keyboard_does_not_hide_the_box(phone, scripted):
    """The keyboard of a phone makes the page lower (interactive-widget=resizes-content)."""
    started(phone, scripted[0].url + "/")
    assert "interactive-widget=resizes-content" in phone.js("document.querySelector('meta[name=viewport]').content")
    phone.size(390, 420)
    bottom = "document.querySelector('#input').getBoundingClientRect().bottom"
    phone.wait(f"{bottom} <= innerHeight && innerHeight === 420")
    assert phone.js("document.documentElement.scrollHeight") <= 420


def test_the_page_can_be_installed(phone, scripted):
    started(phone, scripted[0].url + "/")
    assert phone.call("Page.getInstallabilityErrors")["installabilityErrors"] == []
    manifest = phone.call("Page.getAppManifest")
    assert manifest["errors"] == [] and json.loads(manifest["data"])["display"] == "standalone"
    sizes = "fetch('ui/icon-192.png').then(r => r.blob()).then(createImageBitmap).then(i => [i.width, i.height])"
    assert phone.js(sizes) == [192, 192]


def test_no_speech_where_the_server_writes_no_text_from_it(phone, scripted):
    started(phone, scripted[0].url + "/")
    assert "transcription" not in scripted[0].http.get("/v1/models").json()["data"][0]["capabilities"]
    assert phone.js("document.querySelector('#speak').hidden") is True


def test_speech_becomes_text_where_the_server_transcribes(phone, tmp_path, monkeypatch):
    """A small random Whisper hears the tones of Chromium's fake microphone."""
    monkeypatch.setattr("quire.server.generate.transcription.LEAST_LOGPROB", -1000.0)  # one attempt
    monkeypatch.setattr("quire.server.generate.transcription.MOST_COMPRESSION", 1000.0)
    build_whisper(tmp_path, max_target_positions=48, encoder_layers=1, decoder_layers=2)
    settings = {"distributed_executor_backend": "uniproc", "dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
    with running_server(str(tmp_path), max_model_len="auto", **settings) as server:
        started(phone, server.wait_ready(120).url + "/")
        assert "answers no chat" in phone.js("document.querySelector('.welcome').innerText")
        phone.wait("!document.querySelector('#speak').hidden")
        phone.js(HEAR)
        phone.click("#speak")
        phone.wait("document.querySelector('#speak').ariaPressed === 'true'")
        phone.js("new Promise(done => { setTimeout(done, 1000); })")  # what is heard
        phone.click("#speak")
        phone.wait("window.heard.length === 1 && document.querySelector('#speak').ariaPressed === 'false'", 60)
        (heard,) = phone.js("window.heard")
        assert heard["status"] == 200 and heard["text"].strip()
        assert heard["head"].startswith("RIFF") and heard["size"] > 8000  # a quarter of a second
        phone.wait(f"document.querySelector('#input').value === {json.dumps(heard['text'].strip())}")
        phone.click("#send")
        phone.wait("document.querySelector('#notice').innerText.includes('answers no chat')")
        phone.js("import('/ui/store.js').then(s => s.removeDraft('new'))")
