"""Overload, closed connections, signals, and what `paceline serve` refuses before it starts."""

import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_servers import ServedApi, serve_api, write_adapter, write_base
from commands import run
from openai import APIConnectionError, OpenAI, RateLimitError
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.inference.engine.shared_base import check_shared_base
from paceline.inference.loading import load_model

QUESTION = [{"role": "user", "content": "What is a tuple?"}]
#: More tokens than are generated during a test.
ENDLESS = 8000


def open_stream(client: OpenAI, num_tokens: int = ENDLESS) -> Any:
    """Return a stream whose first token has arrived."""
    stream = client.chat.completions.create(
        model="one", messages=QUESTION, temperature=0, max_tokens=num_tokens, stream=True
    )
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    return stream


def ask(client: OpenAI) -> Any:
    return client.chat.completions.create(model="one", messages=QUESTION, max_tokens=1)


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_accepted(client: OpenAI) -> bool:
    try:
        ask(client)
    except RateLimitError:
        return False
    return True


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[ServedApi]:
    with serve_api(runs / "one", "--max-queue", "1") as server:
        yield server


def test_overload_is_refused_and_closed_connections_end(served: ServedApi) -> None:
    client = served.client()
    first = open_stream(client)
    # It asks again if the other request below takes the place first.
    waiting = threading.Thread(target=wait_until, args=(lambda: is_accepted(client),))
    waiting.start()

    refusals: list[RateLimitError] = []

    def is_full() -> bool:
        try:
            client.completions.create(model="one", prompt="x", max_tokens=1, timeout=2.0)
        except RateLimitError as error:
            refusals.append(error)
        except APIConnectionError:  # this request waited, and was given up
            pass
        return bool(refusals)

    wait_until(is_full)
    assert refusals[0].code == "too-many-requests"
    assert 1 <= int(refusals[0].response.headers["retry-after"]) <= 60
    first.close()  # ends the generation, or the next request would wait for thousands of tokens
    waiting.join(120)
    assert not waiting.is_alive()
    wait_until(lambda: is_accepted(client))


@pytest.mark.soak
def test_closed_connections_of_waiting_requests_make_room(served: ServedApi) -> None:
    client = served.client()
    first = open_stream(client)
    for _ in range(3):  # each one leaves its place in the queue to the next one
        with pytest.raises(APIConnectionError):
            client.with_options(timeout=0.3).chat.completions.create(
                model="one", messages=QUESTION, max_tokens=ENDLESS
            )
        wait_until(lambda: _is_room(served))
    first.close()
    wait_until(lambda: is_accepted(client))


def _is_room(served: ServedApi) -> bool:
    try:
        ask(served.client(timeout=0.2))
    except RateLimitError:
        return False
    except APIConnectionError:
        return True
    return True


@pytest.mark.soak
def test_first_sigterm_lets_running_requests_finish(runs: Path) -> None:
    with serve_api(runs / "one") as server:
        stream = open_stream(server.client(), num_tokens=300)
        server.process.send_signal(signal.SIGTERM)
        chunks = [*stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(30) == 143
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port)).close()


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=str)
def test_second_signal_ends_the_server_at_once(runs: Path, number: int, code: int) -> None:
    with serve_api(runs / "one") as server:
        stream = open_stream(server.client())
        server.process.send_signal(number)
        next(iter(stream))
        server.process.send_signal(number)
        assert server.process.wait(30) == code
        with pytest.raises(APIConnectionError):
            list(stream)


@pytest.mark.soak
def test_idle_server_ends_with_the_code_of_the_signal(runs: Path) -> None:
    with serve_api(runs / "one", "--no-token") as server:
        assert server.start["token"] is None
        with httpx.Client() as kept:  # an open connection does not delay the end
            assert kept.get(f"{server.start['url']}/v1/models").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 143


@pytest.mark.soak
def test_key_of_the_environment_is_the_token(runs: Path) -> None:
    variables = {"PACELINE_API_KEY": "a-key-of-mine"}
    with serve_api(runs / "one", variables=variables) as server:
        assert server.start["token"] == "a-key-of-mine"
        assert server.client().models.list().data
        environment = Path(f"/proc/{server.process.pid}/environ")
        assert environment.exists()
        server.process.terminate()
        out, err = server.process.communicate(timeout=30)
    assert "a-key-of-mine" not in out + err


def test_port_in_use_is_a_usage_error(runs: Path) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        done = run(str(runs / "one"), "--port", port, verb="serve", expect=2)
    assert "[chosen-port-in-use]" in done.stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--no-token", "--host", "0.0.0.0"], "no-token-on-network"),
        (["--adapter", "two"], "invalid-adapter-option"),
        (["--adapter", "=two"], "invalid-adapter-option"),
        (["--adapter", "base={runs}/two"], "model-name-taken"),
        (["--adapter", "one={runs}/two"], "model-name-taken"),
        (["--adapter", "full={runs}/initial"], "not-an-adapter"),
        (["--adapter", "gone={runs}/gone"], "no-model-in-run"),
        (["--engine", "vllm"], "vllm-not-installed"),
    ],
    ids=str,
)
def test_invalid_options_are_usage_errors(runs: Path, options: list[str], code: str) -> None:
    filled = [option.format(runs=runs) for option in options]
    done = run(str(runs / "one"), "--port", "0", "--json", *filled, verb="serve", expect=2)
    assert f"[{code}]" in done.stderr
    assert done.stdout == ""


@pytest.mark.soak
def test_invalid_keys_are_usage_errors(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", "two words", "schlüssel"):
        monkeypatch.setenv("PACELINE_API_KEY", key)
        done = run(str(runs / "one"), "--port", "0", verb="serve", expect=2)
        assert "[invalid-api-key]" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"modules_to_save": ["lm_head"]}, "adapter-not-shared"),
        ({"bias": "lora_only"}, "adapter-not-shared"),
        ({}, "adapter-of-another-base"),
    ],
    ids=str,
)
def test_adapter_that_cannot_share_the_base_is_refused(
    runs: Path, tmp_path: Path, settings: dict[str, Any], code: str
) -> None:
    base = runs / "initial" if settings else write_base(tmp_path / "other", seed=5)
    other = write_adapter(tmp_path / "three", base, seed=3, **settings)
    options = (str(runs / "one"), "--adapter", f"three={other}", "--port", "0")
    done = run(*options, verb="serve", expect=2)
    assert f"[{code}]" in done.stderr


def test_adapter_without_weights_is_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "two", tmp_path / "two")
    (tmp_path / "two" / "model" / "adapter_model.safetensors").unlink()
    with raises_error(ConfigError, code="adapter-weights-gone"):
        check_shared_base(runs / "one", {"two": tmp_path / "two"})
    with raises_error(ConfigError, code="adapter-weights-gone"):
        load_model(tmp_path / "two")


@pytest.mark.soak
def test_adapters_share_the_model_of_a_complete_run_and_its_copies(
    runs: Path, tmp_path: Path
) -> None:
    copy = write_base(tmp_path / "copy")
    settings = runs / "two" / "model" / "adapter_config.json"
    assert json.loads(settings.read_text())["base_model_name_or_path"] != str(copy)
    with serve_api(copy, "--adapter", f"two={runs / 'two'}") as server:
        assert server.start["models"] == ["copy", "base", "two"]
        texts = {
            name: server.client()
            .chat.completions.create(model=name, messages=QUESTION, temperature=0, max_tokens=9)
            .choices[0]
            .message.content
            for name in server.start["models"]
        }
    assert texts["copy"] == texts["base"] != texts["two"]
