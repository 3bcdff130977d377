"""Pipeline stages on real ranks: the gradients of the full model, for each schedule and for
micro-batches of different shapes."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.blocks import find_blocks
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.strategies.pipeline.cost import pipeline_cost
from paceline.strategies.pipeline.model_check import check_blocks
from paceline.strategies.pipeline.partition import PartitionedModel
from paceline.strategies.pipeline.runner import PipelineRunner, divide_model
from paceline.strategies.pipeline.schedule import _run_backward

# Lengths of the samples of each micro-batch, which are packed into one row.
LENGTHS = ((5, 3), (7,), (2, 2, 9), (4, 4))
HIDDEN = 16


def make_config(schedule: str, **parallel: Any) -> Config:
    return Config(
        model="m",
        dataset="d",
        parallel={"pipeline_schedule": schedule, **parallel},
        train_args={"gradient_accumulation_steps": len(LENGTHS)},
    )


def make_language_model(layers: int = 4, tied: bool = False) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=50, num_hidden_layers=layers, tie_word_embeddings=tied, **sizes)
    )


def language_step(lengths: Any, bf16: bool, number: int, model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    total = sum(lengths[number])
    ids = torch.randint(0, 50, (1, total), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths[number]]).unsqueeze(0)
    keep = torch.arange(1, total)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep
        ).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[0, keep], reduction="sum")
    return loss / 40


def make_image_model() -> nn.Module:
    from paceline.models.classifiers.images import build_small_cnn

    torch.manual_seed(2)
    return nn.ModuleDict(
        {"body": build_small_cnn(in_channels=1, image_size=8, hidden=8, num_classes=3)}
    )


def image_step(number: int, model: Any) -> torch.Tensor:
    images = torch.randn(2 + number % 2, 1, 8, 8, generator=torch.Generator().manual_seed(number))
    return (
        functional.cross_entropy(
            model["body"](images), torch.arange(len(images)) % 3, reduction="sum"
        )
        / 10
    )


def compare(
    world: Communicator, model: nn.Module, step: Any, config: Config, steps: int = 1
) -> dict[str, Any]:
    """Compare gradients, losses and evaluation of the pipeline with those of the full model. No
    optimizer step is made."""
    full, count = copy.deepcopy(model), len(LENGTHS)
    expected = [step(number, full) for number in range(count)]
    for loss in expected:
        loss.backward()
    expected_parameters = dict(full.named_parameters())
    pipeline = PipelineRunner(model, world, config)
    for _ in range(steps):
        model.zero_grad()
        before = world.traffic.total
        losses: dict[int, float] = {}

        def micro_step(
            number: int, module: nn.Module, seen: dict[int, float] = losses
        ) -> torch.Tensor:
            loss = step(number, module)
            seen[number] = float(loss.detach())
            return loss

        pipeline.backward(micro_step, count)
        pipeline.sum_shared_gradients()
        sent = world.traffic.total - before
    largest_error = 0.0
    names = []
    for name, parameter in model.named_parameters():
        names.append(name)
        assert set(pipeline.division.stages[name]) & set(pipeline.local_stages), name
        if not parameter.requires_grad:
            continue
        expected_grad = expected_parameters[name].grad
        if expected_grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        scale = expected_grad.abs().max().clamp(min=1e-3)
        largest_error = max(
            largest_error, float((parameter.grad - expected_grad).abs().max() / scale)
        )
    if losses:
        largest_error = max(
            largest_error,
            max(abs(losses[number] - float(expected[number].detach())) for number in range(count)),
        )
    evaluated = pipeline.evaluate(lambda module: {"loss": step(2, module)}, model)
    with torch.no_grad():
        expected_loss = float(step(2, full))
    return {
        "largest_error": largest_error,
        "names": names,
        "all": list(expected_parameters),
        "owned": [name for name in expected_parameters if pipeline.owns(name)],
        "sent": sent,
        "losses": sorted(losses),
        "evaluated": None if evaluated is None else abs(float(evaluated["loss"]) - expected_loss),
        "notices": pipeline.notices,
    }


def add_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    return adapted.bfloat16()


def enable_recomputation(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def make_recomputed_images() -> nn.Module:
    model = make_image_model()
    for block in model["body"]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def run_on_two_ranks(world: Communicator) -> dict[str, Any]:
    float32_step = partial(language_step, LENGTHS, False)
    results = {
        schedule: compare(
            world, make_language_model(), float32_step, make_config(schedule), steps=2
        )
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
    }
    for schedule in ("1f1b", "zero_bubble"):
        results[f"tied {schedule}"] = compare(
            world, make_language_model(tied=True), float32_step, make_config(schedule)
        )
        results[f"recomputed {schedule}"] = compare(
            world, enable_recomputation(make_language_model()), float32_step, make_config(schedule)
        )
    bf16_step = partial(language_step, LENGTHS, True)
    results["bf16"] = compare(world, make_language_model(), bf16_step, make_config("1f1b"))
    results["adapters"] = compare(
        world, add_adapters(make_language_model()), bf16_step, make_config("interleaved_1f1b")
    )
    results["images"] = compare(world, make_image_model(), image_step, make_config("1f1b"), steps=2)
    results["images recomputed"] = compare(
        world, make_recomputed_images(), image_step, make_config("gpipe")
    )
    world.barrier()
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_on_two_ranks, 2, timeout_s=240)


def test_gradients_losses_and_evaluation_match_full_model(
    results: list[dict[str, Any]],
) -> None:
    for name in results[0]:
        bound = 2e-2 if name in ("bf16", "adapters") else 1e-5
        for rank, result in enumerate(rank[name] for rank in results):
            assert result["largest_error"] < bound, f"{name} on rank {rank}"
            assert result["losses"] == ([] if rank == 0 else [0, 1, 2, 3]), name
            assert (result["evaluated"] is None) == (rank == 0), name
            assert rank == 0 or result["evaluated"] < bound, name
            assert result["notices"] == [], name


def test_parameters_are_on_the_stages_that_use_them_and_owned_once(
    results: list[dict[str, Any]],
) -> None:
    for name in results[0]:
        first, second = (rank[name] for rank in results)
        assert sorted(first["owned"] + second["owned"]) == sorted(first["all"]), name
        both = set(first["names"]) & set(second["names"])
        assert both == ({"model.embed_tokens.weight"} if name.startswith("tied") else set()), name
        assert set(first["names"]) | set(second["names"]) == set(first["all"]), name


@pytest.mark.parametrize(
    ("name", "schedule", "tied"),
    [
        ("gpipe", "gpipe", False),
        ("1f1b", "1f1b", False),
        ("interleaved_1f1b", "interleaved_1f1b", False),
        ("zero_bubble", "zero_bubble", False),
        ("tied 1f1b", "1f1b", True),
    ],
)
def test_bytes_sent_match_prediction(
    results: list[dict[str, Any]], name: str, schedule: str, tied: bool
) -> None:
    model = make_language_model(tied=tied)
    shape = outline(model, make_config(schedule))
    shape = type(shape)(**{**vars(shape), "block_output_elements": (HIDDEN,) * len(shape.blocks)})
    positions = sum(map(sum, LENGTHS)) / len(LENGTHS)
    cost = pipeline_cost(
        shape, 2, 2, schedule, Workload(micro_batches=len(LENGTHS), positions=positions)
    )
    assert tuple(rank[name]["sent"] for rank in results) == cost.send_bytes
    assert [set(rank) for rank in cost.parameters] == [set(rank[name]["names"]) for rank in results]


class SkipConnection(nn.Module):
    """A model whose output depends on the output of the first block directly, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        out = first
        for block in self.blocks[1:]:
            out = block(out)
        return out + first


