"""A process that answers requests with the model of a run: ``paceline generate RUN --serve``. Both
requests and answers are JSON lines.

In: ``{id, messages: [{role, content, images}], model: "tuned" | "base", max_new_tokens,
temperature, seed}``, and ``{stop: id}``. ``images``, which may be missing, has the data URLs of
images that precede the content.
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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypedDict

from paceline.core.errors import EXIT_DONE, ConfigError, PacelineError, RunError
from paceline.core.failures import is_out_of_memory
from paceline.inference.chat_encoder import PromptTurn, check_image
from paceline.inference.device import inference_device
from paceline.inference.generate import generate_tokens, load_generator, model_folder

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


class Models:
    """The tuned model of a run and its base: the same weights without the adapters, or the initial
    model of the run, loaded at the first request."""

    def __init__(self, run: Path, device: str) -> None:
        self.device = inference_device(device)
        self.run = run
        self.adapted = (model_folder(run) / "adapter_config.json").is_file()
        self.tuned, self.encoder = load_generator(run)
        self.tuned.to(self.device)

    @property
    def has_base(self) -> bool:
        return self.adapted or (self.run / "config.yaml").is_file()

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[Any]:
        """Yield the model ``tuned`` or ``base``."""
        if name == "tuned":
            yield self.tuned
        elif self.adapted:
            with self.tuned.disable_adapter():
                yield self.tuned
        else:
            yield self._base

    @cached_property
    def _base(self) -> Any:
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
        return model.to(device=self.device, dtype=self.tuned.dtype).eval()


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
    models = Models(run, device)
    _send(
        out,
        ready={
            "device": str(models.device.type),
            "base": models.has_base,
            "images": models.encoder.processor is not None,
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


def _answer(models: Models, request: ChatRequest, out: IO[str], stopped: set[int]) -> None:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

    tokenizer = models.encoder.tokenizer
    started = time.perf_counter()
    inputs = models.encoder.encode([*map(_decoded, request.messages)]).to(models.device)
    num_prompt = int(inputs["input_ids"].shape[1])
    max_new_tokens = min(max(request.max_new_tokens, 1), _MAX_NEW_TOKENS)

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                _send(out, id=request.id, token=text)

    class Stopped(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            is_stopped = request.id in stopped
            return torch.full((len(input_ids),), is_stopped, device=input_ids.device)

    with models.named(request.model) as model:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and num_prompt + 1 > limit:
            raise ConfigError(
                "the chat has {num_prompt} tokens, but the model reads at most {limit}",
                code="chat-too-long",
                fix="clear the chat and ask again",
                num_prompt=f"{num_prompt:,}",
                limit=f"{limit:,}",
            )
        if limit is not None:
            max_new_tokens = min(max_new_tokens, limit - num_prompt)
        tokens = generate_tokens(
            model,
            tokenizer,
            inputs,
            max_new_tokens=max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            stopping_criteria=StoppingCriteriaList([Stopped()]),
        )
    end = {"num_tokens": len(tokens), "wall_s": time.perf_counter() - started}
    _send(out, id=request.id, end={**end, "stopped": request.id in stopped})
    stopped.discard(request.id)
