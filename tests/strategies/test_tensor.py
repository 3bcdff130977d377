"""Tensor parallelism on real ranks: outputs and gradients of sharded layers match those of full
ones, and errors for layers that cannot be sharded."""

import torch
from raised import raises_error
from ranks import run_ranks
from torch import nn

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.models.tensor_plan.plan import find_tensor_plan
from paceline.strategies.tensor.shard import TensorParallelizer, check_plan_sizes


class Heads(nn.Module):
    """An attention-like layer with a number of heads as attribute, a norm over each head, one input
    for two layers, and biases."""

    def __init__(self, norm=True):
        super().__init__()
        self.num_heads = 4
        self.query, self.value = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        query = self.norm(self.query(x).view(*x.shape[:-1], self.num_heads, 4))
        value = self.value(x).view(*x.shape[:-1], self.num_heads, 4)
        return x + self.out((query.tanh() * value).flatten(-2))


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.softmax(self.up(x), -1))


ATTENTION = {
    "query": "colwise",
    "value": "colwise",
    "norm": "replicated_with_grad_allreduce",
    "out": "rowwise",
}
NETS = {
    "heads": (Heads, ATTENTION),
    "gathered": (Gathered, {"up": "colwise_gather_output", "down": "rowwise_split_input"}),
    "chain": (
        lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 3)),
        {},
    ),
}


def compute_outputs_and_gradients(world):
    results = {}
    for key, (build, plan) in NETS.items():
        torch.manual_seed(0)
        model = build()
        parallelizer = (
            TensorParallelizer(model, world, Parallel(tensor_plan=plan)) if world.size > 1 else None
        )
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = model(x)
        before = world.traffic.total
        out.square().sum().backward()
        sent = world.traffic.total - before
        if parallelizer is not None:
            parallelizer.sum_over_copies(
                [(parameter.grad, parallelizer.group.size) for parameter in parallelizer.partial]
            )
        cuts_by_name = {} if parallelizer is None else parallelizer.cuts
        grads = {
            name: (parameter.grad, cuts_by_name.get(name))
            for name, parameter in model.named_parameters()
        }
        results[key] = out.detach(), x.grad, grads, sent
    world.barrier()
    return results


def test_outputs_and_gradients_match_full_layers():
    full_results = run_ranks(compute_outputs_and_gradients, 1)[0]
    for results in run_ranks(compute_outputs_and_gradients, 2):
        for key, (out, at_input, grads, _) in results.items():
            torch.testing.assert_close(out, full_results[key][0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(at_input, full_results[key][1], rtol=1e-5, atol=1e-4)
            for name, (grad, tensor_slice) in grads.items():
                full = full_results[key][2][name][0]
                if tensor_slice is not None:
                    assert tensor_slice.shape == tuple(full.shape)
                    full = full.narrow(
                        tensor_slice.dim, tensor_slice.start, grad.shape[tensor_slice.dim]
                    )
                torch.testing.assert_close(grad, full, rtol=1e-5, atol=1e-4, msg=f"{key} {name}")
        assert any(tensor_slice is not None for _, tensor_slice in results["chain"][2].values())
        # Layers that share an input share one all-reduce of its gradient: 15 rows of 8 floats.
        assert results["heads"][3] == 15 * 8 * 4


def test_rejects_indivisible_sizes_and_names_allowed_ones():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=6, num_key_value_heads=2))
    plan = find_tensor_plan(model, {})
    check_plan_sizes(model, plan, 2)
    with raises_error(ConfigError, code="tensor-not-divisible"):
        check_plan_sizes(model, plan, 3)
    chain = NETS["chain"][0]()
    with raises_error(ConfigError, code="tensor-not-divisible"):
        check_plan_sizes(chain, find_tensor_plan(chain, {}), 5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = (
            nn.Embedding(8, 8),
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 8),
        )
        self.up.weight = self.embed.weight


def collect_errors(world):
    messages = []
    pair = {"up": "colwise", "down": "rowwise"}
    modules = nn.ModuleDict({"up": nn.Conv1d(8, 8, 1), "down": nn.Linear(8, 8)})
    for model, settings in (
        (Tied(), Parallel(tensor_plan=pair)),
        (modules, Parallel(tensor_plan=pair)),
        (Heads(), Parallel(tensor_plan=ATTENTION, sequence_parallel=True)),
    ):
        try:
            TensorParallelizer(model, world, settings)
            messages.append("")
        except ConfigError as error:
            messages.append(str(error))
    world.barrier()
    return messages


def test_rejects_layers_that_cannot_be_sharded():
    tied, convolution, blocks = run_ranks(collect_errors, 2)[0]
    assert "embed.weight, up.weight" in tied
    assert "with `up`: it is a Conv1d" in convolution
    assert "sequence_parallel: false" in blocks
