"""A browser, and servers for the page."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.helpers.server.running import running_server
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS
from tests.server.media.conftest import FAKE, write_seeing_model

browsers = pytest.importorskip("tests.server.web.browser", reason="needs websockets (the extra `dev`)")
Browser = browsers.Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    browser.size(1280, 800)
    yield browser
    browser.close()


@pytest.fixture
def page(browser) -> Iterator[Browser]:
    """The browser, if the test leaves no message in its console and asks no other host."""
    browser.open("about:blank")
    browser.problems.clear()
    browser.urls.clear()
    yield browser
    assert not browser.problems
    assert {urlsplit(url).hostname for url in browser.urls if not url.startswith("data:")} == {"127.0.0.1"}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("script"), QWEN3_TOOLS)) as pair:
        yield pair


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Slow, with images, behind a path and a key."""
    folder = write_seeing_model(tmp_path_factory.mktemp("seeing"))
    settings = {"api_key": ["secret"], "admin_api_key": ["root"], "root_path": "/llm", "max_model_len": "2048"}
    with running_server(folder, fake=f"{FAKE},step_delay=0.02", **settings) as server:
        yield server.wait_ready()
