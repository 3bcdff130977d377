"""Generate with vLLM, which runs as a child process behind the server. It is written by vLLM's
documentation and has never run with vLLM: nothing here is tested.

The child gets tokens and returns tokens, so that chats, limits and texts are the same as with
transformers. It listens on the loopback interface with a key of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from pydantic import JsonValue

from paceline.core.errors import ConfigError, RunError
from paceline.core.processes import end_with_parent
from paceline.inference.chat_encoder import ChatEncoder
from paceline.inference.engine.answer_text import AnswerDecoder
from paceline.inference.engine.engine import (
    AnswerEnd,
    Emit,
    Engine,
    GeneratedToken,
    GenerationRequest,
)
from paceline.inference.engine.shared_base import (
    BASE,
    base_folder,
    check_shared_base,
    run_name,
    stored_encoder,
)
from paceline.inference.loading import model_folder, run_config
from paceline.models.json_config import first_number, language_fields, read_object

_START_LIMIT_S = 1800.0
_POLL_S = 0.5
#: Ranks of adapters that vLLM supports.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_TOKEN_NAME = "token_id:"


class VllmEngine(Engine):
    """Generates with ``vllm serve``.

    Args:
        process: the child process.
        port: the port that it listens on.
        key: the key that it requires.
        encoders: what encodes the chats of each model, and transformers' settings of its answers.
        limit: largest number of tokens of prompt and answer together.
    """

    name = "vllm"
    num_parallel = 64
    reads_images = False

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        key: str,
        encoders: Mapping[str, tuple[ChatEncoder, Any]],
        limit: int | None,
    ) -> None:
        self.process, self.port, self.key = process, port, key
        self._encoders, self._limit = dict(encoders), limit

    @classmethod
    def of_runs(cls, run: Path, adapters: Mapping[str, Path]) -> VllmEngine:
        """Start vLLM with the model of a run, and adapters of other runs.

        Raises:
            ConfigError: vLLM is not installed, or it does not support a model.
            RunError: it does not start.
        """
        program = _program()
        has_base = check_shared_base(run, adapters)
        folder = model_folder(run)
        modules = {name: model_folder(adapter) for name, adapter in adapters.items()}
        if base_folder(folder) != folder:
            if not has_base:
                raise _not_supported("a run whose base model cannot be shared")
            modules = {run_name(run): folder, **modules}
        for each in (folder, *modules.values()):
            config = run_config(each)
            if config is not None and config.lora.quantize != "none":
                raise _not_supported("adapters of a quantized base model")
        base = base_folder(folder)
        names = [BASE] if base != folder else [run_name(run), BASE]
        encoders = {name: stored_encoder(base, False) for name in names}
        encoders |= {name: stored_encoder(each, False) for name, each in modules.items()}
        port, key = _free_port(), secrets.token_urlsafe(24)
        command = [program, "serve", str(base), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", *names, *_adapter_options(modules)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env={**os.environ, "VLLM_API_KEY": key},
            preexec_fn=end_with_parent,
        )
        fields = language_fields(read_object(base / "config.json") or {})
        engine = cls(process, port, key, encoders, first_number(fields, "max_position_embeddings"))
        engine._wait()
        return engine

    @property
    def models(self) -> Sequence[str]:
        return [*self._encoders]

    def encoder(self, model: str) -> ChatEncoder:
        return self._encoders[model][0]

    def token_limit(self, model: str) -> int | None:
        return self._limit

    def generate(
        self, request: GenerationRequest, emit: Emit, is_cancelled: Callable[[], bool]
    ) -> AnswerEnd:
        encoder, settings = self._encoders[request.model]
        ends = settings.eos_token_id or []
        end_ids = [ends] if isinstance(ends, int) else ends
        decoder = AnswerDecoder(encoder.tokenizer, end_ids, request.stop, request.kept_tokens)
        num_tokens, reason = 0, None
        deadline = time.monotonic() + (request.time_limit_s or float("inf"))
        for choice in self._choices(request, end_ids):
            reason = choice["finish_reason"] or reason
            for token in _tokens_of(choice, request.num_logprobs or 0):
                num_tokens += 1
                part = decoder.push(token)
                if part is not None:
                    emit(part)
            if decoder.is_stopped or is_cancelled() or time.monotonic() > deadline:
                break  # closing the connection ends the generation
        rest = decoder.finish()
        if rest is not None:
            emit(rest)
        if decoder.is_stopped or reason == "stop":
            return AnswerEnd("stop", num_tokens)
        return AnswerEnd("cancelled" if is_cancelled() else "length", num_tokens)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _choices(self, request: GenerationRequest, end_ids: Sequence[int]) -> Iterator[TextChoice]:
        """Yield the parts of an answer as vLLM sends them."""
        body: dict[str, JsonValue] = {
            "model": request.model,
            "prompt": [*request.prompt.tokens],
            "max_tokens": request.prompt.largest_answer(request.max_new_tokens),
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": request.num_logprobs or 0,
            "stream": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": [*end_ids],
        }
        if request.top_p is not None:
            body["top_p"] = request.top_p
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _failed(response.read().decode("utf-8", "replace")[:500])
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if data and data != "[DONE]":
                    chunk: TextChunk = json.loads(data)
                    if "error" in chunk:
                        raise _failed(str(chunk["error"])[:500])
                    yield from chunk["choices"]
        except OSError as error:
            raise _failed(str(error)) from error
        finally:
            connection.close()

    def _wait(self) -> None:
        """Wait until the child answers."""
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RunError(
                    "vLLM did not start (exit code {returncode})",
                    code="vllm-not-started",
                    fix="read its messages above, or use `--engine transformers`",
                    returncode=self.process.returncode,
                )
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


class TokenLogprobs(TypedDict):
    """The tokens of a chunk. A name is :data:`_TOKEN_NAME` and the id of a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None


