"""Response types of the server: strict JSON, and errors of one shape."""

import json
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline.core.errors import ConfigError, PacelineError, RunError


class NotFound(ConfigError):
    """The run or the file does not exist (404)."""


class Conflict(ConfigError):
    """The same request was made before and is still being carried out (409)."""


_STATUS: dict[type, int] = {NotFound: 404, Conflict: 409}


class StrictJSONResponse(JSONResponse):
    """A JSON response that every browser parses: see :func:`encode`."""

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """Return ``content`` as ASCII JSON. NaN and the infinities become null.

    File names and logs may contain lone surrogates, which only an escape sequence can carry.
    """
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(content), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def problem(status: int, error: PacelineError) -> Response:
    """Return an error response: ``{error: {code, what, allowed, fix, values}}``."""
    return StrictJSONResponse({"error": error.record()}, status_code=status)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception that a route raises with :func:`problem`."""

    @app.exception_handler(PacelineError)
    async def answer_paceline_error(_: Request, error: PacelineError) -> Response:
        return problem(_STATUS.get(type(error), 400), error)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid_request(_: Request, error: RequestValidationError) -> Response:
        mistakes = [
            f"`{'.'.join(map(str, mistake['loc'][1:])) or mistake['loc'][0]}`: {mistake['msg']}"
            for mistake in error.errors()
        ]
        invalid = ConfigError(
            "{mistakes}",
            code="invalid-request",
            fix="see /api/openapi.json",
            mistakes="; ".join(mistakes)[:2000],
        )
        return problem(422, invalid)

    @app.exception_handler(HTTPException)
    async def answer_http_error(_: Request, error: HTTPException) -> Response:
        refused = ConfigError("{reason}", code="request-refused", reason=error.detail)
        response = problem(error.status_code, refused)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def answer_unexpected_error(_: Request, error: Exception) -> Response:
        unexpected = RunError(
            "{kind}: {reason}",
            code="unexpected-in-panel",
            fix="this error was not expected; runs are not affected. Reload the page and try again",
            kind=type(error).__name__,
            reason=str(error)[:2000],
        )
        return problem(500, unexpected)
