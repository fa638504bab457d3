"""The page on a phone: panels, touch targets, the box, installing, speech."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.server.web.browser import needs_chromium
from tests.server.web.using import answered, fresh, say, started

pytestmark = [needs_chromium, pytest.mark.slow]
SHOWN = "getComputedStyle(document.querySelector('{}')).display !== 'none'"
SMALL = """
[...document.querySelectorAll('button, input, select, summary, textarea, header a')].filter(node => {
  const {width, height} = node.getBoundingClientRect();
  return width && height && getComputedStyle(node).visibility !== 'hidden' && (width < 44 || height < 44);
}).map(node => `${node.outerHTML.slice(0, 90)} ${node.offsetWidth} x ${node.offsetHeight}`)
"""
WITH_SPEECH = """
const reached = window.fetch;
window.fetch = async (path, options) => {
  if (path === 'openapi.json') {
    const document = await (await reached(path, options)).json();
    document.paths['/v1/audio/transcriptions'] = {};
    return new Response(JSON.stringify(document));
  }
  if (path !== 'v1/audio/transcriptions') return reached(path, options);
  window.heard = options.body.get('file').size;
  return new Response(JSON.stringify({text: ' spoken words '}));
};
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
    script.says("yes\n\n```python\nprint(1)\n```")
    say(phone, "Touch")
    answered(phone)
    phone.click(".message.assistant button", "Regenerate")
    phone.wait("document.querySelector('.versions') !== null")
    answered(phone)
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


def test_speech_becomes_text_where_the_server_transcribes(phone, scripted):
    server, _ = scripted
    started(phone, server.url + "/")
    assert phone.js("document.querySelector('#speak').hidden") is True
    script = phone.call("Page.addScriptToEvaluateOnNewDocument", source=WITH_SPEECH)["identifier"]
    try:
        started(phone, server.url + "/")
        phone.wait("!document.querySelector('#speak').hidden")
        phone.click("#speak")
        phone.wait("document.querySelector('#speak').ariaPressed === 'true'")
        phone.click("#speak")
        phone.wait("document.querySelector('#input').value === 'spoken words'")
        assert phone.js("window.heard") > 0
    finally:
        phone.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        phone.js("import('/ui/store.js').then(s => s.removeDraft('new'))")
