"""Generate completions with transformers' engine for many requests, which keeps keys and values in
pages and computes requests of different lengths together: the engine ``continuous_batching``.

The engine draws the tokens itself, with torch's generator, so the completions depend on which
prompts a rank has. Its loop runs in a thread; this module adds all requests before the loop starts,
so that a run that is repeated gives the same completions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from paceline.core.errors import RunError
from paceline.core.files import human_bytes
from paceline.distributed.seeds import derive_seed
from paceline.distributed.timing.progress import ProgressTracker
from paceline.distributed.traffic import uncounted
from paceline.models.blocks import base_model
from paceline.rollouts.decoding import Completion
from paceline.train.rollouts.engines.base import (
    CompletionEngine,
    CompletionLimits,
    PromptTokens,
    count_without_room,
    evaluation_mode,
    share_of,
)
from paceline.train.state import TrainComponents

logger = logging.getLogger(__name__)

#: Seconds between looks at the engine.
_POLL_S = 0.5
#: Tokens of a page of keys and values: on GPUs as many as FlashAttention requires.
_PAGE_SIZE, _CPU_PAGE_SIZE = 256, 32
#: Tokens of a forward pass: as many as the prompts have, within these limits.
_FEWEST_TOKENS, _MOST_TOKENS = 256, 4096


class BatchedOutput(Protocol):
    """A request as transformers' engine returns it."""

    request_id: str
    generated_tokens: Sequence[int]
    logprobs: Sequence[float]
    error: str | None

    def is_finished(self) -> bool: ...


