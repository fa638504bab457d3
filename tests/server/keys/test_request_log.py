"""--enable-log-requests, --middleware and --log-config-file on real servers."""

from __future__ import annotations

import json
import logging

import pytest

from quire.configs.log_format import apply_log_config, read_log_config
from quire.server.added_middleware import load_middleware
from tests.helpers.server.running import MODEL, running_server

BODY = {"model": MODEL, "prompt": "the secret plan", "max_tokens": 3, "stop": ["hidden word"], "temperature": 0.5}


class Marker:
    """An ASGI middleware that notes paths in a header, and answers one path itself."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marker", scope["path"].encode())]
            await send(message)

        await self.app(scope, receive, marked)


async def refuse(request, call_next):
    from starlette.responses import PlainTextResponse

    if "x-refuse" in request.headers:
        return PlainTextResponse("not today", 418)
    return await call_next(request)


def not_async(request, call_next):
    return None


@pytest.fixture(scope="module")
def server(model_folder):
    paths = [f"{__name__}.Marker", f"{__name__}.refuse"]
    settings = {"middleware": paths, "enable_log_requests": True, "max_log_len": 4, "api_key": ["k"]}
    with running_server(model_folder, **settings) as running:
        running.wait_ready()
        yield running


def lines_of(caplog, level):
    return [one.getMessage() for one in caplog.records if one.name == "quire.requests" and one.levelno == level]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_logged_without_its_content(server, caplog, stream):
    with caplog.at_level(logging.INFO, "quire.requests"):
        headers = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
        assert server.http.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers).status_code == 200
    (line,) = lines_of(caplog, logging.INFO)
    assert "mine" in line and "/v1/completions" in line and "temperature=0.5" in line and "max_tokens=3" in line
    assert "secret" not in caplog.text and "hidden" not in caplog.text


def test_debug_lines_have_the_beginning_of_the_prompt(server, caplog):
    with caplog.at_level(logging.DEBUG, "quire.requests"):
        assert server.http.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer k"}).is_success
    (line,) = lines_of(caplog, logging.DEBUG)
    assert "prompt: 'the ', prompt_token_ids: [" in line and line.count(",") == 1 + 3 and "secret" not in line


def test_middleware_is_around_all_routes(server):
    assert server.http.get("/health").headers["x-marker"] == "/health"
    refused = server.http.get("/v1/models", headers={"X-Refuse": "1"})  # before the key is asked for
    assert (refused.status_code, refused.text) == (418, "not today")
    assert server.http.get("/v1/models").status_code == 401
    answer = server.http.post("/v1/completions", json=BODY | {"stream": True}, headers={"Authorization": "Bearer k"})
    assert answer.text.rstrip().endswith("[DONE]") and answer.headers["x-marker"] == "/v1/completions"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("refuse", "must be an import path"),
        ("no.such.module", "cannot be imported: ModuleNotFoundError"),
        (f"{__name__}.nothing", "cannot be imported: AttributeError"),
        (f"{__name__}.not_async", "must be a class or an async function"),
    ],
)
def test_bad_middleware_is_named(path, message):
    with pytest.raises(ValueError, match=f"--middleware {path}: {message}"):
        load_middleware([path])


def test_a_log_configuration_for_vllm_works(tmp_path, capsys):
    path = tmp_path / "log.json"
    config = {
        "version": 1,
        "formatters": {"f": {"class": "vllm.logging_utils.NewLineFormatter", "format": "own %(name)s %(message)s"}},
        "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f", "stream": "ext://sys.stdout"}},
        "loggers": {"uvicorn.access": {"handlers": ["h"], "level": "WARNING", "propagate": False}},
    }
    path.write_text(json.dumps(config))
    access = logging.getLogger("quire.access")
    saved = access.handlers, access.level, access.propagate
    try:
        apply_log_config(str(path))
        access.info("left out")
        access.warning("shown")
        assert capsys.readouterr().out == "own quire.access shown\n"
        assert not logging.getLogger("quire.requests").disabled
    finally:
        access.handlers, access.level, access.propagate = saved
    assert read_log_config(str(path))["formatters"]["f"] == {"format": "own %(name)s %(message)s"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "Expecting"), ("[]", "must be a JSON object"), ("{}", "version"), (None, "No such file"),
     ('{"version": 1, "handlers": {"h": {"class": "no.Such"}}}', "handler 'h'")],
)  # fmt: skip
def test_bad_log_configurations_are_named(tmp_path, text, message):
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--log-config-file {path}: .*{message}"):
        apply_log_config(str(path))
