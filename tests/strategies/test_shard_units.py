"""The units of a language model under `zero2` and `zero3`: when embedding, head and blocks are
gathered, and that gradients are those of the whole model however a forward uses its ends."""

import pytest
import torch
from ranks import run_ranks
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.traffic import log_calls
from paceline.models.blocks import ModelEnds, find_ends
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import LogitTransform
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.strategy import make_strategy

WIDTH, VOCABULARY, LAYERS = 32, 96, 2
EMBEDDING = HEAD = VOCABULARY * WIDTH
NORM = WIDTH


def language_model(tied):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


def tokens_of(number):
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(number))


def loss_of_logits(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")


def loss_in_chunks(model, tokens):
    loss = ChunkedLoss(model.lm_head, LogitTransform(), tokens.flatten(), None, 5)
    with chunked_loss(loss):
        return loss.result(model(input_ids=tokens, use_cache=False).logits)


def loss_by_token(model, tokens):
    loss = ChunkedLoss(
        model.lm_head, LogitTransform(), tokens.flatten(), None, 5, is_per_token=True
    )
    with chunked_loss(loss):
        losses = loss.result(model(input_ids=tokens, use_cache=False).logits)
    return losses.square().sum()


def loss_without_head(model, tokens):
    """The logits are not used."""
    output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return output.hidden_states[-1].square().sum()


def loss_after_evaluation(model, tokens):
    """A forward without gradients precedes one with gradients."""
    with torch.no_grad():
        reference = loss_of_logits(model, tokens)
    return loss_of_logits(model, tokens) - reference


def loss_of_two_forwards(model, tokens):
    """A forward without gradients precedes two with gradients."""
    with torch.no_grad():
        reference = loss_of_logits(model, tokens)
    return loss_of_logits(model, tokens) + loss_in_chunks(model, tokens.flip(1)) - reference


LOSSES = {
    function.__name__: function
    for function in (
        loss_of_logits,
        loss_in_chunks,
        loss_by_token,
        loss_without_head,
        loss_after_evaluation,
        loss_of_two_forwards,
    )
}


class TwoHeads(Qwen2ForCausalLM):
    """A model that calls its head twice."""

    def forward(self, input_ids, **_):
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden) + self.lm_head(2 * hidden))


def two_heads(tied):
    model = language_model(tied)
    model.__class__ = TwoHeads
    return model


def train_step(world, mode, model, loss, axes=None, micro_batches=2):
    """Run a step; return the elements of the collectives in order, the gradients and the predicted
    traffic."""
    world = Communicator(world.env, world.device, axes or ParallelDims(shard=2))
    config = Config(
        model="m",
        dataset="d",
        parallel={"mode": mode},
        train_args={"gradient_accumulation_steps": micro_batches},
    )
    shape = outline(model, config)
    strategy = make_strategy(mode, config, world)
    model = strategy.setup(model)

    def micro_step(number, module):
        return loss(module, tokens_of(world.rank * micro_batches + number))

    with log_calls() as calls:
        strategy.forward_backward(micro_step, micro_batches)
    sizes = {"all_gather": [], "reduce_scatter": []}
    for call in calls:
        if call.kind in sizes:
            # Each rank sends all elements of the others, in float32.
            sent = call.size_bytes // 4
            sizes[call.kind].append(sent * len(call.ranks) // (len(call.ranks) - 1))
    gradients = {}
    for piece in strategy.sharding.pieces:
        parts = world.gather_objects((piece.offset, piece.values.grad))
        by_offset = dict(parts[: strategy.sharding.shards.size])
        gradients[piece.name] = torch.cat([by_offset[key] for key in sorted(by_offset)])
    cost = estimate_cost(mode, shape, world.axes, Workload(micro_batches=micro_batches), config)
    return sizes, gradients, cost.traffic


def reference_gradients(model, loss, count):
    for number in range(count):
        loss(model, tokens_of(number)).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def run_steps(world):
    results = {}
    for mode in ("zero2", "zero3"):
        for tied in (False, True):
            for name, loss in LOSSES.items():
                results[mode, tied, name] = train_step(world, mode, language_model(tied), loss)
            results[mode, tied, "two heads"] = train_step(
                world, mode, two_heads(tied), loss_of_logits
            )
    return results


@pytest.fixture(scope="module")
def steps():
    return run_ranks(run_steps, 2, timeout_s=180.0)[0]


BLOCK = sum(
    parameter.numel() for parameter in language_model(tied=True).model.layers[0].parameters()
)


@pytest.mark.parametrize("loss", ["loss_of_logits", "loss_in_chunks"])
def test_zero3_gathers_the_embedding_and_the_head_separately(steps, loss):
    """The head is there when backward begins, and its gradients are sent before those of the
    blocks."""
    sizes, _, _ = steps["zero3", False, loss]
    head, blocks = HEAD + NORM, [BLOCK] * LAYERS
    assert sizes["all_gather"] == 2 * [EMBEDDING, *blocks, head, *blocks, EMBEDDING]
    assert sizes["reduce_scatter"] == 2 * [head, *blocks, EMBEDDING]


@pytest.mark.parametrize("loss", ["loss_of_logits", "loss_in_chunks"])
def test_zero3_gathers_a_tied_weight_once_per_micro_batch(steps, loss):
    sizes, _, _ = steps["zero3", True, loss]
    root, blocks = EMBEDDING + NORM, [BLOCK] * LAYERS
    assert sizes["all_gather"] == 2 * [root, *blocks, *blocks]
    assert sizes["reduce_scatter"] == 2 * [*blocks, root]


def test_zero2_gathers_each_unit_once_per_step(steps):
    sizes, _, _ = steps["zero2", False, "loss_of_logits"]
    head, blocks = HEAD + NORM, [BLOCK] * LAYERS
    assert sizes["all_gather"] == [EMBEDDING, *blocks, head]
    assert sizes["reduce_scatter"] == 2 * [head, *blocks, EMBEDDING]


def test_forward_without_gradients_adds_no_gather_to_backward(steps):
    head, blocks = HEAD + NORM, [BLOCK] * LAYERS
    forward = [EMBEDDING, *blocks]
    sizes, _, _ = steps["zero2", False, "loss_after_evaluation"]
    assert sizes["all_gather"] == [*forward, head]
    sizes, _, _ = steps["zero3", False, "loss_after_evaluation"]
    assert sizes["all_gather"] == 2 * [*forward, head, *forward, *blocks, EMBEDDING]


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
@pytest.mark.parametrize("tied", [False, True])
def test_measured_bytes_are_those_of_the_cost_model(steps, mode, tied):
    sizes, _, traffic = steps[mode, tied, "loss_of_logits"]
    for kind, elements in sizes.items():
        assert sum(elements) * 4 / 2 == traffic[kind]


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", [*LOSSES, "two heads"])
def test_gradients_are_those_of_the_whole_model(steps, mode, tied, loss):
    _, gradients, _ = steps[mode, tied, loss]
    build = two_heads if loss == "two heads" else language_model
    expected = reference_gradients(build(tied), LOSSES.get(loss, loss_of_logits), 4)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        wanted = torch.zeros_like(gradients[name]) if gradient is None else gradient
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-4, atol=1e-5)


def test_ends_of_language_models():
    assert find_ends(language_model(False)) == ModelEnds(
        "model.embed_tokens", ("model.norm", "lm_head")
    )
    assert find_ends(language_model(True)) == ModelEnds()
    assert find_ends(language_model(False).model.layers[0].mlp) == ModelEnds()