class BatchingEngine(CompletionEngine):
    """Generates the completions of this rank's prompts together.

    The model computes with the attention that it would have without packed rows.
    """

    def __init__(
        self, components: TrainComponents, progress: ProgressTracker, limits: CompletionLimits
    ) -> None:
        self.components, self.progress, self.limits = components, progress, limits

    def generate(
        self, prompts: Sequence[PromptTokens], purpose: str, step: int, num_completions: int
    ) -> dict[int, list[Completion]]:
        comm = self.components.strategy.world
        positions = share_of(comm, len(prompts))
        own = [prompts[position] for position in positions]
        seed = derive_seed(
            self.limits.seed, purpose, step, comm.rank, *(prompt.number for prompt in own)
        )
        with self._ready_model():
            completions = self._complete(own, seed, num_completions) if own else []
        return dict(zip(positions, completions, strict=True))

    @contextmanager
    def _ready_model(self) -> Iterator[None]:
        strategy = self.components.strategy
        needed = strategy.bytes_to_gather
        with ExitStack() as stack:
            stack.enter_context(uncounted())
            num_without = count_without_room(strategy.world, needed)
            if num_without:
                raise RunError(
                    "`grpo.engine: continuous_batching` needs all weights on each rank: they take"
                    " {size}, which does not fit in the free memory of {count:rank}",
                    code="engine-without-room",
                    fix="leave `grpo.engine` out, lower the batch size, or use more memory",
                    size=human_bytes(needed),
                    count=num_without,
                )
            stack.enter_context(strategy.gathered())
            stack.enter_context(evaluation_mode(self.components))
            yield

    def _complete(
        self, prompts: Sequence[PromptTokens], seed: int, num_completions: int
    ) -> list[list[Completion]]:
        """Return the completions of each prompt."""
        device = self.components.strategy.world.device
        devices = [device] if device.type == "cuda" else []
        # The engine seeds torch's generator, which other parts of the run use too.
        with torch.random.fork_rng(devices):
            manager = self._start(prompts, seed, num_completions)
            try:
                outputs = self._outputs(manager, len(prompts) * num_completions)
            finally:
                manager.stop(hard_stop=True)
                manager.destroy()
        return [
            [self._completion(outputs[name]) for name in _names(number, num_completions)]
            for number in range(len(prompts))
        ]

    def _start(self, prompts: Sequence[PromptTokens], seed: int, num_completions: int) -> Any:
        """Start the engine's loop with a request for each prompt, and return its manager."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        limits, sampling = self.limits, self.limits.sampling
        generation = GenerationConfig(
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            num_return_sequences=num_completions,
            max_new_tokens=limits.max_tokens,
            eos_token_id=sorted(limits.end_ids) or [-1],
        )
        on_gpu = self.components.strategy.world.device.type == "cuda"
        page = _PAGE_SIZE if on_gpu else _CPU_PAGE_SIZE
        lengths = [len(prompt.ids) + limits.max_tokens for prompt in prompts]
        # If everything fits, the order of the requests does not depend on the free memory.
        pages = sum(num_completions * (math.ceil(length / page) + 1) for length in lengths)
        num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        model = PagedModel(self.components)
        for num_blocks in (pages, None):
            batching = ContinuousBatchingConfig(
                return_logprobs=True,
                seed=seed & 0xFFFFFFFF,
                page_size=page,
                num_blocks=num_blocks,
                max_batch_tokens=min(max(num_prompt_tokens, _FEWEST_TOKENS), _MOST_TOKENS),
                max_requests_per_batch=len(prompts) * num_completions,
                auto_switch_to_flash=False,
            )
            manager: Any = model.manager(generation, batching)
            try:
                manager.warmup()  # allocates the pages in this thread
            except MemoryError:
                if num_blocks is None:
                    raise
                continue
            break
        _convert_states(manager.batch_processor.cache)
        for number, prompt in enumerate(prompts):
            # The engine computes all but the last token of a prompt, then copies the request.
            can_copy = len(prompt.ids) > 1
            manager.num_return_sequences = num_completions if can_copy else 1
            names = _names(number, num_completions)
            for name in names[:1] if can_copy else names:
                manager.add_request(
                    prompt.ids,
                    request_id=name,
                    max_new_tokens=limits.max_tokens,
                    eos_token_id=sorted(limits.end_ids),
                )
        manager.start()
        return manager

    def _outputs(self, manager: Any, count: int) -> dict[str, BatchedOutput]:
        """Return the finished requests by name."""
        outputs: dict[str, BatchedOutput] = {}
        num_passes = 0
        while len(outputs) < count:
            output: BatchedOutput | None = manager.get_result(timeout=_POLL_S)
            now = getattr(manager, "current_batch", 0)
            if output is not None or now != num_passes:
                num_passes = now
                self.progress.tick()
            if output is None:
                error = manager.background_thread_status.fatal_error
                if error is not None:
                    raise error
                if not manager.is_running():
                    raise _failed("its loop has ended")
            elif output.error is not None:
                error = manager.background_thread_status.fatal_error
                raise error or _failed(output.error)
            elif output.is_finished():
                outputs[output.request_id] = output
        return outputs

    def _completion(self, output: BatchedOutput) -> Completion:
        ids, logps = list(output.generated_tokens), list(output.logprobs)
        if not ids or len(ids) != len(logps):
            raise _failed(f"{len(ids)} tokens with {len(logps)} log-probabilities")
        return Completion(ids, logps, ids[-1] not in self.limits.end_ids)


class PagedModel:
    """The model as transformers' engine sees it: a forward pass is one of the trained model, with
    its adapters and in its precision, also in the engine's thread."""

    def __init__(self, components: TrainComponents) -> None:
        self._components = components
        self._base: Any = base_model(components.model)
        #: Type of the keys and values.
        self.dtype: torch.dtype = components.precision.dtype or self._base.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __call__(self, **inputs: Any) -> Any:
        with self._components.precision.autocast():
            return self._components.model(**inputs)

    def manager(self, generation: Any, batching: Any) -> Any:
        """Return the manager of transformers' engine for this model."""
        return type(self._base).init_continuous_batching(self, generation, batching)

    def eval(self) -> PagedModel:
        """Return this object; the model already is in evaluation mode."""
        return self


def _convert_states(cache: Any) -> None:
    """Let a cache convert keys and values to its type. With autocast, keys may be float32 because
    of their positions or norm, and values are not."""
    update = cache.update

    def convert_and_update(
        key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        return update(key_states.to(cache.dtype), value_states.to(cache.dtype), *args, **kwargs)

    cache.update = convert_and_update


def _names(number: int, num_completions: int) -> list[str]:
    """Return the names that the engine gives the completions of a request."""
    return [str(number), *(f"{number}__child#{child}" for child in range(num_completions - 1))]


def _failed(reason: str) -> RunError:
    return RunError(
        "transformers' continuous batching failed: {reason}",
        code="batching-failed",
        fix="leave `grpo.engine` out",
        reason=reason,
    )
