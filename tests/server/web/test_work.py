"""Daily use: colours, formulas, search, presets, editors, files, tokens, comparison, export, MCP servers."""

from __future__ import annotations

import base64
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.helpers.server.running import running_server
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS
from tests.server.web.browser import Browser, needs_chromium
from tests.server.web.using import answered, fresh, last, say, started

pytestmark = [needs_chromium, pytest.mark.slow]
RICH = r"""Code:

```python
def add(a, b):
    return a + b  # <b>
```

```mermaid
graph TD; A --> B
```

Inline $e^{i\pi} = -1$ and \(x^2\), but not $5 and $10, nor `$x$`.

$$
\int_0^1 x \, dx = \frac{1}{2}
$$

| a | b |
|---|---|
| WIDE | 2 |
"""


def ask(page: Browser, url: str, script, question: str, text: str) -> None:
    fresh(page, url + "/")
    script.says(text)
    say(page, question)
    answered(page)


def attach(page: Browser, name: str, data: bytes, kind: str) -> None:
    raw = base64.b64encode(data).decode()
    file = f"new File([Uint8Array.from(atob('{raw}'), c => c.charCodeAt(0))], '{name}', {{type: '{kind}'}})"
    page.js(
        f"(() => {{ const data = new DataTransfer(); data.items.add({file}); document.querySelector('#conversation')"
        ".dispatchEvent(new DragEvent('drop', {dataTransfer: data})); })()"
    )


def prompt_of(server, request) -> str:
    return server.state.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def pdf(text: str) -> bytes:
    """A PDF of one page, with a table of its objects."""
    content = b"BT /F1 24 Tf 72 700 Td (%b) Tj ET" % text.encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    start = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n" + table
    return out + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start


def test_code_has_colours_and_formulas_are_set(page, scripted):
    server, script = scripted
    page.open("about:blank")
    ask(page, server.url, script, "Plain", "no code here")
    assert not [url for url in page.urls if "/vendor/" in url]  # nothing is loaded without need
    ask(page, server.url, script, "Rich", RICH.replace("WIDE", "wide_" * 60))
    page.wait("document.querySelector('.text .hl-keyword')?.innerText === 'def'")
    page.wait("document.querySelectorAll('.text .math .katex').length === 3")
    assert (
        page.js("document.querySelector('figure.code code').textContent") == "def add(a, b):\n    return a + b  # <b>"
    )
    assert page.js("document.querySelectorAll('.text .math .katex-display').length") == 1
    assert "not $5 and $10, nor $x$" in last(page)
    assert page.js("[...document.querySelectorAll('figure.code code')].at(-1).innerText") == "graph TD; A --> B"
    page.wait("document.fonts.check('16px KaTeX_Main')")
    wide = "document.querySelector('.text .wide')"
    assert page.js(f"{wide}.scrollWidth > {wide}.clientWidth")  # the table scrolls, not the page
    assert page.js("document.documentElement.scrollWidth") <= 1280


def test_search_rename_and_pin(page, scripted):
    server, script = scripted
    for question, answer in (("Alpha", "about whales"), ("Beta", "about violins")):
        ask(page, server.url, script, question, answer)
    titles = "[...document.querySelectorAll('#list .title')].map(n => n.innerText)"
    page.type("#search", "WHALES about")
    page.wait(f"JSON.stringify({titles}) === '[\"Alpha\"]'")
    page.js("document.querySelector('#search').select()")
    page.type("#search", "no such words")
    page.wait("document.querySelector('#list ul').innerText === 'None has these words.'")
    page.js("(s => { s.value = ''; s.dispatchEvent(new Event('input')); })(document.querySelector('#search'))")
    page.click("[aria-label='More for: Alpha']")
    page.click("#list .menu[open] button", "Pin")
    page.wait(f"{titles}[0] === '📌 Alpha'")
    page.click("[aria-label='More for: Alpha']")
    page.click("#list .menu[open] button", "Rename")
    page.js("document.querySelector('#title').select()")
    page.type("#title", "Gamma")
    page.press("Enter")
    page.wait(f"{titles}[0] === '📌 Gamma'")
    page.wait("import('/ui/store.js').then(s => s.all()).then(all => all[0].title === 'Gamma' && all[0].pinned)")
    started(page, server.url + "/")
    assert page.js(titles)[:2] == ["📌 Gamma", "Beta"]
    page.click("#list .title", "Gamma")
    script.says("more")
    say(page, "More")
    answered(page, 2)
    assert page.js(titles)[0] == "📌 Gamma"  # the title stays
    page.click("#list .open summary")
    page.click("#list .menu[open] button", "Unpin")


