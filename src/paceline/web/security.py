"""Who may ask for what: one ASGI middleware before everything else.

- A page of another site must not reach the panel by a name of its own that leads here (DNS
  rebinding): Host is checked.
- Nor by a request from the user's browser: Origin is checked, and whatever changes something needs
  a header that no other site can set.
- Bound to more than this machine, reading needs the token too.
"""

import hmac
import ipaddress
import re
import socket
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.web.binding import is_loopback
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
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
_WILDCARD = {"0.0.0.0", "::", ""}
#: Of a request's body; an upload has a limit of its own.
MAX_BODY_BYTES = 8 << 20
_UPLOAD = "/api/upload"


class SecurityMiddleware:
    """Refuses what the module says, limits bodies, and puts the security headers on every answer.

    Args:
        host: that the server is bound to.
        port: likewise.
        token: of this server.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, token: str) -> None:
        self.app, self.host, self.port, self.token = app, host.lower(), port, token
        self.cookie = f"paceline-token-{port}"
        self.open_reading = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        answer = HeaderInjector(send, self._cookie_for(scope), scope["path"])
        refused = self._refusal(scope, headers)
        if refused is not None:
            status, what, fix = refused
            await problem(status, what, fix=fix)(scope, receive, answer)
            return
        if scope["path"] != _UPLOAD:
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > MAX_BODY_BYTES:
                await problem(413, "the request is too large", f"at most {MAX_BODY_BYTES:,} bytes")(
                    scope, receive, answer
                )
                return
            receive = _limited(receive)
        await self.app(scope, receive, answer)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str, str] | None:
        if not self._host_known(headers.getlist("host")):
            names = "localhost" if self.open_reading else self.host
            return (
                403,
                "this name leads to the panel but is not its own (Host)",
                f"open http://{names}:{self.port}/",
            )
        origins = [origin.lower() for origin in headers.getlist("origin")]
        address = f"http://{headers['host'].lower()}"
        if origins not in ([], [address]):
            what = "a page of another site asked for this (Origin)"
            return 403, what, f"open {address}/ itself"
        api = scope["path"].startswith("/api")
        if api and headers.getlist("sec-fetch-site") not in ([], ["same-origin"], ["none"]):
            what = "a page of another site asked for this (Sec-Fetch-Site)"
            return 403, what, f"open {address}/ itself"
        writes = scope["method"] not in ("GET", "HEAD")
        if writes and not self._is_token(headers.getlist(TOKEN_HEADER)):
            return (
                401,
                "whatever starts, stops or writes needs the token",
                "open the link that `paceline ui` printed",
            )
        if api and not writes and not self.open_reading and not self._may_read(headers):
            return (
                401,
                "reading over the network needs the token",
                "open the link that `paceline ui` printed",
            )
        return None

    def _host_known(self, values: list[str]) -> bool:
        match = _HOST.fullmatch(values[0]) if len(values) == 1 else None
        if match is None or int(match[2] or 80) != self.port:
            return False
        name = match[1].lower()
        if name == self.host or name == f"[{self.host}]":
            return self.host not in _WILDCARD
        if self.open_reading:
            return name in _LOOPBACK
        # Bound to all addresses: any of them, as a number; a site cannot have its name lead to a
        # number.
        host_name = socket.gethostname().lower()
        names = _LOOPBACK | {host_name, f"{host_name}.local"}
        return self.host in _WILDCARD and (name in names or _is_address(name))

    def _may_read(self, headers: Headers) -> bool:
        cookies = cookie_parser("; ".join(headers.getlist("cookie")))
        values = [cookies[self.cookie]] if self.cookie in cookies else []
        return self._is_token(headers.getlist(TOKEN_HEADER)) or self._is_token(values)

    def _is_token(self, values: list[str]) -> bool:
        return len(values) == 1 and hmac.compare_digest(values[0].encode(), self.token.encode())

    def _cookie_for(self, scope: Scope) -> str | None:
        """The cookie that the link of the start gives to a browser, which sends it where a page can
        set no header."""
        if scope["type"] != "http" or scope["path"] != "/" or self.open_reading:
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        right = self._is_token(query.get("token", []))
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict" if right else None


class HeaderInjector:
    """``send`` that adds the headers which an answer has not set itself."""

    def __init__(self, send: Send, cookie: str | None, path: str) -> None:
        self._send, self._cookie, self._path = send, cookie, path

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            is_api = self._path.startswith("/api")
            headers.setdefault("cache-control", "no-store" if is_api else "no-cache")
            if self._cookie:
                headers.append("set-cookie", self._cookie)
        await self._send(message)


def _limited(receive: Receive) -> Receive:
    left = MAX_BODY_BYTES

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        # Of a body that told no length: the rest is as if the client had gone.
        return {"type": "http.disconnect"} if left < 0 else message

    return limited


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
