"""Run a GGUF file with llama.cpp, to compare it with the trained model."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline.inference.exports.core.forms import ProofPrompt
from paceline.inference.exports.gguf.llama_cpp import LlamaCppFailed, LlamaCppModel

#: A template is rendered at once; a request that is not answered by then is sent again.
_TIMEOUT_S, _NUM_TRIES = 20, 3


class LlamaCppEngine:
    """llama.cpp on the CPU, as it is in the package xllamacpp.

    Args:
        file: GGUF file.

    Raises:
        LlamaCppFailed: llama.cpp does not load it.
    """

    is_normalized = True

    def __init__(self, file: Path) -> None:
        self._file = file
        self._model = LlamaCppModel(file)
        self.name = f"llama.cpp in xllamacpp {version('xllamacpp')}"
        if not self._model.is_exact:
            self.name += ", keys and values in 16 bits"
        self._renderer: _TemplateServer | None = None

    def encode(self, prompt: ProofPrompt) -> list[int]:
        """Return the tokens of a chat. llama.cpp renders the template in the file itself."""
        if not self._model.has_template or prompt.content == "plain":
            return self._model.tokenize(prompt.text)
        if self._renderer is None:
            self._renderer = _TemplateServer(self._file)
        return self._model.tokenize(self._renderer.render(prompt))

    def scores(self, tokens: list[int], start: int) -> torch.Tensor:
        """Return the log-probabilities after each token from ``start``."""
        rows = []
        self._model.start(tokens[: start + 1], len(tokens) - start)
        rows.append(self._model.logits())
        for token in tokens[start + 1 :]:
            self._model.extend([token])
            rows.append(self._model.logits())
        return torch.stack(rows).log_softmax(-1)

    def generate(self, tokens: list[int], num_tokens: int) -> list[int]:
        """Return the most likely tokens, also after the end of an answer."""
        answer: list[int] = []
        self._model.start(tokens, num_tokens)
        while len(answer) < num_tokens:
            if answer:
                self._model.extend(answer[-1:])
            answer.append(int(self._model.logits().argmax()))
        return answer

    def close(self) -> None:
        """Free the model and stop the server that renders its template."""
        self._renderer = None
        self._model.close()


class _TemplateServer:
    """llama.cpp's server, which renders the chat template in a GGUF file. It listens on a port of
    this host that the system selects, and ends with this object.

    Args:
        file: GGUF file.
    """

    def __init__(self, file: Path) -> None:
        import xllamacpp

        params: Any = xllamacpp.CommonParams()
        params.model.path = os.fspath(file)
        params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
        params.no_extra_bufts, params.verbosity = True, -1
        params.hostnames, params.port = ["127.0.0.1"], 0
        self._server: Any = xllamacpp.Server(params)

    def render(self, prompt: ProofPrompt) -> str:
        """Return the text of a chat and of the beginning of its next answer.

        Raises:
            LlamaCppFailed: the server does not render it.
        """
        body: dict[str, object] = {
            "messages": prompt.messages,
            # Null is as good as undefined, which transformers has; llama.cpp has true or false.
            "chat_template_kwargs": {"enable_thinking": None, **prompt.template_args},
            "add_generation_prompt": True,
        }
        if prompt.tools:
            body["tools"] = prompt.tools
        request = urllib.request.Request(
            f"{self._server.listening_address}/apply-template",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            for _ in range(_NUM_TRIES - 1):
                with suppress(TimeoutError):
                    return _ask(opener, request)
            return _ask(opener, request)
        except urllib.error.HTTPError as error:
            raise LlamaCppFailed(
                "llama.cpp does not render the chat template: {reason}",
                code="gguf-template-not-rendered",
                reason=error.read().decode(errors="replace")[:500],
            ) from error


def _ask(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> str:
    with opener.open(request, timeout=_TIMEOUT_S) as response:
        return str(json.load(response)["prompt"])
