"""Calls whose JSON has raw line breaks and tabs are calls in every dialect, for every format that is named."""

from __future__ import annotations

import dataclasses
import json

import pytest

from quire.server.request.formats import choose_formats
from tests.helpers.server.dialects import DIALECTS
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS
from tests.server.parsers.renderers import RENDERERS

ARGUMENTS = {"city": "line 1\nline\t2\r"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("lenient"), QWEN3_TOOLS)) as (server, script):
        yield server, script


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERERS)
def test_raw_line_breaks_in_arguments(pair, monkeypatch, name):
    server, script = pair
    settings = dataclasses.replace(server.state.config.server, tool_call_parser=name)
    monkeypatch.setattr(server.state, "formats", choose_formats(settings, script.tokenizer))
    text = RENDERERS[name]([("weather", ARGUMENTS)])
    raw = text.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    for dialect in DIALECTS.values():
        for stream in (False, True) if not dialect.plain else ():
            script.says(raw)
            said = dialect.ask(server.http, stream)
            assert [json.loads(call) for call in said.calls] == [ARGUMENTS] and said.content == ""
