"""`/` and `/docs`: static, without the internet and without a key. If node is installed, the page's script runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import httpx
import pytest

from quire.server.web.pages import LINKS
from tests.server.conftest import running_server

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "server" / "web" / "docs.html").read_text(encoding="utf-8")
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


@pytest.fixture(scope="module")
def server(model_folder):
    with running_server(model_folder, api_key=["secret"]) as server:
        yield server.wait_ready()


def test_the_root_says_where_to_go(server):
    answer = server.http.get("/", headers={"accept": "application/json"})
    assert answer.status_code == 200 and answer.json() == {"message": "quire is running"} | LINKS
    assert server.http.head("/").status_code == 200
    page = server.http.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    for link in re.findall(r'href="([^"]+)"', page.text):
        assert (
            server.http.get(httpx.URL(server.url + "/").join(link), headers={"x-api-key": "secret"}).status_code == 200
        )


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


def test_the_page_is_complete_in_itself():
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", PAGE)
    assert 'fetch("openapi.json"' in PAGE  # relative: works under a path prefix
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "*.html" in project["tool"]["setuptools"]["package-data"]["quire.server.web"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_asks_for_the_key_and_shows_every_route_and_type(server, tmp_path):
    spec = server.http.get("/openapi.json", headers={"x-api-key": "secret"}).json()
    script = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)[1]
    (tmp_path / "page.js").write_text(f"const SPEC = {json.dumps(spec)};{DOM}{script}{STEPS}")
    shown = json.loads(
        subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, check=True).stdout
    )
    assert shown["asked"] == [["openapi.json", None], ["openapi.json", "Bearer right"]]
    assert "wants an API key" in shown["before"] and shown["after"].startswith("quire ")
    assert all(path in shown["routes"] for path in spec["paths"])
    assert all(name in shown["types"] for name in spec["components"]["schemas"])
    assert (
        "max_tokens" in shown["types"]
        and "temperature" in shown["types"]
        and "undefined" not in shown["routes"] + shown["types"]
    )