class TextChoice(TypedDict):
    """The part of an answer in a chunk."""

    logprobs: TokenLogprobs | None
    finish_reason: str | None


class TextChunk(TypedDict, total=False):
    """A chunk of a stream of vLLM."""

    error: JsonValue
    choices: list[TextChoice]


def _tokens_of(choice: TextChoice, num_logprobs: int) -> Iterator[GeneratedToken]:
    logprobs = choice["logprobs"]
    if logprobs is None:
        return
    for number, name in enumerate(logprobs["tokens"]):
        top = logprobs["top_logprobs"]
        named = (top[number] if top else None) or {}
        pairs = [(int(key.removeprefix(_TOKEN_NAME)), each) for key, each in named.items()]
        pairs.sort(key=lambda pair: -pair[1])  # the new token is among them in any case
        id = int(name.removeprefix(_TOKEN_NAME))
        yield GeneratedToken(id, logprobs["token_logprobs"][number], pairs[:num_logprobs])


def _adapter_options(modules: Mapping[str, Path]) -> list[str]:
    if not modules:
        return []
    ranks = [
        first_number(read_object(folder / "adapter_config.json") or {}, "r") or 1
        for folder in modules.values()
    ]
    rank = next((each for each in _RANKS if each >= max(ranks)), None)
    if rank is None:
        raise _not_supported(f"adapters of a rank above {_RANKS[-1]}")
    pairs = [f"{name}={folder}" for name, folder in modules.items()]
    limits = ["--max-lora-rank", str(rank), "--max-loras", str(len(modules))]
    return ["--enable-lora", *limits, "--lora-modules", *pairs]


def _program() -> str:
    beside = Path(sys.executable).parent / "vllm"
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    if program is None:
        raise ConfigError(
            "`--engine vllm` needs vLLM, which is not installed",
            code="vllm-not-installed",
            fix="run `pip install vllm`, or use `--engine transformers`",
        )
    return program


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _not_supported(feature: str) -> ConfigError:
    return ConfigError(
        "`--engine vllm` does not support {feature}",
        code="vllm-not-supported",
        fix="use `--engine transformers`",
        feature=feature,
    )


def _failed(reason: str) -> RunError:
    return RunError(
        "vLLM could not answer: {reason}",
        code="vllm-failed",
        fix="read its messages in the output of the server",
        reason=reason,
    )
