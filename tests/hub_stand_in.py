"""A local HTTP server that speaks the parts of the Hugging Face hub's API that an upload uses:
tokens, creation of repositories, Git LFS, and commits."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN, OWNER = "hf_stand_in", "somebody"


@dataclass
class Repository:
    """A repository: its files by path, and whether it is private."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    num_commits: int = 0


@dataclass
class HubStandIn:
    """The state of the server. ``fails_at``: a part of a path whose requests are refused."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    fails_at: str | None = None

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
        """Return the status and the JSON of a response."""
        path = path.partition("?")[0]
        if self.fails_at is not None and self.fails_at in path:
            return 403, {"error": "refused by the stand-in"}
        if path.startswith("/objects/"):
            digest = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == digest
            self.objects[digest] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": OWNER, "orgs": []}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        content = body.decode()
        if path == "/api/repos/create":
            return self._create(json.loads(content))
        name = path.removeprefix("/api/models").lstrip("/")
        name = "/".join(name.removesuffix(".git/info/lfs/objects/batch").split("/")[:2])
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        if "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                }
                for file in json.loads(content)["files"]
            ]
            return 200, {"files": files}
        if path.endswith("/objects/batch"):
            return 200, {"transfer": "basic", "objects": self._lfs_actions(json.loads(content))}
        if "/commit/" in path:
            return self._commit(name, [json.loads(line) for line in content.splitlines()])
        return 404, {"error": f"{method} {path} is not part of the stand-in"}

    def _create(self, settings: dict[str, Any]) -> tuple[int, Any]:
        name = f"{settings['organization'] or OWNER}/{settings['name']}"
        status = 409 if name in self.repositories else 200
        self.repositories.setdefault(name, Repository(settings.get("visibility") == "private"))
        return status, {"url": f"{self.url}/{name}", "name": name}

    def _lfs_actions(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                **item,
                "actions": {"upload": {"href": f"{self.url}/objects/{item['oid']}", "header": {}}},
            }
            for item in batch["objects"]
        ]

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        repository = self.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.objects[value["oid"]]
        repository.num_commits += 1
        oid = f"{repository.num_commits:040x}"
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid}


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """Run the server within the block."""
    hub = HubStandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, value = hub.answer(
                self.command, self.path, body, self.headers.get("Authorization")
            )
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if "error" in value:
                self.send_header("X-Error-Message", value["error"])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _respond

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
