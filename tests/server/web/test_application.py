"""The page at `/` in a headless Chromium: chat, stop, edit, keys, images, tools, plots, text that looks like HTML."""

from __future__ import annotations

import json
import os
import runpy
import subprocess

import msgspec
import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.helpers.server.running import MODEL, poll, running_server
from tests.server.web.browser import needs_chromium
from tests.server.web.using import (
    BLOCKS,
    CUT,
    FILE,
    MARKDOWN,
    TRANSFER,
    WEATHER,
    answered,
    enter_key,
    fresh,
    last,
    say,
    started,
)

pytestmark = [needs_chromium, pytest.mark.slow]

DIRECT = os.environ | {"no_proxy": "*"}


def test_an_answer_is_markdown_and_never_html(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says(f"<think>\nhm <i>\n</think>\n\n{MARKDOWN}")
    say(page, "<b>Hello</b>\n")
    answered(page)
    count = "[...document.querySelectorAll('.message.assistant')].at(-1).querySelectorAll({}).length".format
    names = ["h3 ~ .text h3", "em", "strong em", ".text > ol > li", "li > ul > li", "blockquote", "td code", "pre code"]
    assert {name: page.js(count(json.dumps(name))) for name in names} == dict.fromkeys(names, 1) | {
        "em": 2,
        ".text > ol > li": 2,
    }
    assert page.js(count("'img, script, b, i'")) == 0 and page.js("document.title") == "quire"
    hrefs = page.js("[...document.querySelectorAll('.message.assistant a')].map(a => a.getAttribute('href'))")
    assert hrefs == ["https://example.com/a", "https://example.com/p.png"]
    assert "<script>alert(1)</script>" in last(page, "pre") and "<img src=x" in last(page)
    assert page.js("document.querySelector('.message.user .text').innerText").startswith("<b>Hello</b>")
    assert page.js("document.querySelector('.thoughts').open") is False
    assert page.js("document.querySelector('.thoughts').textContent").startswith("Thoughts")


@pytest.mark.parametrize(
    "text",
    [
        "'# a' + ' '.repeat(n) + 'b'",
        "'# a' + '#'.repeat(n) + 'b'",
        "'# a' + ' #'.repeat(n / 2) + ' b'",
        "'a' + ' '.repeat(n) + 'b'",
        "'a\\n' + ' '.repeat(n) + 'b'",
        "'[a](b' + ' '.repeat(n)",
        "'|a\\n-' + ' '.repeat(n) + 'b'",
        "'|a\\n' + ' '.repeat(n) + 'b-'",
        "'|a|\\n|' + ' '.repeat(n) + '-'.repeat(n) + 'b'",
        "'|a|\\n' + '|-'.repeat(n / 2) + 'b'",
        "'*a '.repeat(n / 3)",
        "'**a'.repeat(n / 3)",
        "'[a]('.repeat(n / 4)",
        "'`'.repeat(n) + 'b'",
        "'https://' + '.'.repeat(n)",
    ],
)
def test_what_a_looping_model_writes_is_shown_at_once(page, scripted, text):
    """A text of 50,000 characters; spaces before a letter took minutes, a heading with them hours."""
    page.open(scripted[0].url + "/")
    shown = f"({BLOCKS})((n => {text})(50000)).then(found => found.map(b => b.textContent).join('').length)"
    assert page.js(shown) > 0


def test_headings_and_tables_at_their_edges(page, scripted):
    page.open(scripted[0].url + "/")
    texts = {
        "# a": "H3 a", "## a ##": "H4 a", "#  a # b #": "H3 a # b", "#a": "P #a", "#": "P #",
        "####### a": "P ####### a",
        "|a|b|\n|-|:-:|": "DIV ab", "a|b\n-|-": "DIV ab", "|a\n-": "DIV a", "|a\n---b": "P |a\n---b",
        "|a|\n| |": "P |a|\n| |", "a  \nb": "P a<BR>b", "a\\\nb": "P a<BR>b", "a \nb": "P a \nb",
    }  # fmt: skip
    show = "b.tagName + ' ' + (b.querySelector('br') ? b.innerHTML.replaceAll('<br>', '<BR>') : b.textContent)"
    for text, expected in texts.items():
        found = page.js(f"({BLOCKS})({json.dumps(text)}).then(found => found.map(b => {show}).join('; '))")
        assert found == expected, text


def test_the_browser_itself_refuses_text_as_html(browser, scripted):
    browser.open(scripted[0].url + "/")
    found = browser.js("(() => { try { document.body.innerHTML = 'x'; } catch (e) { return e.message; } })()")
    assert "TrustedHTML" in found


def test_regenerate_edit_and_the_settings_reach_the_server(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("first")
    page.type("#system", "Be short.")
    page.type("#setting-temperature", "3")
    assert (
        page.js("document.getElementById('setting-temperature-problem').innerText") == "temperature must be at most 2."
    )
    page.js("document.getElementById('setting-temperature').select()")
    page.type("#setting-temperature", "0.5")
    say(page, "Question")
    answered(page)
    assert last(page) == "first" and script.requests[-1].sampling.temperature == 0.5
    script.says("second")
    page.click(".message.assistant button", "Regenerate")
    page.wait("document.querySelector('.message.assistant .text')?.innerText === 'second'")
    answered(page)
    script.says("third")
    page.click(".message.user button", "Edit")
    page.js("document.querySelector('.message.user textarea').select()")
    page.type(".message.user textarea", "Another")
    page.press("Enter")
    page.wait("document.querySelector('.message.assistant .text')?.innerText === 'third'")
    answered(page)
    assert page.js("document.querySelectorAll('.message').length") == 2
    prompt = server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "Be short." in prompt and "Another" in prompt and "Question" not in prompt and "first" not in prompt


def test_tools_are_shown_and_their_results_sent(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    page.type("#setting-tools", json.dumps(WEATHER))
    script.says('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    say(page, "Weather?")
    answered(page)
    assert '"city": "Rome"' in last(page, ".call pre")
    page.type(".call textarea", "sunny")
    script.says("It is sunny.")
    page.click(".call button", "Send result")
    answered(page, 2)
    assert last(page) == "It is sunny."
    prompt = server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


def test_a_request_as_a_program(page, scripted, tmp_path, capsys):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("as a program")
    say(page, 'It\'s "quoted" \\ $HOME')
    answered(page)
    body = "(await import('/ui/answer.js')).requestBody(CONVERSATION, MODEL)"
    conversation = {
        "system": "",
        "settings": {"top_k": "5"},
        "messages": [{"role": "user", "content": 'It\'s "x" \\n $HOME'}],
    }
    body = body.replace("CONVERSATION", json.dumps(conversation)).replace("MODEL", json.dumps(MODEL))
    made = page.js(
        f"(async () => {{ const m = await import('/ui/snippets.js'), b = {body}; "
        "return [m.asCurl(b), m.asPython(b)]; })()"
    )
    path = tmp_path / "request.py"
    path.write_text(made[1])
    runpy.run_path(str(path))
    assert capsys.readouterr().out == "as a program"
    done = subprocess.run(["bash", "-c", made[0]], capture_output=True, text=True, timeout=60, env=DIRECT)
    assert done.returncode == 0 and '"content":"as"' in done.stdout, done.stderr
    for request in script.requests[-2:]:
        assert request.sampling.top_k == 5
        assert 'It\'s "x" \\n $HOME' in server.state.tokenizer.decode(request.prompt_token_ids)


def test_conversations_stay_in_the_browser(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("kept")
    say(page, "Remember this")
    answered(page)
    page.wait("import('/ui/store.js').then(s => s.all()).then(all => all[0].messages[1].finish === 'stop')")
    text = page.js("import('/ui/store.js').then(async s => s.exported(await s.all()))")
    started(page, server.url + "/")
    assert last(page) == "kept"
    page.click("#list .open button[aria-label^=Delete]")
    page.click("#confirm")
    page.wait("![...document.querySelectorAll('#list .title')].some(n => n.innerText === 'Remember this')")
    found = page.js(f"import('/ui/store.js').then(s => s.parseExport({json.dumps(text)}).map(c => c.title))")
    assert "Remember this" in found
    refused = page.js(
        "import('/ui/store.js').then(s => s.parseExport('{\"conversations\": [1]}')).catch(e => e.message)"
    )
    assert refused == "This file holds no conversations of this page."


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "user", "content": 5},
        {"role": "assistant", "content": "x", "calls": 5},
        {"role": "assistant", "content": "x", "calls": [{}]},
        {"role": "assistant", "content": "x", "calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "content": "x", "reasoning": {"a": 1}},
        {"role": "user", "content": "x", "images": ["https://elsewhere/x.png"]},
        {"role": "user", "content": "x", "images": "data:image/png"},
        {"role": "tool", "content": "x", "callId": 1},
        {"role": "system onclick", "content": "x"},
        None,
    ],
)
def test_a_file_with_what_the_page_cannot_show_is_refused(page, scripted, message):
    """Once in the browser's store, it would keep the page from starting."""
    page.open(scripted[0].url + "/")
    one = {"id": "a", "title": "t", "system": "", "updated": 1, "settings": {}, "messages": []}
    assert page.js(parse_export([one])) == ["a"]
    assert page.js(parse_export([one | {"messages": [message]}])) == "This file holds no conversations of this page."
    for settings in ({"stop": 5}, {"tools": []}, "x"):
        assert page.js(parse_export([one | {"settings": settings}])).startswith("This file holds no")


def parse_export(conversations: list) -> str:
    text = json.dumps(json.dumps({"conversations": conversations}))
    return f"import('/ui/store.js').then(s => s.parseExport({text}).map(c => c.id)).catch(e => e.message)"


def test_the_key_is_asked_for_and_kept_in_memory_only(browser, seeing):
    browser.open(seeing.url + "/llm")  # leads to /llm/
    enter_key(browser, "wrong")
    browser.wait("document.querySelector('#dialog').innerText.includes('does not accept')")
    enter_key(browser, "secret")
    browser.wait("document.querySelector('#settings input') !== null && !document.querySelector('#dialog').open")
    stored = browser.js("JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "secret" not in stored and browser.js("location.pathname") == "/llm/"
    browser.open(seeing.url + "/llm/")
    browser.wait("document.querySelector('#key') !== null")
    assert all("401" in problem for problem in browser.problems)  # what the browser says of the refused requests


def test_what_administrators_see_is_asked_for_in_watch(browser, seeing):
    browser.open("about:blank")
    browser.open(seeing.url + "/llm/#watch")
    enter_key(browser, "secret")
    browser.wait("document.querySelector('.plot polyline')?.getAttribute('points')")
    browser.click("#admin button")
    enter_key(browser, "root")
    browser.wait("document.querySelector('.card dl') !== null && document.querySelector('#admin') === null")


def test_plots_of_all_requests_are_hidden_from_one_key_of_several(browser, model_folder):
    """They show once the page has the key of an administrator."""
    with running_server(model_folder, api_key=["one", "two"], admin_api_key=["root"]) as server:
        server.wait_ready()
        browser.open("about:blank")
        browser.open(server.url + "/#watch")
        enter_key(browser, "one")
        browser.wait("document.querySelector('#admin') !== null && document.querySelector('.plots').hidden")
        assert "for keys with metrics" in browser.js("document.querySelector('#admin').innerText")
        browser.click("#admin button")
        enter_key(browser, "root")
        browser.wait("document.querySelector('.card dl') !== null && !document.querySelector('.plots').hidden")
        browser.wait("document.querySelector('.plot polyline')?.getAttribute('points')")


def test_stop_an_answer_and_send_images(browser, seeing):
    browser.open(seeing.url + "/llm/")
    enter_key(browser, "secret")
    browser.wait("document.querySelector('#settings input') !== null")
    browser.problems.clear()
    browser.click("#new")
    say(browser, "Speak")
    browser.wait("document.querySelector('.message.assistant .text')?.innerText.length > 5")
    assert browser.js("document.querySelector('#send').hidden") is True
    browser.press("Escape")
    answered(browser)
    assert last(browser, ".figures").endswith("stopped")
    poll(lambda: not seeing.state.client.load)  # the engine has dropped the request
    browser.js(
        f"document.querySelector('#input').dispatchEvent(new ClipboardEvent('paste', {{clipboardData: {TRANSFER}}}))"
    )
    browser.js(
        f"document.querySelector('#conversation').dispatchEvent(new DragEvent('drop', {{dataTransfer: {TRANSFER}}}))"
    )
    browser.wait("document.querySelectorAll('#attached img').length === 2")
    browser.type("#setting-max_tokens", "3")
    say(browser, "What is this?")
    answered(browser, 2)
    assert browser.js("[...document.querySelectorAll('.message.user .images img')].map(n => n.naturalWidth)") == [4, 4]
    key = {"x-api-key": "secret"}
    metrics = seeing.http.get("/metrics", headers=key).text
    line = next(line for line in metrics.splitlines() if line.startswith("quire:prompt_image_tokens_total{"))
    assert float(line.split()[-1]) == 32 and last(browser, ".figures").startswith("3 tokens")
    assert not browser.problems


def test_images_come_back_after_a_failed_request(browser, seeing):
    browser.open(seeing.url + "/llm/")
    enter_key(browser, "secret")
    browser.wait("document.querySelector('#settings input') !== null")
    browser.click("#new")
    drop = f"document.querySelector('#conversation').dispatchEvent(new DragEvent('drop', {{dataTransfer: {TRANSFER}}}))"
    browser.js(drop)
    browser.js(drop)
    browser.wait("document.querySelectorAll('#attached img').length === 2")
    browser.js(CUT)
    say(browser, "What are these?")
    browser.wait("document.querySelector('#notice').innerText.includes('The server cannot be reached.')")
    assert browser.js("document.querySelectorAll('#attached img').length") == 2
    browser.js("window.cut = false")
    browser.type("#setting-max_tokens", "2")
    browser.click("#notice button", "Try again")
    answered(browser)
    assert browser.js("document.querySelectorAll('.message.user .images img').length") == 2


def test_a_phone_offers_its_camera(browser, scripted):
    browser.open(scripted[0].url + "/")
    browser.wait("document.querySelector('#settings input') !== null")
    shown = "getComputedStyle(document.querySelector('#camera')).display !== 'none'"
    assert browser.js(shown) is False
    browser.size(390, 844)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        assert browser.js(shown) is True
        browser.js(
            "HTMLInputElement.prototype.click = function () { "
            "window.asked = ['accept', 'capture', 'multiple'].map(name => this.getAttribute(name)); "
            "const data = new DataTransfer(); " + f"data.items.add({FILE}); this.files = data.files; "
            "this.dispatchEvent(new Event('change')); }; 0"
        )
        browser.click("#camera")
        assert browser.js("window.asked") == ["image/*", "environment", ""]
        browser.wait("document.querySelector('#notice').innerText.startsWith('This model takes no images: ')")
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
        browser.size(1280, 800)


def test_a_long_prompt_shows_how_far_it_is_read(page, model_folder):
    with running_server(model_folder, fake="step_delay=0.1", max_num_batched_tokens=16) as server:
        server.wait_ready()
        fresh(page, server.url + "/")
        page.js(
            "window.seen = []; new MutationObserver(() => { const bar = document.querySelector('progress'); "
            "if (bar) seen.push([bar.value, bar.max]); }).observe(document.body, {childList: true, subtree: true})"
        )
        page.type("#setting-max_tokens", "2")
        say(page, "word " * 150)
        answered(page)
        seen = page.js("window.seen")
        assert (
            len(seen) > 1
            and seen == sorted(seen)
            and seen[0][0] < seen[0][1]
            and len({total for _, total in seen}) == 1
        )
        assert page.js("document.querySelector('progress')") is None


def test_plots_move_and_facts_are_shown(page, scripted, monkeypatch):
    server, _ = scripted
    state, before = server.state, server.state.ready
    plan = msgspec.structs.replace(before.worker.plan, total=2**30, weights=2**20, kv_cache=2**28)
    choices = [("max_num_seqs", "8", "<b>default</b>")]
    worker = msgspec.structs.replace(before.worker, plan=plan, choices=choices)
    monkeypatch.setattr(state, "ready", msgspec.structs.replace(before, worker=worker))
    started(page, server.url + "/#watch")
    points = "document.querySelector('.plot polyline').getAttribute('points').split(' ').length"
    page.wait(f"document.querySelector('.plot polyline')?.getAttribute('points') && {points} === 1")
    generated = server.state.metrics._counters
    generated["generation_tokens"] += 1000
    page.wait(f"{points} >= 2")
    rate = page.js("document.querySelectorAll('.plot')[1].querySelector('output').innerText.replaceAll(',', '')")
    assert 100 < float(rate) < 1000  # 1000 tokens in about two seconds
    assert page.js("document.querySelectorAll('.plot').length") == 7
    page.wait("document.querySelector('.bar') !== null")
    parts = page.js("[...document.querySelectorAll('.bar span')].map(n => n.title)")
    assert {"weights: 1.0 MiB", "KV cache: 256.0 MiB"} <= set(parts)
    widths = page.js("[...document.querySelectorAll('.bar span')].map(n => n.offsetWidth)")
    assert widths[parts.index("KV cache: 256.0 MiB")] > 20 * widths[parts.index("weights: 1.0 MiB")]
    rows = page.js("[...document.querySelectorAll('.card tbody tr')].map(r => r.innerText.split('\\t'))")
    assert ["max_num_seqs", "8", "<b>default</b>"] in rows


def test_percentiles_equal_numpy_within_a_bucket(page, scripted):
    import numpy

    from quire.server.metrics.metrics import Metrics

    server, _ = scripted
    page.open(server.url + "/")
    metrics = Metrics("m", 512)
    seconds = numpy.random.default_rng(0).exponential(0.2, 500)
    for value in seconds:
        metrics._histograms["time_to_first_token_seconds"].observe(value)
    text = metrics.render().decode()
    bounds = metrics._histograms["time_to_first_token_seconds"].bounds
    for part in (0.5, 0.95, 0.99):
        found = page.js(
            "import('/ui/prometheus.js').then(m => m.quantile(m.parse("
            f"{json.dumps(text)}), null, 'quire:time_to_first_token_seconds', {part}))"
        )
        expected = numpy.quantile(seconds, part)
        assert numpy.searchsorted(bounds, found) == numpy.searchsorted(bounds, expected)


def test_a_narrow_page_has_no_sideways_scroll_and_its_panels_open(page, scripted):
    server, _ = scripted
    page.size(360, 640)
    try:
        started(page, server.url + "/")
        assert page.js("document.documentElement.scrollWidth") <= 360
        assert page.js("getComputedStyle(document.querySelector('#settings')).display") == "none"
        page.click("#open-settings")
        assert page.js("getComputedStyle(document.querySelector('#settings')).display") == "block"
        page.js("location.hash = '#watch'")
        page.wait("document.querySelector('.card dl') !== null")
        assert page.js("document.documentElement.scrollWidth") <= 360
    finally:
        page.size(1280, 800)


def test_docs_run_under_the_policy(page, scripted):
    server, _ = scripted
    page.open(server.url + "/docs")
    page.wait("document.querySelectorAll('details').length > 50")
