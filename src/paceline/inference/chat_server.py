"""A worker that holds a run's model and answers: ``paceline generate RUN --serve``. JSON lines in,
JSON lines out.

In: ``{id, messages: [{role, content}], model: "tuned" | "base", max_new_tokens, temperature,
seed}``, and ``{stop: id}``.
Out: first ``{ready: {device, base}}``; then for each request ``{id, token: text}`` as the text
grows and one ``{id, end: {num_tokens, wall_s, stopped}}`` or ``{id, error: {what, allowed, fix}}``.
When its input ends, so does the worker.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import EXIT_DONE, ConfigError, PacelineError
from paceline.inference.generate import encode_chat, load_model, model_folder

_MOST_NEW_TOKENS = 4096


@dataclass(frozen=True)
class ChatRequest:
    """What is asked; see the module."""

    id: int
    messages: list[dict[str, str]]
    model: str = "tuned"
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


class Models:
    """The tuned model of a run, and its base: the same weights without the adapters, or what the
    run began from, loaded when it is first asked for."""

    def __init__(self, run: Path, device: str) -> None:
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = (
            accelerator if accelerator is not None and device != "cpu" else torch.device("cpu")
        )
        self.run = run
        self.adapted = (model_folder(run) / "adapter_config.json").is_file()
        self.tuned, self.tokenizer = load_model(run)
        self.tuned.to(self.device)
        self._base: Any = None

    @property
    def has_base(self) -> bool:
        return self.adapted or (self.run / "config.yaml").is_file()

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[Any]:
        """The model ``tuned`` or ``base``, for the while."""
        if name == "tuned":
            yield self.tuned
        elif self.adapted:
            with self.tuned.disable_adapter():
                yield self.tuned
        else:
            if self._base is None:
                self._base = self._load_base()
            yield self._base

    def _load_base(self) -> Any:
        from paceline.config.load import load_config
        from paceline.models.language import load_language_model

        if not self.has_base:
            raise ConfigError(
                f"what {self.run} was trained from is not known",
                fix="give a run's folder, with its config.yaml",
            )
        model: Any = load_language_model(
            load_config(self.run / "config.yaml", {"lora.enable": False}).config
        )
        model.config.use_cache = True
        return model.to(device=self.device, dtype=self.tuned.dtype).eval()


def serve(run: Path, device: str = "auto") -> int:
    """Answer requests until the input ends. ``device``: ``auto`` or ``cpu``.

    Raises:
        ConfigError: the run holds no language model.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(f"`--device {device}` is not known", allowed="auto, cpu")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: queue.Queue[ChatRequest] = queue.Queue()
    stopped: set[int] = set()
    threading.Thread(
        target=_read, args=(sys.stdin.buffer, requests, stopped), name="requests", daemon=True
    ).start()
    models = Models(run, device)
    _say(out, ready={"device": str(models.device.type), "base": models.has_base})
    while True:
        request = requests.get()
        try:
            _answer(models, request, out, stopped)
        except PacelineError as error:
            _say_error(out, request.id, error.what, error.allowed, error.fix)
        except Exception as error:  # one answer that fails is not the worker's end
            what = f"{type(error).__name__}: {error}"[:500]
            is_memory = "memory" in str(error)
            fix = "ask for fewer new tokens, or clear the chat" if is_memory else "try again"
            _say_error(out, request.id, what, None, fix)


def _read(lines: IO[bytes], requests: queue.Queue[ChatRequest], stopped: set[int]) -> None:
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            message = json.loads(line)
            if "stop" in message:
                stopped.add(message["stop"])
            else:
                requests.put(ChatRequest(**message))
    # whoever asked has gone: also in the middle of an answer, of which there is nothing to keep
    os._exit(EXIT_DONE)


def _say_error(out: IO[str], id: int, what: str, allowed: str | None, fix: str | None) -> None:
    _say(out, id=id, error={"what": what, "allowed": allowed, "fix": fix})


def _say(out: IO[str], **words: Any) -> None:
    try:
        out.write(json.dumps(words, ensure_ascii=False) + "\n")
        out.flush()
    except OSError:
        os._exit(EXIT_DONE)


def _answer(models: Models, request: ChatRequest, out: IO[str], stopped: set[int]) -> None:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

    number, tokenizer = request.id, models.tokenizer
    started = time.perf_counter()
    inputs = encode_chat(tokenizer, request.messages).to(models.device)
    prompt = int(inputs["input_ids"].shape[1])
    wanted = min(max(request.max_new_tokens, 1), _MOST_NEW_TOKENS)

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                _say(out, id=number, token=text)

    class Stopped(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full(
                (input_ids.shape[0],), number in stopped, dtype=torch.bool, device=input_ids.device
            )

    torch.manual_seed(request.seed)
    with models.named(request.model) as model, torch.no_grad():
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and prompt + 1 > limit:
            raise ConfigError(
                f"the chat has {prompt:,} tokens, and the model reads at most {limit:,}",
                fix="clear the chat and ask again",
            )
        pad_token = tokenizer.pad_token_id
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=request.temperature > 0,
            temperature=request.temperature or None,
            max_new_tokens=wanted if limit is None else min(wanted, limit - prompt),
            pad_token_id=tokenizer.eos_token_id if pad_token is None else pad_token,
            use_cache=True,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            stopping_criteria=StoppingCriteriaList([Stopped()]),
        )
    about = {"num_tokens": int(output.shape[1]) - prompt, "wall_s": time.perf_counter() - started}
    _say(out, id=number, end={**about, "stopped": number in stopped})
    stopped.discard(number)
