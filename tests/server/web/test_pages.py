"""`/` and `/docs`: static, without the internet and without a key. If node is installed, the script of `/docs` runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import httpx
import pytest

from quire.server.openapi import EXAMPLES
from quire.server.web.pages import LINKS
from tests.helpers.server.running import running_server

ROOT = Path(__file__).parent.parent.parent.parent
FOLDER = ROOT / "server" / "web" / "ui"
PAGE = (FOLDER / "docs.html").read_text(encoding="utf-8")
MAX_BYTES = 250_000  # of the application, unpacked, without libraries
TEXTS = {".css", ".html", ".js", ".svg", ".webmanifest"}
DOM = r"""
// As much of a browser as the page uses. `render(node)` is the text of a tree.
class Node {
  constructor(name) { this.name = name; this.children = []; this.value = ""; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  set textContent(text) { this.children = [text]; }
}
const render = node => node instanceof Node ? node.children.map(render).join(" ") : String(node);
const byId = {};
const document = {createElement: name => new Node(name), getElementById: id => byId[id] ??= new Node(id)};
const window = {}, location = {hash: ""};
const asked = [];
const fetch = async (url, options) => {
  asked.push([url, options.headers.Authorization ?? null]);
  return options.headers.Authorization === "Bearer right"
    ? {status: 200, ok: true, json: async () => SPEC} : {status: 401, ok: false};
};
"""
STEPS = r"""
setTimeout(async () => {
  const before = render(byId.message);
  byId.key.value = "right";
  await load();
  const [after, routes, types] = [render(byId.message), render(byId.routes), render(byId.types)];
  console.log(JSON.stringify({asked, before, after, routes, types}));
});
"""


WITHOUT_A_BODY = {
    "DELETE /api/delete",
    "DELETE /v1/cache/{key}",
    "DELETE /v1/streams/{stream_id}",
    "GET /health_generate",
    "GET /ping",
    "POST /api/copy",
}
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server(model_folder):
    with running_server(model_folder, api_key=["secret"]) as server:
        yield server.wait_ready()


@pytest.mark.slow
def test_the_root_says_where_to_go(server):
    answer = server.http.get("/", headers={"accept": "application/json"})
    assert answer.status_code == 200 and answer.json() == {"message": "quire is running"} | LINKS
    assert server.http.head("/").status_code == 200
    assert server.http.get("/", headers={"accept": "*/*"}).text == "Ollama is running"
    page = server.http.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
    assert {"docs", "ui/main.js", "ui/app.css"} <= set(links)
    for link in links:  # without a key
        assert server.http.get(httpx.URL(server.url + "/").join(link)).status_code == 200


def test_the_documentation_needs_no_key_and_its_data_does(server):
    page = server.http.get("/docs")
    assert (
        page.status_code == 200
        and page.text == PAGE
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert server.http.get("/openapi.json").status_code == 401
    assert server.http.post("/docs").status_code == 401  # only the page needs no key
    assert server.http.get("/openapi.json", headers={"x-api-key": "secret"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/ui/main.js", "/ui/app.css"])
def test_the_policy_allows_no_inline_script_and_no_other_host(server, path):
    policy = server.http.get(path, headers=BROWSER).headers["content-security-policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert (
        directives["default-src"] == "'none'" and "unsafe" not in policy and "http" not in policy and "*" not in policy
    )
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert directives["require-trusted-types-for"] == "'script'" and directives["trusted-types"] == "'none'"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir() if path.suffix in TEXTS))
def test_the_files_are_complete_in_themselves(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.search(r"\burl\(|@import|<style|\sstyle=|\son\w+=\"|<script(?![^>]* src=)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    names = re.findall(r"https?://(?![(\[])[^\s\"'`/)]+", text)
    assert set(names) <= {"http://www.w3.org"}  # of the SVG namespace
    addresses = re.findall(r'(?:href|src)="([^"]+)"|from "([^"]+)"', text)
    assert not [address for address in addresses if "".join(address).startswith("/")]  # relative: below any prefix


def test_the_modules_are_asked_for_at_once():
    """Without links to them, the browser asks for each once it has read one that imports it."""
    found, todo = set(), ["main.js"]
    while todo:
        name = todo.pop()
        imported = re.findall(r'^import .* from "\./([^"]+)";', (FOLDER / name).read_text(encoding="utf-8"), re.M)
        todo += [one for one in imported if one not in found]
        found |= {*imported}
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert sorted(re.findall(r'rel="modulepreload" href="ui/([^"]+)"', text)) == sorted(found)


def test_the_application_is_small_and_installed():
    own = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in own) <= MAX_BYTES
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 600 for path in own if path.suffix in TEXTS)
    libraries = [path for path in (FOLDER / "vendor").iterdir() if path.is_dir()]
    assert all((path / "LICENSE").stat().st_size > 500 for path in libraries) and len(libraries) == 3
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"ui/*", "ui/vendor/**/*"} <= set(project["tool"]["setuptools"]["package-data"]["quire.server.web"])


def test_no_ui_leaves_the_answers_for_programs_and_docs(model_folder):
    with running_server(model_folder, ui=False) as server:
        server.wait_ready()
        assert server.http.get("/", headers=BROWSER).json() == {"message": "quire is running"} | LINKS
        assert server.http.get("/").text == "Ollama is running"
        assert server.http.get("/ui/main.js").status_code == 404
        assert server.http.get("/docs").status_code == server.http.get("/ui/docs.js").status_code == 200


def test_a_root_path_without_its_slash_leads_to_the_page(model_folder):
    with running_server(model_folder, root_path="/llm") as server:
        server.wait_ready()
        answer = server.http.get("/llm", headers=BROWSER)
        assert (
            answer.status_code == 307
            and httpx.URL(f"{server.url}/llm").join(answer.headers["location"]).path == "/llm/"
        )
        assert server.http.get("/llm/", headers=BROWSER).status_code == 200


@pytest.mark.slow
def test_server_info_has_recent_errors_and_restarts(model_folder):
    with running_server(model_folder, api_key=["one"], admin_api_key=["root"]) as server:
        server.wait_ready()
        one, root = ({"x-api-key": key} for key in ("one", "root"))
        body = {"messages": [{"role": "user", "content": "hidden"}], "temperature": 9}
        refused = server.http.post("/v1/chat/completions", json=body, headers=one)
        assert refused.status_code == 400 and server.http.get("/nowhere").status_code == 401
        assert server.http.get("/server_info", headers=one).status_code == 403
        found = server.http.get("/server_info", headers=root).json()
        assert [error["status"] for error in found["recent_errors"]] == [403, 401, 400]
        last = found["recent_errors"][-1]
        names = ("method", "route", "param", "request_id")
        expected = ["POST", "/v1/chat/completions", "temperature", refused.headers["x-request-id"]]
        assert [last[name] for name in names] == expected and "hidden" not in str(found["recent_errors"])
        assert found["restarts"]["engine"] == 0 and found["restarts"]["last"] is None
        server.state.incidents.record_death()
        assert server.http.get("/server_info", headers=root).json()["restarts"]["engine"] == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_asks_for_the_key_and_shows_every_route_and_type(server, tmp_path):
    spec = server.http.get("/openapi.json", headers={"x-api-key": "secret"}).json()
    script = (FOLDER / "docs.js").read_text(encoding="utf-8")
    (tmp_path / "page.js").write_text(f"const SPEC = {json.dumps(spec)};{DOM}{script}{STEPS}")
    shown = json.loads(
        subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, check=True).stdout
    )
    assert shown["asked"] == [["openapi.json", None], ["openapi.json", "Bearer right"]]
    assert "wants an API key" in shown["before"] and shown["after"].startswith("quire ")
    assert all(path in shown["routes"] for path in spec["paths"])
    examples = [one for methods in spec["paths"].values() for one in methods.values()]
    assert all(one["description"] in shown["routes"] for one in examples) and "Raises" not in shown["routes"]
    recorded = json.loads(EXAMPLES.read_text(encoding="utf-8"))
    empty = {route for route, example in recorded.items() if "answer" not in example}
    assert empty == WITHOUT_A_BODY and shown["routes"].count("Example of an answer (") == len(examples) - len(empty)
    assert all(part["description"] in shown["routes"] for one in examples for part in one.get("parameters", ()))
    assert all(name in shown["types"] for name in spec["components"]["schemas"])
    assert (
        "max_tokens" in shown["types"]
        and "temperature" in shown["types"]
        and "undefined" not in shown["routes"] + shown["types"]
    )
