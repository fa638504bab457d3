"""The request that the log suggests is answered by the model that is served."""

from __future__ import annotations

import logging
import re
import shlex

import pytest

from quire.engine.messages import PoolingInfo
from quire.server.startup.hints import curl_line, example
from tests.helpers.server.running import poll, running_server, write_model_folder

CASES = {
    "/v1/chat/completions": (None, True),
    "/v1/completions": (None, False),
    "/v1/embeddings": (PoolingInfo(["embed"], "mean", 8, generates=False), False),
    "/v1/rerank": (PoolingInfo(["classify"], "cls", 0, labels=["yes"], generates=False), False),
    "/classify": (PoolingInfo(["classify"], "cls", 0, labels=["a", "b"], generates=False), False),
}


@pytest.mark.parametrize("path", CASES)
def test_the_example_fits_the_model(path):
    assert example(*CASES[path])[0] == path
    line = shlex.split(curl_line("curl", "http://h:1", *CASES[path], with_key=True))
    assert line[1] == f"http://h:1{path}" and "Authorization: Bearer KEY" in line


@pytest.mark.parametrize("frontends", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_base_model_is_told_to_complete(tmp_path, caplog, frontends):
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with (
        caplog.at_level(logging.INFO),
        running_server(str(folder), api_server_count=frontends),
    ):
        poll(lambda: "try: " in caplog.text, 30)
    (line,) = re.findall(r"try: curl (.*)", caplog.text)
    assert "/v1/completions" in line and "/v1/chat" not in line
