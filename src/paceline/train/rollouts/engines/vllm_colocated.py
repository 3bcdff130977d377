"""Generate completions with a vLLM on each rank's GPU, in the process of the rank: the engine
``vllm`` with ``vllm_mode: colocate``. It is written after TRL 1.16, and has never run with vLLM:
nothing here is tested but :mod:`paceline.train.rollouts.engines.weights`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.config.schema import Config
from paceline.distributed.seeds import derive_seed
from paceline.distributed.timing.progress import ProgressTracker
from paceline.distributed.traffic import uncounted
from paceline.models.builtin import resolve_model
from paceline.rollouts.decoding import Completion
from paceline.train.rollouts.engines.base import (
    CompletionEngine,
    CompletionLimits,
    PromptTokens,
    share_of,
)
from paceline.train.rollouts.engines.weights import check_mergeable, named_weights
from paceline.train.state import TrainComponents

#: Seconds that vLLM may take for the completions of a rank. It reports no progress meanwhile.
PATIENCE_S = 3600.0
#: Largest number of tokens of a forward pass, as in TRL: with vLLM's default, its measurement of
#: the memory finds too little.
_MOST_TOKENS = 4096


class ColocatedVllm(CompletionEngine):
    """Generates with vLLM in this process, to which the weights are given before each rollout.

    Args:
        config: config of the run.
    """

    def __init__(
        self,
        config: Config,
        components: TrainComponents,
        progress: ProgressTracker,
        limits: CompletionLimits,
    ) -> None:
        from vllm import LLM

        self.components, self.progress, self.limits = components, progress, limits
        self.sleeps = config.grpo.vllm_enable_sleep_mode
        check_mergeable(components.model)
        world, settings = components.strategy.world, config.grpo
        # vLLM reads these variables, and uses the process group of the run.
        env = world.env
        os.environ.setdefault("RANK", str(env.rank))
        os.environ.setdefault("LOCAL_RANK", str(env.local_rank))
        os.environ.setdefault("WORLD_SIZE", str(env.world_size))
        dtype = components.precision.dtype or torch.float32
        with progress.patient(PATIENCE_S):
            self.llm: Any = LLM(
                model=resolve_model(config.model),
                dtype=str(dtype).removeprefix("torch."),
                tensor_parallel_size=1,
                gpu_memory_utilization=settings.vllm_gpu_memory_utilization,
                max_model_len=settings.vllm_max_model_length or config.train_args.max_length,
                max_num_batched_tokens=_MOST_TOKENS,
                enable_sleep_mode=self.sleeps,
                distributed_executor_backend="external_launcher",
                seed=world.rank,
                logprobs_mode="processed_logprobs",
                trust_remote_code=config.trust_remote_code,
            )
            if self.sleeps:
                self.llm.sleep(level=2)

    def generate(
        self, prompts: Sequence[PromptTokens], purpose: str, step: int, num_completions: int
    ) -> dict[int, list[Completion]]:
        from vllm import SamplingParams

        positions = share_of(self.components.strategy.world, len(prompts))
        own = [prompts[position] for position in positions]
        limits, sampling = self.limits, self.limits.sampling
        self._synchronize()
        params = [
            SamplingParams(
                n=num_completions,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                max_tokens=limits.max_tokens,
                stop_token_ids=sorted(limits.end_ids),
                logprobs=0,
                detokenize=False,
                seed=derive_seed(limits.seed, purpose, step, prompt.number) & 0x7FFFFFFF,
            )
            for prompt in own
        ]
        inputs = [{"prompt_token_ids": prompt.ids} for prompt in own]
        with self.progress.patient(PATIENCE_S), self._awake():
            outputs = self.llm.generate(inputs, params, use_tqdm=False) if own else []
        return {
            position: [self._completion(each) for each in output.outputs]
            for position, output in zip(positions, outputs, strict=True)
        }

    def _synchronize(self) -> None:
        """Give vLLM the weights that the model has now. A collective."""
        strategy = self.components.strategy
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        with uncounted(), strategy.gathered(), torch.no_grad():
            for pair in named_weights(self.components.model):
                runner.model.load_weights([pair])
                self.progress.tick()
        self.llm.reset_prefix_cache()

    @contextmanager
    def _awake(self) -> Any:
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        yield
        if self.sleeps:
            self.llm.sleep(level=2)

    def _completion(self, output: Any) -> Completion:
        ids = list(output.token_ids)
        logps = [
            float(by_token[token].logprob)
            for token, by_token in zip(ids, output.logprobs, strict=True)
        ]
        return Completion(ids, logps, ids[-1] not in self.limits.end_ids)
