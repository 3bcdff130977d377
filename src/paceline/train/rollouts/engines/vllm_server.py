"""Generate completions with a server of vLLM: the engine ``vllm`` with ``vllm_mode: server``. Each
rank asks for the completions of its prompts, and rank 0 sends the weights before each rollout, with
the protocol of ``vllm serve`` that TRL 1.16 uses. It has never run with vLLM: nothing here is
tested but :mod:`paceline.train.rollouts.engines.weights`.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import torch
from pydantic import JsonValue

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.seeds import derive_seed
from paceline.distributed.timing.progress import ProgressTracker
from paceline.distributed.traffic import uncounted
from paceline.rollouts.decoding import Completion
from paceline.train.rollouts.engines.base import (
    CompletionEngine,
    CompletionLimits,
    PromptTokens,
    share_of,
)
from paceline.train.rollouts.engines.weights import check_mergeable, named_weights
from paceline.train.state import TrainComponents

#: Seconds that the server may take for an answer.
_ANSWER_S = 3600.0
_POLL_S = 2.0
#: How to start a server that can do what a run needs.
COMMAND = (
    'VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config \'{"backend": "nccl"}\''
    " --logprobs-mode processed_logprobs"
)


class ServedLogprobs(TypedDict):
    """The log-probabilities of a completion; null for a token whose one is not known."""

    token_logprobs: list[float | None]


class ServedChoice(TypedDict):
    """A completion as the server sends it."""

    token_ids: list[int]
    logprobs: ServedLogprobs


class ServerVllm(CompletionEngine):
    """Generates with a server that has been started by the user.

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
        self.components, self.progress, self.limits = components, progress, limits
        self.url, self.port = config.grpo.vllm_server_base_url, config.grpo.vllm_group_port
        self.world = components.strategy.world
        self._group: Any = None
        check_mergeable(components.model)
        self._wait(config.grpo.vllm_server_timeout)
        models: Any = self._get("/v1/models")
        self.model: str = models["data"][0]["id"]
        with rank_zero_phase(self.world, "connecting to the vLLM server"):
            if self.world.is_rank_zero:
                self._connect()

    def generate(
        self, prompts: Sequence[PromptTokens], purpose: str, step: int, num_completions: int
    ) -> dict[int, list[Completion]]:
        positions = share_of(self.world, len(prompts))
        self._synchronize()
        self.world.barrier()

        def complete(position: int) -> list[Completion]:
            prompt = prompts[position]
            seed = derive_seed(self.limits.seed, purpose, step, prompt.number)
            return self._complete(prompt, seed & 0x7FFFFFFF, num_completions)

        with self.progress.patient(_ANSWER_S), ThreadPoolExecutor(max(1, len(positions))) as pool:
            results = []
            for completions in pool.map(complete, positions):
                self.progress.tick()
                results.append(completions)
        return dict(zip(positions, results, strict=True))

    def _complete(self, prompt: PromptTokens, seed: int, num_completions: int) -> list[Completion]:
        limits, sampling = self.limits, self.limits.sampling
        body: dict[str, JsonValue] = {
            "model": self.model,
            "prompt": [*prompt.ids],
            "n": num_completions,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_tokens": limits.max_tokens,
            "stop_token_ids": [*sorted(limits.end_ids)],
            "logprobs": 0,
            "return_token_ids": True,
            "seed": seed,
        }
        answer: Any = self._post("/v1/completions", body)
        choices: list[ServedChoice] = answer["choices"]
        return [self._completion(choice) for choice in choices]

    def _completion(self, choice: ServedChoice) -> Completion:
        ids = choice["token_ids"]
        known = choice["logprobs"]["token_logprobs"]
        logps = [float("nan") if logp is None else float(logp) for logp in known]
        if not ids or len(ids) != len(logps):
            raise _failed(f"{len(ids)} tokens with {len(logps)} log-probabilities")
        return Completion(ids, logps, ids[-1] not in self.limits.end_ids)

    # -- weights
    def _connect(self) -> None:
        """Open the group through which the server receives weights."""
        from vllm.utils.network_utils import get_ip

        info: Any = self._get("/server_info?config_format=json")
        served = info["vllm_config"]
        logprobs = served["model_config"]["logprobs_mode"]
        if served["weight_transfer_config"] is None or logprobs != "processed_logprobs":
            raise _not_ready(self.url)
        workers: Any = self._get("/get_world_size")
        init: dict[str, JsonValue] = {
            "master_address": get_ip(),
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": workers["world_size"] + 1,
            **({"packed": True} if _packs_at_start() else {}),
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self._post, "/init_weight_transfer_engine", {"init_info": init})
            self._group = _open_group(init)
            joined.result()

    def _synchronize(self) -> None:
        """Send the server the weights that the model has now. A collective."""
        with (
            uncounted(),
            self.components.strategy.gathered(),
            torch.no_grad(),
            rank_zero_phase(self.world, "sending the weights to the vLLM server"),
        ):
            if self.world.is_rank_zero:
                self._send()

    def _send(self) -> None:
        dtype = self.components.precision.dtype or torch.float32

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in named_weights(self.components.model):
                self.progress.tick()
                yield name, value.to(dtype).contiguous()

        shapes = [(name, list(value.shape)) for name, value in named_weights(self.components.model)]
        update: dict[str, JsonValue] = {
            "names": [name for name, _ in shapes],
            "dtype_names": [str(dtype).removeprefix("torch.")] * len(shapes),
            "shapes": [[*shape] for _, shape in shapes],
            **({} if _packs_at_start() else {"packed": True}),
        }
        self._post("/start_weight_update", {})
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self._post, "/update_weights", {"update_info": update})
            _broadcast(weights(), self._group)
            received.result()
        self._post("/finish_weight_update", {})
        self._post("/reset_prefix_cache", {})

    # -- requests
    def _wait(self, limit_s: float) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + limit_s
        with self.progress.patient(limit_s + 60.0):
            while True:
                try:
                    urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                    return
                except (OSError, ValueError):
                    if time.monotonic() > deadline:
                        raise _not_ready(self.url) from None
                time.sleep(_POLL_S)

    def _get(self, path: str) -> JsonValue:
        return ask_server(urllib.request.Request(f"{self.url}{path}"))

    def _post(self, path: str, body: dict[str, JsonValue]) -> JsonValue:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return ask_server(urllib.request.Request(f"{self.url}{path}", data, headers))


