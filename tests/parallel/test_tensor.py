"""Cut layers give the outputs and gradients of whole ones; what cannot be cut is refused with what
would fit."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.models.tensor_plan.plan import find_tensor_plan
from paceline.parallel.tensor.shard import TensorParallelizer, check_plan_sizes


class Heads(nn.Module):
    """Its own number of heads, a norm over each head, one input for two layers, biases
    everywhere."""

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


def outputs_and_gradients(world):
    results = {}
    for key, (build, plan) in NETS.items():
        torch.manual_seed(0)
        model = build()
        split = (
            TensorParallelizer(model, world, Parallel(tensor_plan=plan)) if world.size > 1 else None
        )
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = model(x)
        before = world.traffic.total
        out.square().sum().backward()
        sent = world.traffic.total - before
        if split is not None:
            split.sum_over_copies(
                [(parameter.grad, split.group.size) for parameter in split.partial]
            )
        where = {} if split is None else split.cuts
        grads = {
            name: (parameter.grad, where.get(name)) for name, parameter in model.named_parameters()
        }
        results[key] = out.detach(), x.grad, grads, sent
    world.barrier()
    return results


def test_outputs_and_gradients_are_those_of_the_whole_layers():
    alone = run_ranks(outputs_and_gradients, 1)[0]
    for results in run_ranks(outputs_and_gradients, 2):
        for key, (out, at_input, grads, _) in results.items():
            torch.testing.assert_close(out, alone[key][0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(at_input, alone[key][1], rtol=1e-5, atol=1e-4)
            for name, (grad, cut) in grads.items():
                full = alone[key][2][name][0]
                if cut is not None:
                    assert cut.shape == tuple(full.shape)
                    full = full.narrow(cut.dim, cut.start, grad.shape[cut.dim])
                torch.testing.assert_close(grad, full, rtol=1e-5, atol=1e-4, msg=f"{key} {name}")
        assert any(cut is not None for _, cut in results["chain"][2].values())
        # The two layers that share an input share one all-reduce of its gradient: 15 rows of 8
        # floats.
        assert results["heads"][3] == 15 * 8 * 4


def test_sizes_that_do_not_divide_are_refused_with_those_that_would():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=6, num_key_value_heads=2))
    plan = find_tensor_plan(model, {})
    check_plan_sizes(model, plan, 2)
    with pytest.raises(ConfigError, match=r"key_value heads \(2\).*Allowed: 1, 2"):
        check_plan_sizes(model, plan, 3)
    chain = NETS["chain"][0]()
    with pytest.raises(ConfigError, match=r"rows of 0 \(12\).*1, 2, 3, 4, 6, 12"):
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


def refusals(world):
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


def test_what_cannot_be_cut_is_refused_by_name():
    tied, convolution, blocks = run_ranks(refusals, 2)[0]
    assert "embed.weight, up.weight" in tied
    assert "with `up`: it is a Conv1d" in convolution
    assert "sequence_parallel: false" in blocks
