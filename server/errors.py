"""Every error that the API returns, in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

ApiError
+-- BadRequest            400  the client can correct it; `param` names the field by its dotted path
|   +-- ContextLengthExceeded  code context_length_exceeded
+-- Unauthorized          401  code invalid_api_key
+-- Forbidden             403  a Host header, route or model that is not allowed
+-- NotFound              404  code model_not_found, or none for a route
+-- RequestTimeout        408  the request's time has passed before it could begin; code timeout
+-- Conflict              409  the state of the server does not allow it, such as a name in use
+-- PayloadTooLarge       413
+-- UnsupportedMediaType  415
+-- TooManyRequests       429  a limit of the caller's own; code rate_limit_exceeded, or insufficient_quota for a spent
|                              budget; carries Retry-After
+-- EngineError           500  the engine failed this request
+-- NotInstalled          501  a package that this route needs is missing
+-- Unavailable           503  loading, full, draining or dead; carries Retry-After
+-- GatewayTimeout        504  a deadline has passed before the first token
+-- InsufficientStorage   507  the disk is full; code storage_full
"""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A response with a status other than 200.

    The client sees `message`: it must not contain tracebacks, paths or addresses of the server.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.param, self.code)


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """A prompt of `num_tokens` or more, where `limit` is the most that prompt and output may have."""

    code = "context_length_exceeded"

    def __init__(self, message: str, num_tokens: int, limit: int, *, param: str):
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.limit = limit


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(ApiError):
    status = 403
    type = "invalid_request_error"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class RequestTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "timeout"


class GatewayTimeout(ApiError):
    status = 504
    code = "timeout"


class Conflict(ApiError):
    status = 409
    type = "invalid_request_error"


class PayloadTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"


class UnsupportedMediaType(ApiError):
    status = 415
    type = "invalid_request_error"


class TooManyRequests(ApiError):
    """`retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 1):
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after
        self.limits: dict[str, str] = {}  # headers that tell the caller's limits

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after)}


class InsufficientStorage(ApiError):
    status = 507
    code = "storage_full"


class EngineError(ApiError):
    status = 500
    code = "engine_error"


class NotInstalled(ApiError):
    status = 501
    code = "not_installed"


class Unavailable(ApiError):
    """`retry_after` is in seconds, None until it is known; `code` is model_loading, overloaded, queue_timeout,
    shutting_down or engine_dead.
    """

    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, code: str | None = None, retry_after: int | None = 1):
        super().__init__(message, code=code)
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after or 1)}


def error_object(message: str, type: str, param: str | None = None, code: str | None = None) -> dict:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_body(message: str, type: str, param: str | None = None, code: str | None = None) -> bytes:
    return msgspec.json.encode(error_object(message, type, param, code))
