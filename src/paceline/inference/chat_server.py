"""A process that answers requests with the model of a run: ``paceline generate RUN --serve``. Both
requests and answers are JSON lines.

In: ``{id, messages: [{role, content, images}], model: "tuned" | "base", max_new_tokens,
temperature, seed, chat_template_kwargs}``, and ``{stop: id}``. ``images``, which may be missing,
has the data URLs of images that precede the content; ``chat_template_kwargs``, which may be
missing, variables of the chat template.
Out: first ``{ready: {device, base, images}}``, with whether there is a base model and whether the
model reads images; then for each request ``{id, token: text}`` as the text grows and one ``{id,
end: {num_tokens, wall_s, stopped}}`` or ``{id, error: {what, allowed, fix}}``.
The process ends when its input ends.
"""

import base64
import contextlib
import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypedDict

from pydantic import JsonValue

from paceline.core.errors import EXIT_DONE, ConfigError, PacelineError, RunError
from paceline.core.failures import is_out_of_memory
from paceline.inference.chat_encoder import PromptTurn, check_image
from paceline.inference.engine.engine import AnswerPart, ChatPrompt, GenerationRequest
from paceline.inference.engine.transformers_engine import TransformersEngine

_MAX_NEW_TOKENS = 4096


class ReceivedTurn(TypedDict, total=False):
    """One turn of a request."""

    role: str
    content: str
    images: list[str]


@dataclass(frozen=True)
class ChatRequest:
    """A request, as described above."""

    id: int
    messages: list[ReceivedTurn]
    model: str = "tuned"
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    chat_template_kwargs: dict[str, JsonValue] = field(default_factory=dict)


class ComparedModels:
    """The tuned model of a run and its base: the same weights without the adapters, or the initial
    model of the run, loaded at the first request. The base answers chats in the tuned model's
    template."""

    def __init__(self, run: Path, device: str) -> None:
        self.run, self.tuned = run, TransformersEngine.of_run(run, device)
        (served,) = self.tuned.served.values()
        self._served = served
        self.tuned.served = {"tuned": served}
        if served.adapter is not None:
            self.tuned.served["base"] = replace(served, adapter=None)

    @property
    def has_base(self) -> bool:
        return "base" in self.tuned.served or (self.run / "config.yaml").is_file()

    def engine(self, name: str) -> TransformersEngine:
        """Return the engine with the model ``tuned`` or ``base``."""
        return self.tuned if name in self.tuned.served else self._initial

    @cached_property
    def _initial(self) -> TransformersEngine:
        from paceline.config.load import load_config
        from paceline.models.language import load_language_model

        if not self.has_base:
            raise ConfigError(
                "the initial model of {run} is unknown",
                code="unknown-initial-model",
                fix="give the folder of a run, with its config.yaml",
                run=self.run,
            )
        config = load_config(self.run / "config.yaml", {"lora.enable": False}).config
        model: Any = load_language_model(config)
        model.config.use_cache = True
        tuned = self.tuned.model
        model = model.to(device=tuned.device, dtype=tuned.dtype).eval()
        served = replace(self._served, generation_config=model.generation_config)
        return TransformersEngine(model, {"base": served})


def serve(run: Path, device: str = "auto") -> int:
    """Answer requests until the input ends. ``device``: ``auto`` or ``cpu``.

    Raises:
        ConfigError: the run has no language model.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(
            "unknown `--device {device}`",
            code="unknown-chat-device",
            allowed="auto, cpu",
            device=device,
        )
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print, which would corrupt the answers
    requests: queue.Queue[ChatRequest] = queue.Queue()
    stopped: set[int] = set()
    threading.Thread(
        target=_read, args=(sys.stdin.buffer, requests, stopped), name="requests", daemon=True
    ).start()
    models = ComparedModels(run, device)
    _send(
        out,
        ready={
            "device": str(models.tuned.model.device.type),
            "base": models.has_base,
            "images": models.tuned.reads_images,
        },
    )
    while True:
        request = requests.get()
        try:
            _answer(models, request, out, stopped)
        except Exception as error:  # the process continues
            failure = error if isinstance(error, PacelineError) else None
            if failure is None:
                fix = "try again"
                if is_out_of_memory(error):
                    fix = "request fewer new tokens, or clear the chat"
                failure = RunError(
                    "{kind}: {reason}",
                    code="answer-failed",
                    fix=fix,
                    kind=type(error).__name__,
                    reason=str(error)[:500],
                )
            _send(out, id=request.id, error=failure.record())


def _read(lines: IO[bytes], requests: queue.Queue[ChatRequest], stopped: set[int]) -> None:
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            message = json.loads(line)
            if "stop" in message:
                stopped.add(message["stop"])
            else:
                requests.put(ChatRequest(**message))
    # the client has ended, perhaps during an answer, which need not be kept
    os._exit(EXIT_DONE)


def _send(out: IO[str], **fields: Any) -> None:
    try:
        out.write(json.dumps(fields, ensure_ascii=False) + "\n")
        out.flush()
    except OSError:
        os._exit(EXIT_DONE)


def _decoded(turn: ReceivedTurn) -> PromptTurn:
    """Return a turn with the contents of its images.

    Raises:
        ConfigError: an image is not a data URL, or cannot be read.
    """
    images = [base64.b64decode(url.partition(";base64,")[2]) for url in turn.get("images") or ()]
    for number, image in enumerate(images, 1):
        check_image(image, f"image {number}")
    return PromptTurn(role=turn["role"], content=turn["content"], images=images)


def _answer(models: ComparedModels, request: ChatRequest, out: IO[str], stopped: set[int]) -> None:
    started = time.perf_counter()
    engine = models.engine(request.model)
    turns = [*map(_decoded, request.messages)]
    prompt = engine.encode(request.model, ChatPrompt(turns, (), request.chat_template_kwargs))

    def send(part: AnswerPart) -> None:
        if part.text:
            _send(out, id=request.id, token=part.text)

    end = engine.generate(
        GenerationRequest(
            request.model,
            prompt,
            min(max(request.max_new_tokens, 1), _MAX_NEW_TOKENS),
            request.temperature,
            seed=request.seed,
        ),
        send,
        lambda: request.id in stopped,
    )
    _send(
        out,
        id=request.id,
        end={
            "num_tokens": end.num_tokens,
            "wall_s": time.perf_counter() - started,
            "stopped": request.id in stopped,
        },
    )
    stopped.discard(request.id)