def test_continue_and_edit_an_answer(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("One two", finish_reason="length")
    say(page, "Count")
    answered(page)
    script.says(" three")
    page.click(".message.assistant button", "Continue")
    page.wait("[...document.querySelectorAll('.message.assistant .text')].at(-1)?.innerText === 'One two three'")
    assert prompt_of(server, script.requests[-1]).endswith("One two")
    answered(page)
    page.click(".message.assistant button", "Edit")
    page.js("document.querySelector('.message.assistant textarea').select()")
    page.type(".message.assistant textarea", "Uno dos")
    page.click(".message.assistant button", "Save")
    page.wait("document.querySelector('.message.assistant .text')?.innerText === 'Uno dos'")
    assert page.js("document.querySelector('.message.assistant .versions span').innerText") == "2 / 2"
    script.says("tres")
    say(page, "Next")
    answered(page, 2)
    assert "Uno dos" in prompt_of(server, script.requests[-1])


def test_texts_and_pdfs_are_read_in_the_browser(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    attach(page, "notes.md", "# Notes\n\nNaïve ideas".encode(), "text/markdown")
    attach(page, "paper.pdf", pdf("Deep results"), "application/pdf")
    page.wait("document.querySelectorAll('#attached .file').length === 2")
    attach(page, "data.bin", b"\xff\xfe\x00", "application/octet-stream")
    page.wait("document.querySelector('#notice').innerText === 'data.bin is neither an image nor a text in UTF-8.'")
    attach(page, "broken.pdf", b"%PDF-1.4 nothing", "application/pdf")
    page.wait("document.querySelector('#notice').innerText.startsWith('broken.pdf cannot be read: ')")
    script.says("read")
    say(page, "Summarize")
    answered(page)
    prompt = prompt_of(server, script.requests[-1])
    assert "File notes.md:\n\n# Notes\n\nNaïve ideas" in prompt and "File paper.pdf:\n\nDeep results" in prompt
    assert prompt.index("Deep results") < prompt.index("Summarize")


def test_the_model_is_chosen_among_those_listed(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    options = "[...document.querySelector('#model').options].map(o => o.value)"
    listed = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert page.js(options) == listed and len(listed) > 1
    page.js(
        f"(s => {{ s.value = {json.dumps(listed[1])}; s.dispatchEvent(new Event('change')); }})(document.querySelector('#model'))"  # noqa: E501
    )
    script.says("as another")
    say(page, "Who?")
    answered(page)
    page.click(".message.assistant button", "Request")
    assert f'"model": "{listed[1]}"' in page.js("document.querySelector('#dialog').innerText")
    page.click("#dialog button", "Close")
    page.wait(
        f"import('/ui/store.js').then(s => s.all()).then(all => all[0].settings.model === {json.dumps(listed[1])})"
    )
    started(page, server.url + "/")
    assert page.js("document.querySelector('#model').value") == listed[1]


def test_presets_keep_a_system_prompt_and_settings(page, scripted):
    server, _ = scripted
    fresh(page, server.url + "/")
    for field, text in (("#system", "Be a poet."), ("#setting-temperature", "1.3")):
        page.js(f"document.querySelector('{field}').select()")
        page.type(field, text)
    page.click(".presets button", "Keep as preset")
    page.type("#preset-name", "Poet")
    page.press("Enter")
    page.wait("[...document.querySelector('.presets select').options].some(o => o.value === 'Poet')")
    started(page, server.url + "/")
    page.click("#new")
    page.js("document.querySelector('#system').select()")
    page.type("#system", "Be plain.")
    page.wait("[...document.querySelector('.presets select').options].some(o => o.value === 'Poet')")
    page.js(
        "(s => { s.value = 'Poet'; s.dispatchEvent(new Event('change')); })(document.querySelector('.presets select'))"
    )
    page.wait("document.querySelector('#system').value === 'Be a poet.'")
    assert page.js("document.querySelector('#setting-temperature').value") == "1.3"


def test_tools_and_schemas_are_edited_as_forms(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    fill = "(n, v) => { n.value = v; n.dispatchEvent(new Event('change')); }"
    page.js("(t => { t.value = ''; t.dispatchEvent(new Event('input')); })(document.querySelector('#setting-tools'))")
    page.click("[aria-label='Edit as a form: tools']")
    page.click(".editor button", "Add tool")
    page.click(".editor fieldset button", "Add field")
    page.js(
        f"(f => {{ const [name, about, field, text] = document.querySelectorAll('.editor fieldset > label > :last-child, .editor .fields input:not([type])'); "  # noqa: E501
        f"f(name, 'weather'); f(about, 'Tells the weather'); f(field, 'city'); f(text, 'A city'); }})({fill})"
    )
    page.click(".editor button", "Use")
    tools = json.loads(page.js("document.querySelector('#setting-tools').value"))
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city"}},
        "required": ["city"],
    }
    function = {"name": "weather", "description": "Tells the weather", "parameters": parameters}
    assert tools == [{"type": "function", "function": function}]
    # what a form has no words for stays
    odd = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"odd": odd}, "required": [], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    page.js("document.querySelector('#setting-response_format').select()")
    page.type("#setting-response_format", json.dumps(given))
    page.click("[aria-label='Edit as a form: response_format']")
    page.click(".editor button", "Use")
    assert json.loads(page.js("document.querySelector('#setting-response_format').value")) == given
    page.js(
        "(t => { t.value = ''; t.dispatchEvent(new Event('input')); })(document.querySelector('#setting-response_format'))"  # noqa: E501
    )
    script.says("done")
    say(page, "Use it")
    answered(page)
    assert "Tells the weather" in prompt_of(server, script.requests[-1])


def test_tokens_show_their_alternatives(page, model_folder):
    with running_server(model_folder) as server:
        server.wait_ready()
        fresh(page, server.url + "/")
        page.type("#setting-max_tokens", "4")
        page.type("#setting-top_logprobs", "3")
        say(page, "Odds?")
        answered(page)
        page.click(".message.assistant button", "Tokens")
        assert page.js("document.querySelectorAll('.token').length") == 4
        page.js("document.querySelector('.token').dispatchEvent(new MouseEvent('mouseenter'))")
        rows = page.js("[...document.querySelectorAll('.alternatives tr')].map(r => r.cells[1].innerText)")
        assert 1 <= len(rows) <= 4 and all(0 <= float(row.split()[0]) <= 100 for row in rows)
        page.click("#dialog button", "Close")


def test_two_answers_side_by_side(page, scripted):
    server, script = scripted
    started(page, server.url + "/#compare")
    page.wait("document.querySelectorAll('.sides section').length === 2")
    page.js("document.querySelectorAll('.sides details').forEach(d => { d.open = true; })")
    for side, value in (("left", "0.1"), ("right", "0.9")):
        page.js(f"document.querySelector('#{side}-setting-temperature').select()")
        page.type(f"#{side}-setting-temperature", value)
    script.says("compared")
    before = len(script.requests)
    page.type(".question textarea", "Which is better?")
    page.click(".question button", "Ask both")
    page.wait("[...document.querySelectorAll('.sides .text')].map(n => n.innerText).join() === 'compared,compared'")
    page.wait("!document.querySelector('.question [type=submit]').hidden")
    assert sorted(one.sampling.temperature for one in script.requests[before:]) == [0.1, 0.9]
    page.js("location.hash = '#chat'")
    found = page.wait(
        "(l => l.length === 2 && l)([...document.querySelectorAll('#list .title')].filter(n => n.innerText.startsWith('Which is better?')).map(n => n.innerText))"  # noqa: E501
    )
    assert len(found) == 2  # both are conversations now


def test_export_as_markdown_and_print(page, scripted):
    server, script = scripted
    ask(page, server.url, script, "Export me", "<think>\nhm\n</think>\n\nSome `code`")
    page.wait("import('/ui/store.js').then(s => s.all()).then(all => all[0].messages[1].finish)")
    text = page.js(
        "Promise.all([import('/ui/store.js'), import('/ui/export.js')]).then(async ([s, e]) => e.asMarkdown((await s.all())[0]))"  # noqa: E501
    )
    assert (
        text == "# Export me\n\n" + text.partition("\n\n")[2]
        and "## You\n\nExport me\n\n## Model\n\n> hm\n\nSome `code`\n" in text
    )
    page.js("window.print = () => { window.printed = document.title; }")
    page.click("#list .open summary")
    page.click("#list .menu[open] button", "Print")
    assert page.js("window.printed") == "quire"
    paper = page.call("Page.printToPDF")["data"]
    assert len(paper) > 1000
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js("getComputedStyle(document.querySelector('#composer')).display") == "none"
    page.call("Emulation.setEmulatedMedia", media="")


# ---- MCP


class Mcp(BaseHTTPRequestHandler):
    """A server of the Model Context Protocol with one tool; it answers calls in a stream of events. `results`: other
    ones, by method.
    """

    results: ClassVar[dict] = {}

    def answer(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        self.send_response(status)
        for name, value in {
            "Access-Control-Allow-Origin": self.headers.get("Origin", ""),
            "Access-Control-Allow-Headers": "content-type, mcp-session-id, mcp-protocol-version",
            "Access-Control-Expose-Headers": "mcp-session-id",
            "Mcp-Session-Id": "session-1",
            "Content-Type": kind,
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_OPTIONS(self) -> None:
        self.answer(204)

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "id" not in message:
            return self.answer(202)
        if message["method"] != "initialize" and self.headers["Mcp-Session-Id"] != "session-1":
            return self.answer(404)
        if message["method"] in self.results:
            result = self.results[message["method"]]
        else:
            result = self.own(message)
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
        if message["method"] == "tools/call":
            return self.answer(200, b"event: message\ndata: " + body + b"\n\n", "text/event-stream")
        return self.answer(200, body)

    def own(self, message: dict) -> dict:
        if message["method"] == "initialize":
            return {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
        if message["method"] == "tools/list":
            return {"tools": [{"name": "root", "description": "A root", "inputSchema": {"type": "object"}}]}
        return {"content": [{"type": "text", "text": str(math.sqrt(message["params"]["arguments"]["of"]))}]}

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def mcp() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mcp)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_tools_of_an_mcp_server_that_the_setting_allows(page, mcp, tmp_path):
    with scripted_server(write_folder(tmp_path, QWEN3_TOOLS), ui_mcp_origins=[mcp]) as (server, script):
        fresh(page, server.url + "/")
        page.type("#mcp", "http://127.0.0.1:1/mcp")
        page.click("#mcp-connect")
        page.wait(
            f"document.querySelector('#settings [role=status]').innerText === 'http://127.0.0.1:1/mcp is at no origin that the server allows: {mcp}.'"  # noqa: E501
        )
        page.js("document.querySelector('#mcp').select()")
        page.type("#mcp", f"{mcp}/mcp")
        page.click("#mcp-connect")
        page.wait("document.querySelector('#settings [role=status]').innerText === '1 tools.'")
        script.says('<tool_call>\n{"name": "root", "arguments": {"of": 16}}\n</tool_call>')
        say(page, "The root of 16?")
        answered(page)
        assert "A root" in prompt_of(server, script.requests[-1])
        page.click(".call button", "Run")
        page.wait("document.querySelector('.call textarea').value === '4.0'")
        script.says("It is 4.")
        page.click(".call button", "Send result")
        answered(page, 2)
        assert "<tool_response>\n4.0\n</tool_response>" in prompt_of(server, script.requests[-1])


def test_what_an_mcp_server_says_is_text_and_its_tools_are_listed_once(page, mcp, tmp_path, monkeypatch):
    """Also after a reload, when the tools of before are still in the settings."""
    odd = "<img src=x onerror=\"document.title='broken'\">"
    tools = [{"name": odd, "description": odd, "inputSchema": {"type": "object"}}, {"name": "root", "inputSchema": {}}]
    told = "document.querySelector('#settings [role=status]').innerText"
    with running_server(write_folder(tmp_path, QWEN3_TOOLS), ui_mcp_origins=[mcp]) as server:
        fresh(page, server.wait_ready().url + "/")
        monkeypatch.setitem(Mcp.results, "tools/list", {"tools": tools})
        page.type("#mcp", f"{mcp}/mcp")
        page.click("#mcp-connect")
        page.wait(f"{told} === '2 tools.'")
        made = {"id": "mcp", "title": "mcp", "created": 1, "updated": 9e15, "revision": 0, "system": ""}
        made |= {"settings": {"tools": page.js("document.querySelector('#setting-tools').value")}}
        call = {"id": "c", "function": {"name": odd, "arguments": "{}"}}
        made |= {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "calls": [call]}]}
        page.js(f"import('/ui/store.js').then(s => s.put({json.dumps(made)}))")
        started(page, server.url + "/")
        page.click("#list .title", "mcp")
        assert page.js(told) == "Not connected."
        page.click("#mcp-connect")
        page.wait(f"{told} === '2 tools.'")
        assert len(json.loads(page.js("document.querySelector('#setting-tools').value"))) == 2
        for result, text in (({"content": [{"type": "text", "text": odd}]}, odd), ({"content": 5}, None), (5, "null")):
            monkeypatch.setitem(Mcp.results, "tools/call", result)
            page.js("document.querySelector('.call textarea').value = ''")
            page.click(".call button", "Run")
            found = (
                "document.querySelector('.call textarea').value || document.querySelector('.call .problem').innerText"
            )
            expected = text or f"The answer of {mcp}/mcp is no message of the protocol."
            page.wait(f"({found}) === {json.dumps(expected)}")
        for result in (5, {"tools": [{"name": 1}]}, {}):
            monkeypatch.setitem(Mcp.results, "tools/list", result)
            page.click("#mcp-connect")
            page.wait(f"{told} === 'The answer of {mcp}/mcp is no message of the protocol.'")
        assert page.js("document.title") == "quire"
        page.js("import('/ui/store.js').then(s => s.remove('mcp'))")


def test_a_comparison_goes_on_after_a_reload(page, scripted):
    server, script = scripted
    script.says("word " * 100)
    script.pause = 0.02
    try:
        started(page, server.url + "/#compare")
        page.wait("document.querySelectorAll('.sides section').length === 2")
        page.type(".question textarea", "Both at once")
        before = len(script.requests)
        page.click(".question button", "Ask both")
        page.wait(
            "[...document.querySelectorAll('.sides .text')].filter(n => n.innerText.includes('word')).length === 2"
        )
        started(page, server.url + "/")
        titles = "[...document.querySelectorAll('#list .title')].filter(n => n.innerText.startsWith('Both at once'))"
        for i in range(2):
            page.js(f"{titles}[{i}].click()")
            page.wait("document.querySelector('.message.assistant .text')?.innerText.trim().length === 499")
        assert len(script.requests) == before + 2
    finally:
        script.pause = 0.0


def test_many_conversations_are_searched_without_being_read_again(page, scripted):
    """Fifty of 100,000 characters; rows stay the nodes they were, with the focus in them."""
    server, _ = scripted
    page.open(server.url + "/")
    page.js(
        "import('/ui/store.js').then(async s => { for (let i = 0; i < 50; i++) await s.put({...s.fresh(), "
        "id: `many ${i}`, title: `Many ${i}`, named: true, "
        "messages: [{role: 'user', content: `question${i} `.repeat(9000)}]}); })"
    )
    try:
        started(page, server.url + "/")
        rows = "[...document.querySelectorAll('#list li')].filter(n => n.textContent.startsWith('Many'))"
        page.wait(f"{rows}.length === 50")
        page.js(
            "window.read = 0; window.first = document.querySelector('#list li'); "
            "const lower = String.prototype.toLowerCase; String.prototype.toLowerCase = function () { "
            "if (this.length > 1000) window.read++; return lower.call(this); }; 0"
        )
        page.type("#search", "question3")
        page.wait(f"{rows}.length === 11")
        read = page.js("window.read")
        page.type("#search", "7")
        page.wait(f"{rows}.length === 1")
        assert page.js("window.read") == read <= 60
        page.js("(s => { s.value = ''; s.dispatchEvent(new Event('input')); })(document.querySelector('#search'))")
        page.wait(f"{rows}.length === 50")
        assert page.js("document.querySelector('#list li') === window.first") is True
    finally:
        page.js("import('/ui/store.js').then(async s => { for (let i = 0; i < 50; i++) await s.remove(`many ${i}`); })")


def test_an_import_leaves_an_answer_that_arrives_alone(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("word " * 100)
    script.pause = 0.02
    try:
        say(page, "Meanwhile")
        page.wait("document.querySelector('.message.assistant .text')?.innerText.includes('word')")
        one = {"id": "imported", "title": "Imported", "system": "", "updated": 1, "settings": {}, "messages": []}
        one["messages"] = [{"role": "user", "content": "from a file"}]
        text = json.dumps(json.dumps({"conversations": [one]}))
        page.js(
            "HTMLInputElement.prototype.click = function () { const data = new DataTransfer(); "
            f"data.items.add(new File([{text}], 'a.json')); this.files = data.files; "
            "this.dispatchEvent(new Event('change')); }; 0"
        )
        page.click("#list button", "Import")
        page.wait("[...document.querySelectorAll('#list .title')].some(n => n.innerText === 'Imported')")
        answered(page)
        assert last(page).strip() == "word " * 99 + "word"
        page.js("import('/ui/store.js').then(s => s.remove('imported'))")
    finally:
        script.pause = 0.0


def test_no_mcp_server_is_allowed_by_default(page, scripted):
    started(page, scripted[0].url + "/")
    assert page.js("document.querySelector('#mcp')") is None
