"""/v1/files: uploads, which batches read, and the output of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Literal

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.server.api import needs
from quire.server.batches.disk import or_full
from quire.server.batches.runner import Batches
from quire.server.batches.store import File
from quire.server.errors import ApiError, BadRequest, PayloadTooLarge
from quire.server.http.bodies.form import MAX_FORM_BYTES, declared_size, read_form
from quire.server.http.caller import caller
from quire.server.http.numbers import bounded_int
from quire.server.http.paging import ends, owner, page_size
from quire.server.http.read_body import require_deliberate
from quire.server.http.sse import JsonResponse

MAX_FILE_BYTES = 200 << 20
MAX_BODY_BYTES = MAX_FILE_BYTES + MAX_FORM_BYTES
MAX_NAME = 256
BYTES, PART_BYTES = "application/octet-stream", 1 << 18  # per part of content
PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
MIN_LIFE, MAX_LIFE = 3600, 30 * 86400  # seconds
UPLOAD = {
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": list(PURPOSES)},
                },
            }
        }
    },
    "required": True,
}


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


async def create_file(request: Request, state: needs.Batches) -> Response:
    """Store an upload. Raises BadRequest, NotInstalled, PayloadTooLarge, UnsupportedMediaType, InsufficientStorage,
    ClientGone.
    """
    batches, who = state.require_batches(), owner(request)
    require_deliberate(request)
    if (size := declared_size(request, MAX_BODY_BYTES, _too_large)) is None:
        size = min(await batches.run(batches.store.free_bytes, who), MAX_BODY_BYTES)
    await batches.run(batches.store.hold, size, who)
    try:
        with or_full():  # for the temporary file of the form
            form = await read_form(request, size, lambda: _no_room(size), "A file, with the fields file and purpose,")
        return await _store(request, form, batches, size)
    finally:
        batches.store.release(size, who)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"A file may have at most {MAX_FILE_BYTES} bytes.")


def _no_room(size: int) -> ApiError:
    """Return the error for a body of more than the `size` bytes reserved for it."""
    if size == MAX_BODY_BYTES:
        return _too_large()
    return BadRequest(
        f"The file has more than the {size} bytes of --batch-disk that are free for you: delete files that are no "
        "longer needed.",
        param="file",
        code="storage_full",
    )


async def _store(request: Request, form: FormData, batches: Batches, size: int) -> Response:
    try:
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise BadRequest("Missing required parameter: file.", param="file", code="missing_required_parameter")
        if purpose not in PURPOSES:
            raise BadRequest(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
        name = (upload.filename or "file").replace("/", "_")[:MAX_NAME]
        file = await batches.add_file(upload.file, caller(request), purpose, name, _life(form), size)
    finally:
        await form.close()
    return JsonResponse(_file_object(file))


def _life(form: FormData) -> int | None:
    """Return seconds until the file expires; None if never."""
    given = form.get("expires_after[seconds]")
    return None if given is None else bounded_int(given, MIN_LIFE, MAX_LIFE, "expires_after[seconds]")


async def list_files(request: Request, state: needs.Batches) -> Response:
    """List the caller's files, newest first unless `order` is asc."""
    batches, query = state.require_batches(), request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc.", param="order")
    limit = page_size(request, 10_000)
    files = await batches.run(
        batches.store.files, owner(request), query.get("purpose"), query.get("after"), limit + 1, order == "asc"
    )
    shown = [_file_object(file) for file in files[:limit]]
    return JsonResponse(FileList(data=shown, has_more=len(files) > limit, **ends(shown)))


async def retrieve_file(request: Request, state: needs.Batches) -> Response:
    """Return the metadata of a file."""
    return JsonResponse(_file_object(await _file(request, state)))


async def file_content(request: Request, state: needs.Batches) -> Response:
    """Return the bytes of a file."""
    batches, file = state.require_batches(), await _file(request, state)
    content = await batches.run(batches.store.open, file.id)
    return StreamingResponse(_parts(content), media_type=BYTES, headers={"content-length": str(file.bytes)})


def _parts(content: BinaryIO) -> Iterator[bytes]:
    with content:
        while part := content.read(PART_BYTES):
            yield part


async def delete_file(request: Request, state: needs.Batches) -> Response:
    """Forget a file that no unfinished batch reads."""
    batches, file_id = state.require_batches(), request.path_params["file_id"]
    await batches.run(batches.store.delete_file, file_id, owner(request))
    return JsonResponse(FileDeleted(id=file_id))


async def _file(request: Request, state: needs.Batches) -> File:
    batches = state.require_batches()
    return await batches.run(batches.store.file, request.path_params["file_id"], owner(request))


def _file_object(file: File) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at,
        filename=file.filename,
        purpose=file.purpose,
        expires_at=file.expires_at,
    )
