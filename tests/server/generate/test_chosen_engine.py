"""The engine that X-data-parallel-rank names, in the requests of vectors and audio."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from quire.engine.messages import AddRequest, EngineOutput, PoolingParams, SamplingParams
from quire.server.errors import BadRequest
from quire.server.generate import pooling
from quire.server.generate.transcription import Transcription, TranscriptionSpec
from quire.server.http.caller import set_caller
from quire.server.http.request_options import reserve_room
from quire.server.keys.caller import Caller
from quire.server.media.audio.service import Piece
from quire.server.request.generation_request import GenerationRequest
from tests.helpers.server.scripted import Stream

NAME = "X-data-parallel-rank"


def pooled(engine: int | None) -> GenerationRequest:
    return GenerationRequest("1", [5], SamplingParams(max_tokens=0), pooling=PoolingParams(), engine=engine)


def test_a_prompt_of_vectors_goes_there():
    sent: list[AddRequest] = []

    class Outputs(Stream):
        def __aiter__(self):
            return self

    def generate(request: AddRequest) -> Outputs:
        sent.append(request)
        return Outputs([EngineOutput(request.request_id, [], "stop", pooled=b"\0\0\0\0")])

    state = SimpleNamespace(client=SimpleNamespace(generate=generate), metrics=None)
    asyncio.run(pooling.run(state, [pooled(1), pooled(None)]))
    assert [request.engine for request in sent] == [1, None]


def test_pieces_of_audio_go_there():
    lease = SimpleNamespace(medium=SimpleNamespace(parts=[SimpleNamespace(key="k", path="p")]))
    speech = SimpleNamespace(lease=lambda piece: lease, require=lambda: SimpleNamespace(languages={}, positions=4))
    spec = TranscriptionSpec(base=pooled(1))
    audio = Transcription(SimpleNamespace(speech=speech), spec, None)
    assert audio._request(Piece(0.0, 1.0, lease), [1], SamplingParams()).engine == 1


@pytest.mark.parametrize("rank", ["2", "-1", "x"])
def test_a_wrong_number_is_refused_for_every_kind_of_request(rank):
    config = SimpleNamespace(parallel=SimpleNamespace(data_parallel_size=2))
    request = Request({"type": "http", "headers": [(NAME.lower().encode(), rank.encode())]})
    set_caller(request.scope, Caller("r"))
    with pytest.raises(BadRequest, match="between 0 and 1") as refused:
        reserve_room(request, SimpleNamespace(config=config), [pooled(None)], "input")
    assert refused.value.param == NAME