def ask_server(request: urllib.request.Request) -> JsonValue:
    """Return the answer of the server to a request, with the key that the server may require.

    Raises:
        RunError: the server cannot be reached, or refuses the request.
    """
    if key := os.environ.get("VLLM_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        raise _failed(f"{error.code} {error.read().decode('utf-8', 'replace')[:500]}") from error
    except OSError as error:
        raise _failed(str(error)) from error
    answer: JsonValue = json.loads(content) if content else None
    return answer


def _packs_at_start() -> bool:
    """Return whether this vLLM is told at the start that tensors are sent together (since 0.28)."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return not hasattr(NCCLWeightTransferEngine, "trainer_init")


def _open_group(init: dict[str, JsonValue]) -> Any:
    if _packs_at_start():
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        return trainer_init(init)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine.trainer_init(init)


def _broadcast(weights: Iterator[tuple[str, torch.Tensor]], group: Any) -> None:
    if _packs_at_start():
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=weights, group=group, src=0, post_iter_func=lambda pair: pair[1]
        )
        return
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
    )

    NCCLWeightTransferEngine.trainer_send_weights(
        iterator=weights, trainer_args=NCCLTrainerSendWeightsArgs(group=group, packed=True)
    )


def _not_ready(url: str) -> ConfigError:
    return ConfigError(
        "there is no server of vLLM at {url} that can receive weights",
        code="vllm-server-not-ready",
        fix="start it with `{command}`, or set `grpo.vllm_server_base_url` and"
        " `grpo.vllm_server_timeout`",
        url=url,
        command=COMMAND,
    )


def _failed(reason: str) -> RunError:
    return RunError(
        "the vLLM server could not answer: {reason}",
        code="vllm-server-failed",
        fix="read the messages of the server",
        reason=reason,
    )
