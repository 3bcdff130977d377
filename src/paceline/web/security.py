"""Access control: one ASGI middleware in front of everything else.

- The Host header is checked, so that a page of another site cannot reach the panel through a name
  of its own that resolves to this machine (DNS rebinding).
- The Origin header is checked, and every request that changes something needs a header that no
  other site can set, so that such a page cannot use the user's browser either.
- If the server listens on more than the loopback interface, reading needs the token too.
"""

from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import ConfigError
from paceline.core.server.access import MAX_BODY_BYTES, OwnAddress, is_same_origin, is_token
from paceline.web.responses import problem

TOKEN_HEADER = "x-paceline-token"
CSP = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_USE_LINK = "open the link that `paceline ui` printed"
#: Uploads have a limit of their own.
_UPLOAD = "/api/upload"


class SecurityMiddleware:
    """Refuses requests by the rules above, limits request bodies, and adds the security headers.

    Args:
        app: the application behind it.
        host: the address that the server listens on.
        port: the port that the server listens on.
        token: the token of this server.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, token: str) -> None:
        self.app, self.token, self.own = app, token, OwnAddress(host, port)
        self.cookie = f"paceline-token-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        send = HeaderInjector(send, self._new_cookie(scope), scope["path"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await problem(*refusal)(scope, receive, send)
            return
        if scope["path"] != _UPLOAD:
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > MAX_BODY_BYTES:
                too_large = ConfigError(
                    "the request body has {size} bytes",
                    code="request-too-large",
                    allowed="at most {limit} bytes",
                    size=f"{int(length):,}",
                    limit=f"{MAX_BODY_BYTES:,}",
                )
                await problem(413, too_large)(scope, receive, send)
                return
            receive = _limited(receive)
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, ConfigError] | None:
        """Return the status and the error of the answer to a request that is refused."""
        if not self.own.is_named_by(headers.getlist("host")):
            return 403, ConfigError(
                "the panel does not serve requests for this host name (Host header)",
                code="foreign-host",
                fix="open {address}",
                address=self.own.url,
            )
        address = f"http://{headers['host'].lower()}"
        if not is_same_origin(headers.getlist("origin"), headers["host"]):
            return 403, _foreign_page("Origin", address)
        is_api = scope["path"].startswith("/api")
        if is_api and headers.getlist("sec-fetch-site") not in ([], ["same-origin"], ["none"]):
            return 403, _foreign_page("Sec-Fetch-Site", address)
        has_token = is_token(headers.getlist(TOKEN_HEADER), self.token)
        if scope["method"] not in ("GET", "HEAD"):
            text = "starting, stopping and writing require the token"
            error = ConfigError(text, code="missing-token", fix=_USE_LINK)
            return None if has_token else (401, error)
        cookies = cookie_parser("; ".join(headers.getlist("cookie")))
        can_read = has_token or is_token([cookies.get(self.cookie, "")], self.token)
        if is_api and not self.own.is_private and not can_read:
            text = "reading over the network requires the token"
            return 401, ConfigError(text, code="missing-token-to-read", fix=_USE_LINK)
        return None

    def _new_cookie(self, scope: Scope) -> str | None:
        """Return the cookie to set when the link with the token is opened. The browser sends it
        with the requests for which a page cannot set a header."""
        if scope["path"] != "/" or self.own.is_private:
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if not is_token(query.get("token", []), self.token):
            return None
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def _foreign_page(header: str, address: str) -> ConfigError:
    return ConfigError(
        "requests from pages of other sites are refused ({header} header)",
        code="foreign-page",
        fix="open {address}/ itself",
        header=header,
        address=address,
    )


class HeaderInjector:
    """A ``send`` that adds the headers which a response does not set itself."""

    def __init__(self, send: Send, cookie: str | None, path: str) -> None:
        self._send, self._cookie, self._path = send, cookie, path

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault(
                "cache-control", "no-store" if self._path.startswith("/api") else "no-cache"
            )
            if self._cookie:
                headers.append("set-cookie", self._cookie)
        await self._send(message)


def _limited(receive: Receive) -> Receive:
    left = MAX_BODY_BYTES

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        # A body without Content-Length that grows too long ends as if the client had disconnected.
        return {"type": "http.disconnect"} if left < 0 else message

    return limited
