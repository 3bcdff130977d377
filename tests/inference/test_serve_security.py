"""Attacks on the port of `paceline serve`."""

import base64
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_servers import ServedApi, serve_api
from pydantic import JsonValue, ValidationError

from paceline.core.server.access import MAX_BODY_BYTES
from paceline.inference.serving.refusals import RequestRefused
from paceline.inference.serving.requests import ChatFields, validated

CHAT = "/v1/chat/completions"
BODY = {"model": "one", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[ServedApi]:
    with serve_api(runs / "one") as server:
        yield server


def send(
    served: ServedApi, path: str = CHAT, body: bytes | None = None, **headers: str | None
) -> tuple[int, dict[str, object]]:
    """Send a request unchanged. Return the status and the error.

    Args:
        headers: headers, with an underscore in place of a hyphen.
    """
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.putrequest("GET" if body is None else "POST", path, skip_host=True)
    fields: dict[str, str | None] = {
        "Host": f"127.0.0.1:{served.port}",
        "Content-Type": "application/json",
        **served.headers,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    if body is not None:
        fields.setdefault("Content-Length", str(len(body)))
    for name, value in fields.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    assert not {name for name in response.headers if name.startswith("access-control")}
    content = json.loads(response.read())
    connection.close()
    return response.status, content.get("error", {})


def send_json(served: ServedApi, **fields: object) -> tuple[int, dict[str, object]]:
    return send(served, body=json.dumps({**BODY, **fields}).encode())


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/"])
@pytest.mark.parametrize("host", ["evil.example:{port}", "127.0.0.1", "192.168.1.5:{port}"])
def test_foreign_host_names_are_refused(served: ServedApi, path: str, host: str) -> None:
    body = json.dumps(BODY).encode() if path == CHAT else None
    status, error = send(served, path, body, Host=host.format(port=served.port))
    assert (status, error["code"]) == (403, "serve-foreign-host")


@pytest.mark.parametrize(
    "header",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}],
    ids=str,
)
def test_pages_of_other_sites_are_refused(served: ServedApi, header: dict[str, str]) -> None:
    status, error = send(served, "/v1/models", **header)
    assert (status, error["code"]) == (403, "serve-foreign-page")


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x"]
)
@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/docs", "/openapi.json"])
def test_requests_need_the_token(served: ServedApi, path: str, value: str | None) -> None:
    token = value and value.format(token=served.start["token"])
    body = b"{}" if path == CHAT else None
    status, error = send(served, path, body, Authorization=token)
    assert (status, error["code"]) == (401, "serve-missing-token")


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/../../etc/passwd", "/v1", "/v1/x"])
def test_there_are_no_other_routes(served: ServedApi, path: str) -> None:
    assert send(served, path)[0] == 404
    assert send(served, CHAT)[0] == 405


@pytest.mark.parametrize("name", ["../one", "..%2fone", "/etc/passwd", "Qwen/Qwen2-0.5B", "%00"])
def test_unknown_models_are_not_found(served: ServedApi, name: str) -> None:
    assert send(served, f"/v1/models/{name}")[0] == 404
    assert send_json(served, model=name)[0] == 404


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "/etc/passwd", "http://127.0.0.1:1/x.png",
        "data:text/plain;base64,AA==",
        "data:image/png,x", "data:image/png;base64,%%%", "data:image/png;base64,AAAA",
        "data:image/png;base64,{png}",
    ],
)  # fmt: skip
def test_images_are_only_those_in_the_request(served: ServedApi, url: str) -> None:
    png = base64.b64encode(
        base64.b64decode(
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
        )
    ).decode()
    part = {"type": "image_url", "image_url": {"url": url.replace("{png}", png)}}
    status, error = send_json(served, messages=[{"role": "user", "content": [part]}])
    assert status == 400
    assert "/etc" not in str(error["message"])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid-body"),
        (b"{", "invalid-body"),
        (b"[]", "not-an-object"),
        (b"\xff\xfe", "invalid-body"),
        (b'{"model": "one", "messages": [{"role": "user", "content": "\xff"}]}', "invalid-body"),
        (b'{"model": "one", "messages": [{"role": "user", "content": "\\ud800"}]}', "invalid-body"),
        (b'{"temperature": NaN}', "invalid-body"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "invalid-body"),
        (b'{"messages":' * 50_000, "invalid-body"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid-body"),
        (b'{"tools":' + b"[" * 80 + b"]" * 80 + b"}", "invalid-body"),
        (b'{"a\\u0000": 1}', "unsupported-field"),
        (b'{"model": {"$ne": 1}, "messages": []}', "invalid-field"),
        (b'{"model": "one", "messages": "x"}', "invalid-field"),
        (b'{"tools": [{' + b",".join(b'"%d": 1' % i for i in range(2000)) + b"}]}", "invalid-body"),
    ],
    ids=range(15),
)
def test_malformed_bodies_are_refused(served: ServedApi, body: bytes, code: str) -> None:
    status, error = send(served, body=body)
    assert (status, error["code"]) == (400, code)


def test_only_the_first_mistake_of_a_list_is_collected() -> None:
    content: list[JsonValue] = [1] * 10_000
    with pytest.raises(RequestRefused) as caught:
        validated(ChatFields, {"model": "one", "messages": [{"role": "user", "content": content}]})
    assert caught.value.param == "messages.0.content.0"
    mistakes = caught.value.__cause__
    assert isinstance(mistakes, ValidationError)
    assert mistakes.error_count() < 10


def test_body_needs_its_type(served: ServedApi) -> None:
    status, error = send(served, body=json.dumps(BODY).encode(), Content_Type="text/plain")
    assert (status, error["code"]) == (415, "body-without-type")


def test_large_bodies_are_refused(served: ServedApi) -> None:
    status, error = send(served, body=b"{}", Content_Length=str(MAX_BODY_BYTES + 1))
    assert (status, error["code"]) == (413, "body-too-large")
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n"
        f"Authorization: {served.headers['Authorization']}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(head.encode())
        try:
            for _ in range(MAX_BODY_BYTES // len(chunk) + 4):
                connection.sendall(chunk)
        except OSError:
            return  # the server has closed the connection
        assert b" 413 " in connection.recv(1000)


def test_server_still_answers(served: ServedApi) -> None:
    assert send_json(served)[0] == 200