class WorkBetweenBlocks(SkipConnection):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def simple_step(number: int, model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4) + number).square().sum()


def run_on_four_ranks(world: Communicator) -> dict[str, Any]:
    step = partial(language_step, LENGTHS, False)
    results = {
        schedule: compare(
            world, make_language_model(layers=8, tied=True), step, make_config(schedule)
        )
        for schedule in ("1f1b", "zero_bubble")
    }
    world.barrier()
    # Two replicas of two stages: the pipelines run independently.
    mesh = Communicator(
        RankEnv(world.rank, 4, world.rank, 4), world.device, ParallelDims(data=2, pipeline=2)
    )
    group = mesh.subgroup("pipeline")
    results["replicas"] = compare(
        group, make_language_model(), step, make_config("interleaved_1f1b")
    )
    # The schedule needs at least four micro-batches.
    pipeline = PipelineRunner(make_language_model(), world, make_config("1f1b"))
    pipeline.backward(partial(language_step, LENGTHS, False), 3)
    results["notices"] = pipeline.notices
    world.barrier()
    return results


@pytest.mark.soak
def test_four_stages_and_replicas_of_two_stages() -> None:
    ranks = run_ranks(run_on_four_ranks, 4, timeout_s=240)
    for name in ("1f1b", "zero_bubble", "replicas"):
        assert [rank[name]["largest_error"] < 1e-5 for rank in ranks] == [True] * 4, name
    assert [rank["replicas"]["evaluated"] is None for rank in ranks] == [True, True, False, False]
    for rank in ranks:
        assert len(rank["notices"]) == 1
        assert rank["notices"][0][0] == "warning"
        assert "gpipe" in rank["notices"][0][1]
    counts = [len(rank["1f1b"]["names"]) for rank in ranks]
    assert sum(counts) == len(ranks[0]["1f1b"]["all"]) + 1  # the tied weight is on two ranks


