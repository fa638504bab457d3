"""The page keeps what was said and written: versions, streams, drafts, settings, what another tab does."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.helpers.server.running import poll
from tests.server.web.browser import Browser, needs_chromium
from tests.server.web.using import CUT, answered, fresh, last, say, started

pytestmark = [needs_chromium, pytest.mark.slow]
NEWER = """
(async () => {
  const one = (await (await import('/ui/store.js')).all()).find(c => c.title === 'Shared');
  one.revision += 5;
  await new Promise(done => {
    const open = indexedDB.open(`quire ${location.pathname}`, 2);
    open.onsuccess = () => {
      const change = open.result.transaction('conversations', 'readwrite');
      change.objectStore('conversations').put(one);
      change.oncomplete = done;
    };
  });
})()
"""
SELECT = """
(() => {
  const text = document.querySelector('.message.assistant .text p').firstChild, range = document.createRange();
  range.setStart(text, 0);
  range.setEnd(text, 11);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
})()
"""
LONG = " ".join(f"word{i}" for i in range(60))


@pytest.fixture
def slow(scripted):
    """The scripted server, with a pause before each token."""
    server, script = scripted
    script.pause = 0.01
    yield server, script
    script.pause = 0.0


def versions(page: Browser, role: str = "assistant") -> str:
    return page.js(f"document.querySelector('.message.{role} .versions span')?.innerText ?? ''")


def shows(page: Browser, text: str, selector: str = ".message.assistant .text") -> None:
    page.wait(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.innerText.trim() === {json.dumps(text)}")


def test_regenerate_makes_a_version(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("first")
    say(page, "Which?")
    answered(page)
    script.says("second")
    page.click(".message.assistant button", "Regenerate")
    shows(page, "second")
    answered(page)
    assert versions(page) == "2 / 2"
    page.click("[aria-label='Earlier version']")
    shows(page, "first")
    script.says("follows the first")
    say(page, "And?")
    answered(page, 2)
    page.click("[aria-label='Later version']")
    shows(page, "second")
    assert page.js("document.querySelectorAll('.message').length") == 2
    page.wait("import('/ui/store.js').then(s => s.all()).then(all => all[0].messages[1].content === 'second')")
    started(page, server.url + "/")  # versions survive a reload
    page.click("[aria-label='Earlier version']")
    shows(page, "follows the first")
    text = page.js(
        "import('/ui/store.js').then(async s => s.parseExport(s.exported(await s.all()))[0].messages.length)"
    )
    assert text in (2, 4)


def test_edit_makes_a_version(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("of the first")
    say(page, "First question")
    answered(page)
    script.says("of the second")
    page.click(".message.user button", "Edit")
    page.js("document.querySelector('.message.user textarea').select()")
    page.type(".message.user textarea", "Second question")
    page.press("Enter")
    shows(page, "of the second")
    answered(page)
    assert versions(page, "user") == "2 / 2"
    page.click("[aria-label='Earlier version']")
    shows(page, "First question", ".message.user .text")
    shows(page, "of the first")


def test_a_stream_goes_on_in_a_conversation_that_is_not_open(page, slow):
    server, script = slow
    fresh(page, server.url + "/")
    script.says(LONG)
    say(page, "Tell me all")
    page.wait("document.querySelector('.message.assistant .text')?.innerText.includes('word3')")
    page.click("#new")
    script.says("short")
    say(page, "Meanwhile")
    shows(page, "short")
    finish = "all.find(c => c.title === 'Tell me all').messages[1].finish"
    page.wait(f"import('/ui/store.js').then(s => s.all()).then(all => {finish})")
    page.click("#list .title", "Tell me all")
    shows(page, LONG)


def test_a_stream_goes_on_after_a_reload(page, slow):
    server, script = slow
    fresh(page, server.url + "/")
    script.says(LONG)
    before = len(script.requests)
    say(page, "Tell me all again")
    page.wait("document.querySelector('.message.assistant .text')?.innerText.includes('word3')")
    started(page, server.url + "/")
    shows(page, LONG)
    answered(page)
    assert len(script.requests) == before + 1


def test_stop_after_a_reload_ends_the_generation(page, slow):
    server, script = slow
    fresh(page, server.url + "/")
    script.says(LONG * 20)
    say(page, "Never end")
    page.wait("document.querySelector('.message.assistant .text')?.innerText.includes('word3')")
    started(page, server.url + "/")
    page.wait("!document.querySelector('#stop').hidden")
    page.click("#stop")
    answered(page)
    assert last(page, ".figures").endswith("stopped")
    poll(lambda: not server.state.num_in_flight)


def test_a_lost_connection_is_taken_up_again(browser, slow):
    server, script = slow
    fresh(browser, server.url + "/")
    script.says(LONG)
    before = len(script.requests)
    browser.js(
        "(() => { const read = ReadableStreamDefaultReader.prototype.read; let n = 0; "
        "ReadableStreamDefaultReader.prototype.read = function () { "
        "return ++n === 20 ? Promise.reject(new TypeError('network error')) : read.call(this); }; })()"
    )
    say(browser, "Tell me all once more")
    answered(browser)
    assert last(browser).strip() == LONG and len(script.requests) == before + 1


def test_a_failed_request_gives_the_message_back(browser, scripted):
    server, script = scripted
    script.says("there again")
    fresh(browser, server.url + "/")
    browser.js(CUT)
    name = "new File(['a note'], 'note.txt', {type: 'text/plain'})"
    browser.js(
        f"(() => {{ const data = new DataTransfer(); data.items.add({name}); document.querySelector('#conversation')"
        ".dispatchEvent(new DragEvent('drop', {dataTransfer: data})); })()"
    )
    browser.wait("document.querySelector('#attached .file') !== null")
    say(browser, "Keep this text")
    browser.wait("document.querySelector('#notice').innerText.includes('The server cannot be reached.')")
    assert browser.js("document.querySelector('#input').value") == "Keep this text"
    assert browser.js("document.querySelectorAll('#attached .file').length") == 1
    assert browser.js("document.querySelectorAll('.message').length") == 0
    browser.js("window.cut = false")
    browser.click("#notice button", "Try again")
    shows(browser, "there again")
    assert browser.js("document.querySelector('.message.user .file summary').innerText").startswith("note.txt")
    prompt = server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "a note" in prompt and "note.txt" in prompt


def test_an_answer_that_fails_midway_offers_to_go_on(browser, scripted):
    server, script = scripted
    fresh(browser, server.url + "/")
    script.says("Half of")
    say(browser, "All")
    answered(browser)
    browser.js(
        "import('/ui/store.js').then(async s => { const c = (await s.all())[0]; c.messages[1].failed = "
        "'The connection ended before the answer did.'; await s.put(c); })"
    )
    started(browser, server.url + "/")
    script.says(" it")
    browser.click(".message.assistant .problem button", "Try again")
    shows(browser, "Half of it")
    prompt = server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("Half of")


def test_a_draft_survives_a_reload(page, scripted):
    server, _ = scripted
    fresh(page, server.url + "/")
    page.type("#input", "not sent yet")
    page.wait("import('/ui/store.js').then(s => s.draftOf('new')).then(d => d?.content === 'not sent yet')")
    started(page, server.url + "/")
    page.click("#new")
    page.wait("document.querySelector('#input').value === 'not sent yet'")
    page.js("document.querySelector('#input').select()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Delete", windowsVirtualKeyCode=46)
    page.wait("import('/ui/store.js').then(s => s.draftOf('new')).then(d => !d)")


def test_invalid_settings_are_marked_and_kept(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("fine")
    say(page, "Hello there")
    answered(page)
    page.type("#setting-top_p", "1,5")
    page.wait("import('/ui/store.js').then(s => s.all()).then(all => all[0].settings.top_p === '1,5')")
    started(page, server.url + "/")
    field = "document.querySelector('#setting-top_p')"
    assert page.js(f"[{field}.value, {field}.getAttribute('aria-invalid')]") == ["1,5", "true"]
    before = len(script.requests)
    say(page, "Will this go?")
    page.wait("document.querySelector('#notice').innerText === 'Nothing was sent: top_p must be a number.'")
    assert page.js("document.activeElement.id") == "setting-top_p" and len(script.requests) == before
    assert page.js("document.querySelector('#input').value") == "Will this go?"
    page.js(f"{field}.select()")
    page.type("#setting-top_p", "0.5")
    page.click("#send")
    answered(page, 2)


def test_two_tabs_see_each_other_and_overwrite_nothing(page, browser, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("one")
    say(page, "Shared")
    answered(page)
    page.wait("import('/ui/store.js').then(s => s.all()).then(all => all[0].messages[1].finish)")
    tab = browser.tab()
    try:
        started(tab, server.url + "/")
        tab.click("#list .title", "Shared")
        script.says("two")
        say(page, "More")
        answered(page, 2)
        tab.wait("document.querySelectorAll('.message.assistant').length === 2")  # the other tab follows
        tab.js(NEWER)  # a tab that was asleep does not know the newest: both are kept
        script.says("three")
        say(page, "Again")
        answered(page, 3)
        page.wait("document.querySelector('#notice').innerText.includes('Both are kept')")
        titles = page.js("import('/ui/store.js').then(s => s.all()).then(all => all.map(c => c.title))")
        assert "Shared" in titles and "Shared (this tab)" in titles
    finally:
        tab.close()


def test_a_full_storage_is_said(browser, scripted):
    server, script = scripted
    origin = server.url.replace("127.0.0.1", "localhost")  # one of which the browser has not measured the room
    browser.call("Storage.overrideQuotaForOrigin", origin=origin, quotaSize=1000)
    try:
        fresh(browser, origin + "/")
        script.says("not kept")
        say(browser, "Store this " * 100)
        answered(browser)
        browser.wait("document.querySelector('#notice').innerText.includes('storage is full')")
        assert last(browser) == "not kept"
    finally:
        browser.call("Storage.overrideQuotaForOrigin", origin=origin)


def test_selected_text_and_opened_details_survive_the_stream(page, slow):
    server, script = slow
    fresh(page, server.url + "/")
    script.says(f"<think>\nfirst thought\n</think>\n\nStart here. {LONG}\n\n- {LONG}")
    say(page, "Select")
    page.wait("document.querySelector('.message.assistant .text')?.innerText.includes('word3')")
    page.js("document.querySelector('.thoughts summary').click()")
    assert page.js("document.querySelector('.thoughts').open") is True
    page.js(SELECT)
    answered(page)
    assert page.js("String(getSelection())") == "Start here."
    assert page.js("document.querySelector('.thoughts').open") is True and last(page, "li").endswith("word59")


def test_who_reads_further_up_stays_there(page, slow):
    """While an answer arrives, at its end, and when another version is shown."""
    server, script = slow
    fresh(page, server.url + "/")
    script.says(f"{LONG}\n\n" * 3)
    say(page, "Read")
    page.wait("document.querySelector('.message.assistant .text')?.innerText.includes('word59')")
    place = "document.querySelector('#messages').scrollTop"
    page.size(1280, 300)
    try:
        page.js(f"{place} = 20")
        answered(page)
        assert abs(page.js(place) - 20) < 5
        script.says("other")
        page.click(".message.assistant button", "Regenerate")
        answered(page)
        page.click("[aria-label='Earlier version']")
        page.js(f"{place} = 30")
        page.click(".message.user button", "Edit")
        page.click(".message.user button", "Cancel")
        assert abs(page.js(place) - 30) < 5
        script.says("the end")
        say(page, "Next")  # goes to the end
        answered(page, 2)
        box = "document.querySelector('#messages')"
        assert page.js(f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight") < 80
    finally:
        page.size(1280, 800)


def test_the_enter_that_ends_a_composition_does_not_send(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    page.type("#input", "\u65e5\u672c")
    before = len(script.requests)
    for told in ("isComposing: true", "keyCode: 229"):  # Safari tells only the code
        event = f"new KeyboardEvent('keydown', {{key: 'Enter', bubbles: true, cancelable: true, {told}}})"
        assert page.js(f"document.querySelector('#input').dispatchEvent({event})") is True
    assert len(script.requests) == before and page.js("document.querySelector('#input').value") == "\u65e5\u672c"
    page.js("import('/ui/store.js').then(s => s.removeDraft('new'))")
