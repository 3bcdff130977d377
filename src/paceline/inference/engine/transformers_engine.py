"""Generate with transformers: one answer at a time, with one base model and any number of
adapters."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.inference.chat_encoder import ChatEncoder
from paceline.inference.device import inference_device
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
    load_adapter,
    run_name,
    stored_encoder,
)
from paceline.inference.loading import load_generator, model_folder
from paceline.models.blocks import base_model

#: Stands for the logarithm of 0, which JSON does not have, as in OpenAI's API.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class ServedModel:
    """A model that answers under a name.

    Args:
        adapter: peft's name of its adapter; None for the model without adapters.
        encoder: what encodes its chats.
        generation_config: transformers' settings of its answers, such as its end tokens.
    """

    adapter: str | None
    encoder: ChatEncoder
    generation_config: Any


class TransformersEngine(Engine):
    """Generates with a model in this process. :meth:`generate` is called in one thread at a time.

    Args:
        model: the model, perhaps with adapters, on the device where it answers.
        served: the models by name.
    """

    name = "transformers"

    def __init__(self, model: Any, served: Mapping[str, ServedModel]) -> None:
        self.model, self.served = model, dict(served)
        encoders = [each.encoder for each in served.values()]
        self.reads_images = any(encoder.processor is not None for encoder in encoders)

    @classmethod
    def of_run(cls, run: Path, device: str = "auto") -> TransformersEngine:
        """Load the model of a run, which answers under the name of the run's folder.

        Args:
            device: ``auto`` or ``cpu``.

        Raises:
            ConfigError: the run has no language model.
        """
        model, encoder = load_generator(run)
        model.to(inference_device(device))
        adapter = "default" if hasattr(model, "peft_config") else None
        settings = base_model(model).generation_config
        return cls(model, {run_name(run): ServedModel(adapter, encoder, settings)})

    @classmethod
    def of_runs(
        cls, run: Path, adapters: Mapping[str, Path], device: str = "auto"
    ) -> TransformersEngine:
        """Load the model of a run, with its base and adapters of other runs, which share the base.

        Args:
            adapters: the runs by the names of their adapters.

        Raises:
            ConfigError: an adapter cannot share the base.
        """
        has_base = check_shared_base(run, adapters)
        engine = cls.of_run(run, device)
        of_run = engine.served[run_name(run)]
        if of_run.adapter is None:
            engine.served[BASE] = of_run
        elif has_base:
            encoder, settings = stored_encoder(base_folder(model_folder(run)), engine.reads_images)
            engine.served[BASE] = ServedModel(None, encoder, settings)
        for number, (name, adapter_run) in enumerate(adapters.items()):
            folder, adapter = model_folder(adapter_run), f"adapter-{number}"
            engine.model = load_adapter(engine.model, name, folder, adapter)
            encoder, settings = stored_encoder(folder, engine.reads_images)
            engine.served[name] = ServedModel(adapter, encoder, settings)
        engine.model.to(inference_device(device)).eval()
        return engine

    @property
    def models(self) -> Sequence[str]:
        return [*self.served]

    def encoder(self, model: str) -> ChatEncoder:
        return self.served[model].encoder

    def token_limit(self, model: str) -> int | None:
        text_config = self.model.config.get_text_config()
        limit: int | None = getattr(text_config, "max_position_embeddings", None)
        return limit

    def generate(
        self, request: GenerationRequest, emit: Emit, is_cancelled: Callable[[], bool]
    ) -> AnswerEnd:
        from transformers import StoppingCriteriaList

        served = self.served[request.model]
        tokenizer = served.encoder.tokenizer
        end_ids = _end_ids(served.generation_config)
        decoder = AnswerDecoder(tokenizer, end_ids, request.stop, request.kept_tokens)
        progress = _Progress(request, decoder, emit, is_cancelled)
        with self._weights(served) as model, progress.reading_logits(model):
            tokens = generate_tokens(
                model,
                tokenizer,
                request.prompt.inputs.to(self.model.device),
                max_new_tokens=request.prompt.largest_answer(request.max_new_tokens),
                temperature=request.temperature,
                seed=request.seed,
                streamer=progress,
                stopping_criteria=StoppingCriteriaList([progress.has_ended]),
                **({} if request.top_p is None else {"top_p": request.top_p}),
            )
        rest = decoder.finish()
        if rest is not None:
            emit(rest)
        if decoder.is_stopped:
            return AnswerEnd("stop", len(tokens))
        return AnswerEnd("cancelled" if is_cancelled() else "length", len(tokens))

    @contextlib.contextmanager
    def _weights(self, served: ServedModel) -> Iterator[Any]:
        """Yield the model with the weights and the settings of a served one."""
        for each in (self.model, base_model(self.model)):
            each.generation_config = served.generation_config  # peft passes its own on
        if served.adapter is not None:
            self.model.set_adapter(served.adapter)
            yield self.model
        elif hasattr(self.model, "disable_adapter"):
            with self.model.disable_adapter():
                yield self.model
        else:
            yield self.model


class _Progress:
    """Receives the tokens of an answer from transformers, as its `streamer`."""

    def __init__(
        self,
        request: GenerationRequest,
        decoder: AnswerDecoder,
        emit: Emit,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._decoder, self._emit, self._is_cancelled = decoder, emit, is_cancelled
        self._num_logprobs = request.num_logprobs
        limit_s = request.time_limit_s
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._logits: deque[Any] = deque()
        self._has_prompt = False

    @contextlib.contextmanager
    def reading_logits(self, model: Any) -> Iterator[None]:
        """Within the block, keep the logits of the model for the next token, if needed. The scores
        that transformers returns are those after its processors."""
        if self._num_logprobs is None:
            yield
            return

        def keep(module: Any, args: Any, output: Any) -> None:
            self._logits.append(output.logits[0, -1].float().clone())

        handle = base_model(model).register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def put(self, value: Any) -> None:
        """Take the prompt, then each new token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        for id in value.flatten().tolist():
            part = self._decoder.push(self._scored(id))
            if part is not None:
                self._emit(part)

    def end(self) -> None:
        """Do nothing: the end is known from the result."""

    def has_ended(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        """Return whether each row has ended, as a criterion of transformers."""
        import torch

        is_late = self._deadline is not None and time.monotonic() > self._deadline
        has_ended = is_late or self._decoder.is_stopped or self._is_cancelled()
        return torch.full((len(input_ids),), has_ended, device=input_ids.device)

    def _scored(self, id: int) -> GeneratedToken:
        if self._num_logprobs is None:
            return GeneratedToken(id)
        logprobs = self._logits.popleft().log_softmax(-1).clamp(min=_LOWEST_LOGPROB)
        values, ids = logprobs.topk(min(self._num_logprobs, len(logprobs)))
        likeliest = [*zip(ids.tolist(), values.tolist(), strict=True)]
        return GeneratedToken(id, float(logprobs[id]), likeliest)


def _end_ids(generation_config: Any) -> list[int]:
    ids = generation_config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else [*ids]


def generate_tokens(
    model: Any,
    tokenizer: Any,
    inputs: Any,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    **options: Any,
) -> list[int]:
    """Return the new tokens after a prompt.

    Args:
        inputs: the result of :meth:`ChatEncoder.encode`, on the model's device.
        options: further arguments of transformers' ``generate``.
    """
    import torch

    pad_id = tokenizer.pad_token_id
    torch.manual_seed(seed)
    with torch.no_grad():
        output = model.generate(
            **inputs,
            do_sample=temperature > 0,
            temperature=temperature or None,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id if pad_id is None else pad_id,
            use_cache=True,
            **options,
        )
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens
