"""Access to the server: one ASGI middleware in front of everything else. It checks the Host and
Origin headers as the panel does, and the token."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.server.access import OwnAddress, is_same_origin, is_token
from paceline.inference.serving.refusals import RequestRefused, error_response


class ServerAccess:
    """Refuses requests of other sites and requests without the token.

    Args:
        app: the application behind it.
        own: the address that the server listens on.
        token: the token of this server; None if none is needed.
    """

    def __init__(self, app: ASGIApp, own: OwnAddress, token: str | None) -> None:
        self.app, self.own, self.token = app, own, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(Headers(scope=scope))
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers) -> RequestRefused | None:
        if not self.own.is_named_by(headers.getlist("host")):
            return RequestRefused(
                "the server does not answer requests for this host name (Host header)",
                http_status=403,
                code="serve-foreign-host",
                fix="use {address}",
                address=self.own.url,
            )
        is_own_page = is_same_origin(headers.getlist("origin"), headers["host"])
        if not is_own_page or headers.getlist("sec-fetch-site") not in (
            [],
            ["same-origin"],
            ["none"],
        ):
            return RequestRefused(
                "requests from pages of other sites are refused",
                http_status=403,
                code="serve-foreign-page",
                fix="ask from a program, not from a page",
            )
        values = headers.getlist("authorization")
        given = [value[7:] for value in values if value[:7].lower() == "bearer "]
        if self.token is None or (len(values) == 1 and is_token(given, self.token)):
            return None
        return RequestRefused(
            "the request has no valid token",
            http_status=401,
            code="serve-missing-token",
            fix="send the header `Authorization: Bearer TOKEN` with the token that"
            " `paceline serve` printed, or the one of PACELINE_API_KEY",
        )
