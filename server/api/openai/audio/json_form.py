"""A transcription asked for in JSON, as a line of a batch is: the fields of the form, and the file as a data URL in
`file_url` (vLLM's name) or `url` (Groq's).
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import FormData, UploadFile

from quire.server.errors import BadRequest
from quire.server.media.loading import sources

if TYPE_CHECKING:
    from quire.server.values import Json

MAX_BYTES = 16 << 20  # of the body, as of a line of a batch
_NAMES = ("file_url", "url")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def form_of(body: bytes) -> FormData:
    """Return the form that a body represents. Raises BadRequest."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a JSON object: {error}") from None
    if "file" in fields:
        raise BadRequest("file needs a form; in JSON send file_url, a data: URL.", param="file")
    name = next((one for one in _NAMES if fields.get(one) is not None), None)
    if name is None:
        raise BadRequest("Missing required parameter: file_url.", param="file_url", code="missing_required_parameter")
    data = _content(fields.pop(name), name)
    upload = UploadFile(io.BytesIO(data), size=len(data), filename="audio")
    items = [item for key, value in fields.items() for item in _items(key, value)]
    return FormData([("file", upload), *items])


def _content(url: object, param: str) -> bytes:
    if not isinstance(url, str) or not url.startswith("data:"):
        raise BadRequest(f"{param} must be a data: URL, such as data:audio/wav;base64,...", param=param)
    try:
        return sources.from_data_url(url, MAX_BYTES, ("audio", "video"))
    except ValueError as error:
        raise BadRequest(f"{param}: the audio cannot be used: {error}.", param=param) from None


def _items(name: str, value: Json) -> list[tuple[str, str]]:
    """Return the form fields of a value: several for a list, none for null."""
    if value is None:
        return []
    if isinstance(value, list):
        return [item for one in value for item in _items(name, one)]
    return [(name, value if isinstance(value, str) else msgspec.json.encode(value).decode())]
