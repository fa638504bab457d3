"""What the page tells of an answer: the server's figures, and how full the context is."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("websockets", reason="needs websockets (the extra `dev`)")

from tests.helpers.server.running import running_server
from tests.server.web.browser import needs_chromium
from tests.server.web.using import answered, fresh, last, say

pytestmark = [needs_chromium, pytest.mark.slow]
DELAY = 0.05


@pytest.fixture(scope="module")
def steady(model_folder):
    """A token per step of 50 ms."""
    with running_server(model_folder, fake=f"step_delay={DELAY}", max_model_len="200") as server:
        yield server.wait_ready()


def test_an_answer_in_one_piece_has_no_speed(page, scripted):
    server, script = scripted
    fresh(page, server.url + "/")
    script.says("nineteen tokens, or so", seed=1)
    say(page, "At once")
    answered(page)
    assert "tokens/s" not in last(page, ".figures") and re.match(r"\d+ tokens, ", last(page, ".figures"))


def test_speeds_are_the_servers(page, steady):
    fresh(page, steady.url + "/")
    page.js("document.querySelector('#setting-max_tokens').select()")
    page.type("#setting-max_tokens", "20")
    say(page, "word " * 20)
    answered(page)
    figures = last(page, ".figures")
    speed = float(re.search(r"([\d.]+) tokens/s, prompt", figures)[1])
    assert 5 < speed <= 1 / DELAY
    assert re.search(r"prompt [\d,.]+ tokens/s", figures) and "first token after" in figures
    page.click(".message.assistant button", "Regenerate")
    page.wait("document.querySelector('.versions') !== null")
    answered(page)
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) prompt tokens cached", last(page, ".figures")).groups())
    assert 0 < cached < prompt


def test_drafts_are_told(page, scripted):
    page.open(scripted[0].url + "/")
    usage = {"completion_tokens": 9, "prompt_tokens": 1200, "prompt_tokens_details": {"cached_tokens": 64}}
    timings = {"draft_n": 8, "draft_n_accepted": 5, "predicted_per_second": 123.4}
    answer = json.dumps({"usage": usage, "timings": timings, "finish": "length"})
    found = page.js(f"import('/ui/figures.js').then(m => m.figures({answer}))")
    expected = (
        "9 tokens, 123 tokens/s, 64 of 1,200 prompt tokens cached, 5 of 8 drafts accepted, ended by the limit of tokens"
    )
    assert found == expected


def test_the_context_is_a_bar_that_warns_near_its_end(page, steady):
    fresh(page, steady.url + "/")
    assert page.js("document.querySelector('#context').hidden") is True
    page.js("document.querySelector('#setting-max_tokens').select()")
    page.type("#setting-max_tokens", "5")
    say(page, "Hello")
    answered(page)
    words = page.js("document.querySelector('#context').innerText")
    used = int(re.match(r"(\d+) of 200 tokens of context$", words)[1])
    assert page.js("document.querySelector('#context meter').value") == used
    page.js("document.querySelector('#setting-max_tokens').select()")
    page.type("#setting-max_tokens", "120")
    say(page, "word " * 40)
    answered(page, 2)
    assert "may be cut off" in page.js("document.querySelector('#context.near').innerText")
