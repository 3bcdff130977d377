"""Images at https addresses: a server with a certificate, and the tokens of its images."""

import datetime
import io
import json
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image
from raised import raises_error
from vision_models import make_model

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.data.vision_language import download
from paceline.data.vision_language.rows import ImageChat, with_contents
from paceline.tasks import load_task


class ImageServer(ThreadingHTTPServer):
    """Serves images, errors and redirects, and counts the requests by path."""

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.requests: Counter[str] = Counter()
        self.is_closing = threading.Event()

    def address(self, path: str) -> str:
        return f"https://127.0.0.1:{self.server_port}/{path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients leave before an answer is complete."""


class _Handler(BaseHTTPRequestHandler):
    server: ImageServer

    def do_GET(self) -> None:
        path = self.path.removeprefix("/")
        self.server.requests[path] += 1
        if path.isdigit():
            self.send_error(int(path))
        elif path == "insecure":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1/0.png")
            self.end_headers()
        elif path == "slow":
            self.send_response(200)
            self.end_headers()
            while not self.server.is_closing.wait(0.02):
                self.wfile.write(b".")
        else:
            content = io.BytesIO()
            Image.new("RGB", (24, 16), path.removesuffix(".png")).save(content, "PNG")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content.getvalue())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a private key and a certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("certificate") / "server.pem"
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + certificate.public_bytes(encoding))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llava")


@pytest.fixture
def server(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageServer]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    download._opener.cache_clear()
    server = ImageServer(certificate)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.is_closing.set()
    server.shutdown()
    server.server_close()
    thread.join()
    download._opener.cache_clear()


def chat(*images: str) -> ImageChat:
    return ImageChat(messages=[], images=images)


def test_image_is_downloaded_once(server: ImageServer) -> None:
    red, blue = server.address("red.png"), server.address("blue.png")
    rows = [chat(red), chat(blue, red), chat("local.png")]
    for _ in range(2):
        first, second, third = with_contents(rows)
        assert isinstance(first, ImageChat)
        assert isinstance(second, ImageChat)
        [image] = first.images
        assert isinstance(image, bytes)
        assert Image.open(io.BytesIO(image)).size == (24, 16)
        assert second.images[1] == image != second.images[0]
        assert third == rows[2]
    assert server.requests == {"red.png": 1, "blue.png": 1}


def test_row_without_its_image_is_rejected(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(server.address(path)) for path in ("404", "red.png", "insecure", "410")]
    missing, found, insecure, gone = with_contents(rows)
    assert isinstance(found, ImageChat)
    assert missing == "an image cannot be downloaded (HTTP status 404)"
    assert gone == "an image cannot be downloaded (HTTP status 410)"
    assert insecure == "an image whose server redirects to an address without https"
    monkeypatch.setattr(download, "MAX_IMAGE_BYTES", 20)
    assert with_contents([chat(server.address("blue.png"))]) == ["an image of more than 20 B"]
    [invalid] = with_contents([chat("https://[")])
    assert isinstance(invalid, str)
    assert invalid.startswith("the address of an image is invalid")


@pytest.mark.parametrize("path", ["503", "slow"])
def test_server_that_does_not_answer_ends_the_command(
    path: str, server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(download, "_RETRY_WAIT_S", 0.01)
    with raises_error(RunError, code="image-download-failed", naming=server.address(path)):
        with_contents([chat(server.address(path))])
    assert server.requests[path] == 3


def test_training_opens_no_connection(server: ImageServer, model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Red."}]
    rows = [
        {"messages": turns, "images": [server.address(path)]}
        for path in ("red.png", "404", "red.png")
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    config = Config.model_validate(
        {"model": str(model), "dataset": str(file), "train_args": {"max_length": 200}}
    )
    task = load_task(config)
    task.prepared = task.prepare()
    assert task.prepared.num_train == 2
    assert task.prepared.counts is not None
    dropped = {"an image cannot be downloaded (HTTP status 404)": 1}
    assert task.prepared.counts.as_dict()["dropped"] == dropped
    assert server.requests["red.png"] == 1
    server.shutdown()
    server.server_close()  # A connection would be refused.
    dataset, _ = task.build_datasets()
    batch = task.collate([dataset[0], dataset[1]])
    assert len(batch["vision_inputs"]["pixel_values"]) == 2


def test_other_addresses_are_refused(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Red."}]
    file = tmp_path / "rows.jsonl"
    row = {"messages": turns, "images": ["http://example.org/cat.png"]}
    file.write_text(json.dumps(row), encoding="utf-8")
    config = Config.model_validate({"model": str(model), "dataset": str(file)})
    with raises_error(ConfigError, code="data-of-another-method", naming="https addresses"):
        load_task(config).prepare()
