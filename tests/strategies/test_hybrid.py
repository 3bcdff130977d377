"""`hybrid`: layouts match one rank in losses, weights, norms and state, and the predicted memory
and traffic."""

import contextlib

import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from states import assemble, copy_shards

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import LogitTransform
from paceline.models.head.transform import output_head
from paceline.models.shape.outline import outline
from paceline.models.transforms.activation_checkpointing import checkpoint_activations
from paceline.parallel.cost import Workload
from paceline.parallel.registry import check_strategy, estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes
from paceline.strategies.ddp.strategy import SingleDeviceStrategy
from paceline.strategies.hybrid.strategy import HybridStrategy

TOKENS, STEPS, MICRO_BATCHES = 14, 20, 2


def make_model(lora=False, **train_args):
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    model.config.use_cache = False
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    checkpoint_activations(model, train_args.get("gradient_checkpointing", "none"))
    return model


def make_config(parallel, train_args):
    return Config(model="m", dataset="d", parallel=parallel, train_args=train_args)


def train(world, axes, parallel, train_args, lora=False, state=None, first_step=0, steps=STEPS):
    """Train and return losses, norms, bytes sent in the last step, bytes of the state, and the
    tensor shards."""
    world = Communicator(world.env, world.device, axes)
    config = make_config(parallel, train_args)
    strategy = (SingleDeviceStrategy if axes.size == 1 else HybridStrategy)(config, world)
    model = strategy.setup(make_model(lora, **train_args))
    optimizer = strategy.setup_optimizer(
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)
    )
    if state is not None:
        load_state(strategy, state)
    model.train()
    micro_batches_per_replica = MICRO_BATCHES // axes.replicas
    losses, norms, sent = [], [], 0
    for step in range(first_step, first_step + steps):
        seen = []

        def micro_step(number, module, step=step, seen=seen):
            number += strategy.replica * micro_batches_per_replica
            torch.manual_seed(100 * step + number)
            ids = torch.randint(0, 96, (1, TOKENS))
            position_ids = torch.cat([torch.arange(9), torch.arange(5)]).unsqueeze(0)
            with (
                torch.autocast("cpu", torch.bfloat16)
                if config.train_args.precision == "bf16-mixed"
                else contextlib.nullcontext()
            ):
                chunks = ChunkedLoss(
                    output_head(module),
                    LogitTransform(),
                    ids[0, 1:],
                    torch.arange(TOKENS - 1),
                    TOKENS,
                )
                with chunked_loss(chunks):
                    output = module(input_ids=ids, position_ids=position_ids, use_cache=False)
                loss = chunks.result(output.logits) / (MICRO_BATCHES * TOKENS)
            seen.append(loss.detach())
            return loss

        before = world.traffic.total
        strategy.forward_backward(micro_step, micro_batches_per_replica)
        norms.append(float(strategy.clip_grad_norm(0.5)))
        strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
        sent = world.traffic.total - before
        losses.append(world.sum(float(sum(seen)) if strategy.reports_loss else 0.0)[0])
    results = losses, norms, sent, memory_bytes(strategy), copy_shards(strategy.state_shards())
    assert optimizer is strategy.optimizer
    world.barrier()
    return results


LAYOUTS = [
    (ParallelDims(tensor=2), {"sequence_parallel": False}, {}, False),
    pytest.param(ParallelDims(tensor=2), {}, {}, False, marks=pytest.mark.soak),
    pytest.param(
        ParallelDims(tensor=2),
        {},
        {"gradient_checkpointing": "full"},
        False,
        marks=pytest.mark.soak,
    ),
    pytest.param(
        ParallelDims(tensor=2),
        {"sequence_parallel": False},
        {"gradient_checkpointing": "full"},
        True,
        marks=pytest.mark.soak,
    ),
    pytest.param(
        ParallelDims(tensor=2),
        {"sequence_parallel": False},
        {"gradient_checkpointing": "selective"},
        False,
        marks=pytest.mark.soak,
    ),
    pytest.param(ParallelDims(shard=2, tensor=2), {}, {}, False, marks=pytest.mark.soak),
    (ParallelDims(data=2, tensor=2), {}, {}, True),
]


@pytest.mark.parametrize(("axes", "parallel", "train_args", "lora"), LAYOUTS)
def test_layouts_match_one_rank_at_the_predicted_cost(axes, parallel, train_args, lora):
    single_rank = run_ranks(train, 1, ParallelDims(), {}, train_args, lora)[0]
    ranks = run_ranks(train, axes.size, axes, parallel, train_args, lora)
    for losses, norms, *_ in ranks:
        torch.testing.assert_close(losses, single_rank[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(norms, single_rank[1], rtol=1e-3, atol=0)
    expected, state = assemble([single_rank[4]]).full, assemble([rank[4] for rank in ranks]).full
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=name)
    shape = outline(make_model(lora, **train_args), make_config(parallel, train_args))
    cost = estimate_cost(
        "hybrid",
        shape,
        axes,
        Workload(MICRO_BATCHES // axes.replicas, TOKENS, labels=TOKENS - 1),
        make_config(parallel, train_args),
    )
    assert max(rank[3] for rank in ranks) == pytest.approx(cost.state, rel=0.02)
    assert max(rank[2] for rank in ranks) == pytest.approx(cost.traffic_per_step, rel=0.02)


@pytest.mark.soak
def test_bf16_is_close_to_one_rank():
    train_args = {"precision": "bf16-mixed"}
    single_rank = run_ranks(train, 1, ParallelDims(), {}, train_args)[0]
    ranks = run_ranks(train, 2, ParallelDims(tensor=2), {}, train_args)
    torch.testing.assert_close(ranks[0][0], single_rank[0], rtol=1e-2, atol=0)
    assert ranks[0][0] == ranks[1][0]


@pytest.mark.soak
def test_resume_from_hybrid_on_one_rank_and_back():
    uninterrupted = run_ranks(train, 1, ParallelDims(), {}, {})[0]
    hybrid = ParallelDims(shard=2, tensor=2)
    start = run_ranks(train, 4, hybrid, {}, {}, False, None, 0, 4)
    middle = run_ranks(
        train, 1, ParallelDims(), {}, {}, False, assemble([rank[4] for rank in start]), 4, 4
    )
    end = run_ranks(train, 4, hybrid, {}, {}, False, assemble([middle[0][4]]), 8, 4)
    torch.testing.assert_close(
        [*start[0][0], *middle[0][0], *end[0][0]], uninterrupted[0][:12], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    ("axes", "settings", "error"),
    [
        (
            ParallelDims(tensor=2),
            {"train_args": {"optim": "adafactor"}},
            ("not-supported", "train_args.optim"),
        ),
        (
            ParallelDims(shard=2),
            {"evaluation": {"mode": "rank0"}},
            ("not-supported", "evaluation.mode"),
        ),
        (
            ParallelDims(pipeline=2),
            {"parallel": {"cpu_offload": "all"}},
            ("not-supported", "parallel.cpu_offload"),
        ),
        (
            ParallelDims(data=2),
            {"parallel": {"sequence_parallel": True}},
            ("not-supported", "parallel.sequence_parallel"),
        ),
        (
            ParallelDims(pipeline=2, tensor=2),
            {"parallel": {"sequence_parallel": True}},
            ("not-supported", "parallel.sequence_parallel"),
        ),
    ],
)
def test_rejects_unsupported_combinations(axes, settings, error):
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_strategy("hybrid", Config(model="m", dataset="d", **settings), axes)
