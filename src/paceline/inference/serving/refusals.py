"""Errors in the form of OpenAI's API: ``{error: {message, type, param, code}}``."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from paceline.core.errors import ConfigError, PacelineError, first_line
from paceline.core.failures import is_out_of_memory

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class RequestRefused(ConfigError):
    """A request that is not carried out.

    Args:
        http_status: the status of the HTTP response.
        param: the field of the request that is wrong, if it is one.
        retry_after_s: time after which the same request may be accepted.
    """

    def __init__(
        self,
        what: str,
        /,
        *,
        http_status: int = 400,
        param: str | None = None,
        retry_after_s: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(what, **settings)
        self.http_status, self.param, self.retry_after_s = http_status, param, retry_after_s


def unsupported_field(name: str, allowed: str | None = None) -> RequestRefused:
    """Return the refusal of a field, or of its value if some ``allowed`` ones are supported."""
    if allowed is None:
        return RequestRefused(
            "the field `{field}` is not supported",
            code="unsupported-field",
            fix="omit it",
            param=name,
            field=name,
        )
    return RequestRefused(
        "this value of `{field}` is not supported",
        code="field-value-not-supported",
        allowed="{values}",
        param=name,
        field=name,
        values=allowed,
    )


def error_body(error: Exception) -> tuple[int, dict[str, JsonValue]]:
    """Return the status and the content of the answer to a request that failed."""
    status, message, param, code = 500, "", None, "answer-failed"
    if isinstance(error, RequestRefused):
        status, param = error.http_status, error.param
    elif isinstance(error, ConfigError):
        status = 400
    if isinstance(error, PacelineError):
        message, code = error.paragraph(), error.code
    elif is_out_of_memory(error):
        message, code = "The device has too little memory for this request.", "out-of-memory"
    else:
        logger.error("a request failed: %s: %s", type(error).__name__, first_line(error))
        message = f"The answer could not be generated ({type(error).__name__})."
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    """Return the answer to a request that failed."""
    status, body = error_body(error)
    headers = {}
    if isinstance(error, RequestRefused) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status, headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception that a route raises with :func:`error_response`."""

    @app.exception_handler(PacelineError)
    async def answer_paceline_error(_: Request, error: PacelineError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
        refused = RequestRefused(
            "there is no `{method} {path}`",
            http_status=error.status_code,
            code="unknown-route",
            allowed="GET /v1/models, POST /v1/chat/completions, POST /v1/completions",
            method=request.method,
            path=request.url.path[:200],
        )
        return error_response(refused)

    @app.exception_handler(Exception)
    async def answer_unexpected_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)
