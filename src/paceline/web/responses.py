"""How the server answers: JSON that every browser reads, and errors of one shape."""

import json
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline.core.errors import ConfigError, PacelineError


class NotFound(ConfigError):
    """There is no such run or file (404)."""


class Conflict(ConfigError):
    """It was asked for already (409)."""


_STATUS: dict[type, int] = {NotFound: 404, Conflict: 409}


class StrictJSONResponse(JSONResponse):
    """JSON without NaN and the infinities (they are null), and without a character that UTF-8 has
    not."""

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """As JSON text. Only ASCII: file names and logs may hold lone surrogates, which nothing else
    can carry."""
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_plain(content), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def problem(status: int, what: str, allowed: str | None = None, fix: str | None = None) -> Response:
    """An error as every route gives it: ``{error: {what, allowed, fix}}``."""
    return StrictJSONResponse(
        {"error": {"what": what, "allowed": allowed, "fix": fix}}, status_code=status
    )


def add_handlers(app: FastAPI) -> None:
    """Have every error that a handler raises answered by :func:`problem`."""
    app.add_exception_handler(PacelineError, _paceline)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _paceline(_: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return problem(_STATUS.get(type(error), 400), error.what, error.allowed, error.fix)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = [
        f"`{'.'.join(str(part) for part in one['loc'][1:]) or one['loc'][0]}`: {one['msg']}"
        for one in error.errors()
    ]
    return problem(422, "; ".join(wrong)[:2000], fix="see /api/openapi.json")


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = problem(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


async def _unexpected(_: Request, error: Exception) -> Response:
    return problem(
        500,
        f"{type(error).__name__}: {error}"[:2000],
        fix="this was not expected; the runs are not touched",
    )
