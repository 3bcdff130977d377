"""Test that the panel rejects requests from other sites, with other host names, paths out of the
folder, links and wrong tokens."""

import http.client
import json
import os
import socket
from pathlib import Path

import pytest
from event_logs import begin, finished
from panels import serve_panel

from paceline.core.server.access import MAX_BODY_BYTES


def send_request(
    port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> http.client.HTTPResponse:
    """Send a request unchanged. An underscore in the name of a header stands for a hyphen."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    fields = {
        "Host": f"127.0.0.1:{port}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    if body is not None:
        fields.setdefault("Content-Length", str(len(body)))
    for name, value in fields.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    response.text = response.read().decode("utf-8", errors="replace")
    connection.close()
    return response


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("panel")
    finished(folder / "output" / "one")
    (folder / "secret.txt").write_text("SECRET")
    with serve_panel(folder / "output") as served:
        yield served


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"]
)
def test_accepts_names_of_the_local_machine(served, host):
    assert (
        send_request(
            served.panel.port, "/api/runs", Host=host.format(port=served.panel.port)
        ).status
        == 200
    )


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:{port}", "localhost.evil.example:{port}", "127.0.0.1.evil.example:{port}",
        "127.0.0.1:1", "127.0.0.1", "", "localhost:{port}@evil.example", "192.168.1.5:{port}",
        "0.0.0.0:{port}", "127.0.0.1:{port}0", "[::1:{port}", "127.0.0.1:{port}\x00",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/runs", "/app.js"])
def test_rejects_foreign_host_names(served, host, path):
    response = send_request(served.panel.port, path, Host=host.format(port=served.panel.port))
    assert response.status in (400, 403)  # 400: uvicorn rejects malformed host names
    assert "one" not in response.text or response.status == 403
    assert "<script" not in response.text


def test_rejects_two_host_headers(served):
    port = served.panel.port
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        lines = (
            f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: evil.example\r\nConnection:"
            " close\r\n\r\n"
        )
        connection.sendall(lines.encode())
        assert connection.recv(100).split(b" ")[1] in (b"400", b"403")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "https://127.0.0.1:{port}",
        "http://localhost:{port}",
        "http://127.0.0.1:1",
        "",
    ],
)
@pytest.mark.parametrize(
    "request_line", ["GET /api/runs", "PUT /api/runs/x/note", "POST /api/start", "GET /"]
)
def test_rejects_other_origins_even_with_the_token(served, origin, request_line):
    port = served.panel.port
    method, path = request_line.split(" ")
    body = b"{}" if method != "GET" else None
    response = send_request(
        port,
        path,
        method,
        body,
        Origin=origin.format(port=port),
        X_Paceline_Token=served.panel.token,
    )
    assert response.status == 403
    assert "Origin" in json.loads(response.text)["error"]["what"]


def test_rejects_cross_site_requests(served):
    assert send_request(served.panel.port, "/api/runs", Sec_Fetch_Site="cross-site").status == 403
    assert send_request(served.panel.port, "/api/runs", Sec_Fetch_Site="same-origin").status == 200
    # A link on another page may open the panel.
    assert send_request(served.panel.port, "/", Sec_Fetch_Site="cross-site").status == 200


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("token", [None, "", "wrong", "{token}x", "{short}", "\xff", "{token}\xff"])
def test_writing_needs_the_token(served, method, token):
    value = token and token.format(token=served.panel.token, short=served.panel.token[:-1])
    headers = {} if value is None else {"X_Paceline_Token": value}
    port, id = served.panel.port, served.find_run_id()
    response = send_request(
        port,
        f"/api/runs/{id}/note",
        method,
        b'{"note": "x"}',
        Content_Type="application/json",
        **headers,
    )
    assert response.status == 401
    assert not (served.panel.folder / ".paceline-ui.json").exists()


def test_writing_rejects_the_token_in_url_or_cookie(served):
    id, token = served.find_run_id(), served.panel.token
    cookie = {
        "Cookie": f"paceline-token-{served.panel.port}={token}",
        "Content_Type": "application/json",
    }
    response = send_request(
        served.panel.port, f"/api/runs/{id}/note?token={token}", "PUT", b'{"note": "x"}', **cookie
    )
    assert response.status == 401


def test_local_reading_needs_no_token(served):
    assert send_request(served.panel.port, "/api/runs").status == 200
    assert (
        "set-cookie" not in send_request(served.panel.port, f"/?token={served.panel.token}").headers
    )


def test_reading_over_the_network_needs_the_token(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path, host="0.0.0.0")
    port, token = served.panel.port, served.panel.token
    for path in ("/api/runs", "/api/openapi.json", "/api/stream", "/api/machine"):
        assert send_request(port, path).status == 401, path
        assert send_request(port, path, X_Paceline_Token="wrong").status == 401
        assert send_request(port, path, Cookie=f"paceline-token-{port}=wrong").status == 401
        assert send_request(port, f"{path}?token={token}").status == 401
    assert send_request(port, "/").status == 200  # the page itself is public
    assert send_request(port, "/api/runs", X_Paceline_Token=token).status == 200
    assert "set-cookie" not in send_request(port, "/?token=wrong").headers
    cookie = send_request(port, f"/?token={token}").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert send_request(port, "/api/runs", Cookie=cookie.split(";")[0]).status == 200
    assert (
        send_request(port, "/api/start", "POST", b"{}", Cookie=cookie.split(";")[0]).status == 401
    )


def test_open_address_accepts_ip_addresses_and_rejects_foreign_names(serve, tmp_path):
    served = serve(tmp_path, host="0.0.0.0")
    port, token = served.panel.port, served.panel.token
    names = {
        "192.168.1.5": 200,
        "localhost": 200,
        socket.gethostname(): 200,
        "evil.example": 403,
        "0.0.0.0.evil.example": 403,
    }
    for name, status in names.items():
        assert (
            send_request(port, "/api/runs", Host=f"{name}:{port}", X_Paceline_Token=token).status
            == status
        ), name


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt", "/../../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt",
        "/%2e%2e%2fsecret.txt", "/..%5csecret.txt",
        "/css/../../../secret.txt", "/%252e%252e/secret.txt", "//etc/passwd", "/etc/passwd", "/%00",
        "/css/%2e%2e/%2e%2e/app.py",
        "/../app.py", "/../__init__.py", "/api/runs/..%2f..%2fsecret.txt",
        "/api/runs/../secret.txt", "/api/runs/..%2fone/config",
        "/api/runs/%2e%2e/config", "/api/runs//config", "/api/runs/one/config",
        "/api/runs/one%2fevents.jsonl", "/.paceline-ui.json",
    ],
)  # fmt: skip
def test_no_path_leaves_the_folder(served, path):
    response = send_request(served.panel.port, path)
    assert response.status in (400, 404, 405), response.status
    assert "SECRET" not in response.text
    assert "root:" not in response.text


def test_does_not_follow_links_in_a_run(serve, tmp_path):
    run = finished(tmp_path / "output" / "one")
    (tmp_path / "secret.txt").write_text("SECRET: 1")
    for name in ("config.yaml", "report.html", "report.json", "console.log", "panel.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "secret.txt")
    served = serve(tmp_path / "output")
    id = served.find_run_id()
    for route in ("", "/config", "/report", "/log", "/series", "/csv"):
        assert "SECRET" not in send_request(served.panel.port, f"/api/runs/{id}{route}").text
    assert send_request(served.panel.port, f"/api/runs/{id}/config").status == 404


def test_run_replaced_by_a_link_is_not_found(serve, tmp_path):
    finished(tmp_path / "outside")
    run = finished(tmp_path / "output" / "one")
    served = serve(tmp_path / "output")
    id = served.find_run_id()
    os.rename(run, tmp_path / "moved")
    run.symlink_to(tmp_path / "outside")
    for route in ("", "/config", "/report", "/series"):
        assert send_request(served.panel.port, f"/api/runs/{id}{route}").status == 404


def test_notes_are_not_written_through_a_link(serve, tmp_path):
    finished(tmp_path / "output" / "one")
    target = tmp_path / "notes.json"
    target.write_text('{"runs": {}}')
    (tmp_path / "output/.paceline-ui.json").symlink_to(target)
    served = serve(tmp_path / "output")
    served.client.put(
        f"/api/runs/{served.find_run_id()}/note", json={"note": "x"}, headers=served.with_token
    )
    assert target.read_text() == '{"runs": {}}'


def test_every_response_has_security_headers(served):
    id = served.find_run_id()
    for path in (
        "/",
        "/app.js",
        "/api/runs",
        "/api/runs/none",
        f"/api/runs/{id}/config",
        "/nothing",
    ):
        headers = send_request(served.panel.port, path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy, path
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
    refused = send_request(served.panel.port, "/", Host="evil.example")
    assert "content-security-policy" in refused.headers


def test_report_is_sandboxed(served):
    response = send_request(served.panel.port, f"/api/runs/{served.find_run_id()}/report")
    assert response.status == 200
    policy = response.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts;")
    assert "allow-same-origin" not in policy
    assert "default-src 'none'" in policy


def test_names_and_logs_are_returned_as_json(serve, tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    log = begin(
        tmp_path / evil, strategy=evil, config={"task": "</script><script>alert(1)</script>"}
    )
    log.notice(evil)
    served = serve(tmp_path)
    id = served.find_run_id(evil)
    for path in ("/api/runs", f"/api/runs/{id}", f"/api/runs/{id}/log", f"/api/runs/{id}/series"):
        assert send_request(served.panel.port, path).headers["content-type"] == "application/json"
    response = send_request(
        served.panel.port,
        "/api/runs/<script>alert(1)</script>".replace("<", "%3C").replace(">", "%3E"),
    )
    assert response.headers["content-type"] == "application/json"


def test_rejects_too_large_bodies(served):
    port, id = served.panel.port, served.find_run_id()
    headers = {"X_Paceline_Token": served.panel.token, "Content_Type": "application/json"}
    response = send_request(
        port,
        f"/api/runs/{id}/note",
        "PUT",
        b"{}",
        **headers,
        Content_Length=str(MAX_BODY_BYTES + 1),
    )
    assert response.status == 413
    # A body without a declared length is limited, too.
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        head = (
            f"PUT /api/runs/{id}/note HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Paceline-Token:"
            f" {served.panel.token}\r\n"
        )
        connection.sendall(
            head.encode() + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
        sent, response = 0, b""
        connection.setblocking(True)
        try:
            for _ in range(64):
                connection.sendall(chunk)
                sent += 1 << 20
        except OSError:
            pass
        else:
            response = connection.recv(1000)
            assert response.split(b" ")[1] in (b"400", b"413")
    assert not (Path(served.panel.folder) / ".paceline-ui.json").exists()


def test_rejects_websockets(served):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    upgrade |= {"Sec_WebSocket_Key": "x" * 22 + "==", "Sec_WebSocket_Version": "13"}
    assert send_request(served.panel.port, "/api/stream2", **upgrade).status in (400, 403, 404, 426)
