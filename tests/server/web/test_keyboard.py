"""The page without a pointer: Tab reaches all, Escape closes what is open, the focus is never lost."""

from __future__ import annotations

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.server.web.browser import Browser, needs_chromium
from tests.server.web.using import answered, fresh, say, with_versions

pytestmark = [needs_chromium, pytest.mark.slow]
REACHABLE = """
[...document.querySelectorAll('a[href], button, input, select, summary, textarea, [tabindex="0"]')].filter(node =>
  !node.disabled && node.checkVisibility({visibilityProperty: true}) && !node.closest('[hidden]'))
"""
FOCUSED = """
(node => {
  const {outlineStyle, outlineWidth} = getComputedStyle(node);
  const outlined = outlineStyle !== 'none' && parseFloat(outlineWidth) > 0;
  return [REACHABLE.indexOf(node), outlined, node.outerHTML.slice(0, 80)];
})(document.activeElement)
""".replace("REACHABLE", REACHABLE.strip())
LABEL = "document.activeElement.ariaLabel ?? document.activeElement.textContent"


@pytest.fixture
def talk(page, scripted) -> Browser:
    """A conversation with two versions of an answer."""
    server, script = scripted
    fresh(page, server.url + "/")
    with_versions(page, script, "An answer with `code` and\n\n```python\nprint(1)\n```", "By keys")
    return page


def focus(page: Browser, selector: str) -> None:
    page.js(f"document.querySelector({selector!r}).focus()")


def test_tab_reaches_every_control_and_shows_where_it_is(talk):
    count = talk.js(f"{REACHABLE}.length")
    talk.js("document.querySelector('header a').focus()")
    reached = set()
    for _ in range(count + 5):
        talk.press("Tab")
        index, outlined, html = talk.js(FOCUSED)
        assert outlined or index < 0, html
        reached.add(index)
    missed = talk.js(f"{REACHABLE}.map(node => node.outerHTML.slice(0, 80))")
    assert count > 30 and [html for i, html in enumerate(missed) if i not in reached] == []


def test_the_focus_stays_where_messages_change(talk):
    focus(talk, "[aria-label='Earlier version']")
    talk.press("Enter")
    assert talk.js("document.querySelector('.versions span').innerText") == "1 / 2"
    assert talk.js(LABEL) == "Later version"  # there is no earlier one
    talk.press("Enter")
    assert talk.js(LABEL) == "Earlier version"
    talk.js("[...document.querySelectorAll('.message.user footer button')].find(n => n.innerText === 'Edit').focus()")
    talk.press("Enter")
    assert talk.js(LABEL) == "Edit the message"
    talk.press("Escape")
    assert talk.js(LABEL) == "Edit"
    focus(talk, "#list .title")
    talk.press("Enter")
    assert talk.js("document.activeElement.className") == "title"


def test_send_and_stop_take_the_focus_from_each_other(talk, scripted):
    _, script = scripted
    script.says("word " * 400)
    script.pause = 0.02
    try:
        talk.type("#input", "Go on")
        focus(talk, "#send")
        talk.press("Enter")
        talk.wait("document.activeElement.id === 'stop'")
        talk.wait("[...document.querySelectorAll('.text')].at(-1).innerText.includes('word')")
        talk.press("Enter")
        answered(talk, 2)
        assert talk.js("document.activeElement.id") == "send"
    finally:
        script.pause = 0.0


def test_escape_closes_the_menu_and_dialogs_give_the_focus_back(talk):
    focus(talk, "#list .open summary")
    talk.press("Enter")
    assert talk.js("document.querySelector('#list .open .menu').open") is True
    talk.press("Tab")
    talk.press("Escape")
    assert talk.js("document.querySelector('#list .open .menu').open") is False
    assert talk.js("document.activeElement.className") == "icon"
    talk.press("Enter")
    talk.click("#list .menu[open] button", "Rename")
    talk.press("Escape")
    talk.wait("document.activeElement.className === 'icon'")
    for label, opener in (("Keep as preset", ".presets button"), ("Edit as a form: tools", "[aria-label$=tools]")):
        focus(talk, opener)
        talk.press("Enter")
        talk.wait("document.querySelector('#dialog').open")
        talk.press("Escape")
        talk.wait("!document.querySelector('#dialog').open")
        assert talk.js(LABEL) == label


def test_escape_closes_a_panel_before_it_stops_an_answer(talk, scripted):
    _, script = scripted
    script.says("word " * 400)
    script.pause = 0.02
    talk.size(390, 844)
    try:
        say(talk, "Go on")
        talk.wait("!document.querySelector('#stop').hidden")
        talk.click("#open-settings")
        focus(talk, "#system")
        talk.press("Escape")
        assert talk.js("document.activeElement.id") == "open-settings"
        assert talk.js("document.querySelector('#settings.shown')") is None
        assert talk.js("document.querySelector('#stop').hidden") is False
        talk.press("Escape")
        answered(talk, 2)
    finally:
        script.pause = 0.0
        talk.size(1280, 800)
