"""The predicted traffic of tensor parallelism is that of the collectives which the split model
issues, on the meta device."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import write_config
from families import FAMILIES, TOKENS
from transformers import AutoConfig

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.checks.step import step_failure
from paceline.models.language import language_model_on_meta
from paceline.models.shape.outline import outline
from paceline.models.transforms.activation_offloading import reduce_activations
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.strategies.tensor.model_check import ShapeCommunicator
from paceline.strategies.tensor.shard import TensorParallelizer

AXES = ParallelDims(tensor=2)
TOKENS_OF_STEP = 2  # of `step_failure`
LINEAR_ATTENTION = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
#: Families whose sizes are those of `adapter_families`.
OTHERS: dict[str, dict[str, Any]] = {
    "olmo3": {},
    "qwen3_5_text": LINEAR_ATTENTION,
    "gemma3n_text": {},
    "granitemoehybrid": {},
}
#: Separate or shared inputs of attention and MLP, gathered outputs, norms and dropout after the
#: last layer of a block, latent attention, experts.
NAMES = ("llama", "phi", "phi3", "gpt2", "gemma2", "glm4", "olmo2", "falcon_7b", "qwen2_moe")


class Recorder(ShapeCommunicator):
    """Counts the bytes that a rank sends in each kind of collective."""

    def __init__(self) -> None:
        super().__init__(AXES)
        self.sent: Counter[str] = Counter()

    def all_reduce(self, tensor: torch.Tensor, *_: Any) -> None:
        self.sent["all_reduce"] += all_reduce_bytes(tensor.nbytes, self.size)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self.sent["reduce_scatter"] += scatter_bytes(tensor.nbytes, self.size)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self.sent["all_gather"] += scatter_bytes(output.nbytes, self.size)


def write_family(name: str, folder: Path) -> None:
    if name in OTHERS:
        write_config(name, folder, **OTHERS[name])
        return
    kind, numbers = FAMILIES[name]
    AutoConfig.for_model(kind, **{**TOKENS, **numbers}).save_pretrained(folder)


def sent_and_predicted(config: Config) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a step over a few tokens, by collective."""
    model: Any = language_model_on_meta(config)
    shape = outline(model, config)
    assert shape.layer_uses is not None
    # Gradients that are summed after backward do not depend on the number of tokens.
    larger, smaller = (
        Counter(dict(estimate_cost("hybrid", shape, AXES, Workload(1, tokens), config).traffic))
        for tokens in (2 * TOKENS_OF_STEP, TOKENS_OF_STEP)
    )
    larger.subtract(smaller)
    reduce_activations(model, config)
    recorder = Recorder()
    TensorParallelizer(model, recorder, config.parallel)
    assert step_failure(model) is None
    # The step gathers the logits. Training reduces three numbers of each token instead.
    logits_bytes = 4 * TOKENS_OF_STEP * model.config.get_text_config().vocab_size
    recorder.sent["all_gather"] -= scatter_bytes(logits_bytes, AXES.size)
    recorder.sent["all_reduce"] += all_reduce_bytes(3 * 4 * TOKENS_OF_STEP, AXES.size)
    return dict(+recorder.sent), dict(+larger)


def config_of(folder: Path, lora: bool, checkpointing: str = "none", **parallel: Any) -> Config:
    return Config(
        model=str(folder),
        dataset="d",
        lora={"enable": lora, "rank": 4},
        train_args={"max_length": 64, "gradient_checkpointing": checkpointing},
        parallel={"mode": "tensor", "sequence_parallel": False, **parallel},
    )


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_traffic_is_that_of_the_split_model(name: str, tmp_path: Path) -> None:
    write_family(name, tmp_path)
    for lora in (False, True):
        # GraniteMoeHybrid cannot be recomputed on the meta device.
        for checkpointing in ("none", "full") if name != "granitemoehybrid" else ("none",):
            sent, predicted = sent_and_predicted(config_of(tmp_path, lora, checkpointing))
            assert predicted == sent, (lora, checkpointing)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
def test_traffic_with_sequence_parallelism(name: str, tmp_path: Path) -> None:
    write_family(name, tmp_path)
    for lora in (False, True):
        for checkpointing in ("none", "full"):
            config = config_of(tmp_path, lora, checkpointing, sequence_parallel=True)
            sent, predicted = sent_and_predicted(config)
            assert predicted == sent, (lora, checkpointing)