def make_runner(model: nn.Module) -> PipelineRunner:
    return PipelineRunner(
        model, Communicator(RankEnv(0, 2, 0, 2), torch.device("cpu")), make_config("1f1b")
    )


def test_rejects_models_that_are_not_a_chain_of_blocks() -> None:
    with raises_error(ConfigError, code="not-a-pipeline", naming="ModuleList"):
        make_runner(nn.Linear(2, 2))
    layer = nn.Linear(2, 2)
    with raises_error(ConfigError, code="not-a-pipeline"):
        make_runner(nn.Sequential(layer, nn.Linear(2, 2), layer))
    with raises_error(ConfigError, code="too-many-stages"):
        make_runner(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    reusing_model = make_language_model()
    reusing_model.model.layers[2].forward = lambda hidden, **others: reusing_model.model.layers[1](
        hidden, **others
    )
    with raises_error(ConfigError, code="not-a-pipeline"):
        make_runner(reusing_model)


def partition_in_two(model: nn.Module) -> PartitionedModel:
    blocks = find_blocks(model)
    return PartitionedModel(
        model, blocks, check_blocks(model, blocks)[0], divide_model(model, blocks, 2), [0, 1]
    )


def test_probes_each_shape_once() -> None:
    model, lengths, embedded = make_language_model(), ((5, 3), (7,), (4, 4), (2, 5)), []
    partitioned = partition_in_two(model)
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: embedded.append(args))
    calls = [partial(language_step, lengths, False, number, model) for number in range(4)]
    probed = [partitioned.probe(call) for call in calls]
    assert probed == [((1, sum(each), HIDDEN), torch.float32) for each in lengths]
    assert len(embedded) == 2
    partitioned.run(0, calls[0], None)
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64))  # outside of the pipeline
    assert len(embedded) == 4


class BatchModel(nn.Sequential):
    """Takes its input in an object."""

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch.values)


def test_probes_each_micro_batch_whose_tensors_are_unknown() -> None:
    model = BatchModel(nn.Linear(4, 4), nn.Linear(4, 4))
    partitioned = partition_in_two(model)
    shapes = [
        partitioned.probe(partial(model, SimpleNamespace(values=torch.ones(rows, 4))))[0]
        for rows in (1, 2)
    ]
    assert shapes == [(1, 4), (2, 4)]


def test_detects_data_flow_outside_the_blocks() -> None:
    model = WorkBetweenBlocks()
    with pytest.raises(RunError, match="changes the output of block 1 before block 2"):
        partition_in_two(model).run(0, partial(simple_step, 0, model), None)
    model = SkipConnection()
    partitioned = partition_in_two(model)
    hidden = partitioned.run(0, partial(simple_step, 0, model), None)
    assert not hidden.isnan().any()
    # The second stage has no output of the first block; PipelineRunner rejects such a model.
    assert partitioned.run(1, partial(simple_step, 0, model), hidden).isnan()


@pytest.mark.parametrize("runs_inputs_only", [False, True])
def test_lack_of_memory_in_backward_is_recognized(runs_inputs_only):
    def lack_memory(gradient):
        raise torch.OutOfMemoryError("out of memory")

    layer = nn.Linear(2, 2)
    received = torch.ones(1, 2, requires_grad=True)
    hidden = layer(received)
    hidden.register_hook(lack_memory)
    output, gradients = hidden * 2, (torch.ones(1, 2),)
    if runs_inputs_only:
        run, weights = stage_backward_input, (layer.parameters(),)
    else:
        run, weights = stage_backward, ()
    with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory$"):
        _run_backward(run, [output], gradients, [received], *weights)
