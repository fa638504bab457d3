"""The routes of OpenAI's API, and those that read its chat requests."""

from __future__ import annotations

from quire.server.api.openai import batches, files, objects, protocol, render, tokens
from quire.server.api.openai.audio import fields as audio
from quire.server.api.openai.audio.objects import Transcription, VerboseTranscription
from quire.server.api.openai.audio.transcriptions import transcriptions, translations
from quire.server.api.openai.chat import chat_completions
from quire.server.api.openai.completions import completions
from quire.server.api.openai.embeddings import EmbeddingList, EmbeddingRequest, embeddings
from quire.server.api.openai.protocol import ChatCompletionRequest
from quire.server.api.openai.responses.table import CONVERSATIONS, RESPONSES
from quire.server.api.openai.streams import resume_stream, stop_stream
from quire.server.http.route import EMPTY, EVENTS, Route, page

GENERATION = [
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        ChatCompletionRequest,
        objects.ChatCompletion,
        stream=EVENTS,
    ),
    Route("POST", "/v1/completions", completions, protocol.CompletionRequest, objects.Completion, stream=EVENTS),
    Route("POST", "/v1/embeddings", embeddings, EmbeddingRequest, EmbeddingList),
]
_STREAMS = [
    Route("GET", "/v1/streams/{stream_id}", resume_stream, stream=EVENTS),
    Route("DELETE", "/v1/streams/{stream_id}", stop_stream, answer=EMPTY, status=204),
]
_TEXTS = (Transcription, VerboseTranscription)
_FILES = [
    Route("POST", "/v1/files", files.create_file, files.UPLOAD, files.FileObject),
    Route(
        "GET",
        "/v1/files",
        files.list_files,
        answer=files.FileList,
        query=page(10_000, order=True) | {"purpose": {"type": "string"}},
    ),
    Route("GET", "/v1/files/{file_id}", files.retrieve_file, answer=files.FileObject),
    Route("DELETE", "/v1/files/{file_id}", files.delete_file, answer=files.FileDeleted),
    Route("GET", "/v1/files/{file_id}/content", files.file_content, answer=files.BYTES),
]
_AUDIO = [
    Route("POST", "/v1/audio/transcriptions", transcriptions, audio.FORM, _TEXTS, stream=EVENTS),
    Route("POST", "/v1/audio/translations", translations, audio.FORM, _TEXTS, stream=EVENTS),
]
_BATCHES = [
    Route("POST", "/v1/batches", batches.create_batch, batches.BatchRequest, batches.BatchObject),
    Route("GET", "/v1/batches", batches.list_batches, answer=batches.BatchList, query=page(100)),
    Route("GET", "/v1/batches/{batch_id}", batches.retrieve_batch, answer=batches.BatchObject),
    Route("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, answer=batches.BatchObject),
]
_PROMPTS = [
    Route("POST", "/v1/chat/completions/render", render.render, ChatCompletionRequest, render.RenderedPrompt),
    Route(
        "POST",
        "/v1/completions/render",
        render.render_texts,
        protocol.CompletionRequest,
        list[render.RenderedPrompt],
    ),
    Route("POST", "/apply-template", render.apply_template, ChatCompletionRequest, render.AppliedTemplate),
    Route("POST", "/tokenize", tokens.tokenize, protocol.TokenizeRequest, objects.TokenizeResponse),
    Route("POST", "/detokenize", tokens.detokenize, protocol.DetokenizeRequest, objects.DetokenizeResponse),
]
ROUTES = [*GENERATION, *_STREAMS, *RESPONSES, *CONVERSATIONS, *_AUDIO, *_FILES, *_BATCHES, *_PROMPTS]
