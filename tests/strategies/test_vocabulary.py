"""The vocabulary split over real ranks: losses, correct predictions and gradients equal the results
of a full embedding and head, and no rank computes all logits."""

import itertools

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import IGNORED, LogitTransform
from paceline.models.tensor_plan.plan import find_tensor_plan
from paceline.models.tensor_plan.style import EMBEDDING, HEAD, ranges
from paceline.models.tensor_plan.vocabulary import vocabulary_layers
from paceline.strategies.tensor.vocabulary import split_embedding, split_head

#: Neither 2 nor 3 ranks divide it.
VOCABULARY, WIDTH, TOKENS, CHUNK = 103, 8, 13, 5
TRANSFORMS = (LogitTransform(), LogitTransform(scale=0.25), LogitTransform(scale=0.5, cap=3.0))


class Ends(nn.Module):
    """An embedding and a head, which may share their weight."""

    def __init__(self, tied: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=60)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 3)
        if tied:
            self.head.weight = self.embedding.weight
        with torch.no_grad():  # the highest logits of many tokens, equal on two ranks
            for parameter in self.head.parameters():
                parameter[[2, 70]] = 9.0
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).sigmoid())


def split(model: Ends, world) -> dict[str, slice]:
    """Split the ends over the ranks. Return the rows of this rank by parameter."""
    (rows,) = ranges(HEAD, VOCABULARY, world.size, world.rank)
    part = slice(rows.start, rows.start + rows.length)
    parts = {}
    for module, name in itertools.product((model.embedding, model.head), ("weight", "bias")):
        full = getattr(module, name, None)
        if full is not None:
            local = parts.setdefault(id(full), nn.Parameter(full.detach()[part].clone()))
            setattr(module, name, local)
    split_embedding(model.embedding, rows, world)
    split_head(model.head, rows, VOCABULARY, world)
    return part


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    ids[0, :2] = torch.tensor([60, VOCABULARY - 1])
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[:6] = torch.tensor([0, 70, 2, IGNORED, VOCABULARY - 1, 34])
    return ids, targets, torch.arange(TOKENS) / 4


def losses_and_gradients(world):
    """Return this rank's results of each variant, and the full ones."""
    results = []
    for tied, transform, smoothing, weighted, per_token in itertools.product(
        (False, True), TRANSFORMS, (0.0, 0.1), (False, True), (False, True)
    ):
        if per_token and weighted:
            continue
        ids, targets, weights = make_batch()
        full = Ends(tied)
        logits = transform.apply(full(ids)[0].float())
        losses = functional.cross_entropy(
            logits, targets, reduction="none", label_smoothing=smoothing
        )
        factors = weights if weighted or per_token else torch.ones(TOKENS)
        (losses * factors).sum().backward()
        predicted = logits.argmax(1)
        assert (predicted == 2).sum() > 3
        numbers = torch.arange(TOKENS)
        hits = torch.where(numbers % 3 == 0, predicted, torch.where(numbers % 3 == 1, 70, targets))
        is_correct = predicted == hits

        model = Ends(tied)
        part = split(model, world)
        chunks = ChunkedLoss(
            model.head,
            transform,
            targets,
            None,
            CHUNK,
            smoothing,
            token_losses=None if per_token else torch.zeros(TOKENS),
            token_weights=weights if weighted else None,
            is_per_token=per_token,
        )
        with chunked_loss(chunks):
            loss = chunks.result(model(ids))
        (loss * factors if per_token else loss).sum().backward()
        counted = ChunkedLoss(
            model.head,
            transform,
            hits,
            None,
            CHUNK,
            counts_correct=True,
            token_weights=weights if weighted else None,
        )
        with torch.no_grad(), chunked_loss(counted):
            counted.result(model(ids))
        gradients = {
            name: (parameter.grad, full.get_parameter(name).grad[part])
            for name, parameter in model.named_parameters()
        }
        token_losses = loss.detach() if per_token else chunks.token_losses
        correct = (is_correct * weights).sum() if weighted else is_correct.sum()
        results.append(
            (
                (token_losses, losses.detach()),
                (loss.detach().sum(), (losses * (weights if weighted else 1)).sum().detach()),
                (counted.num_correct, correct),
                *gradients.values(),
            )
        )
    world.barrier()
    return results


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_losses_and_gradients_are_those_of_a_full_head(ranks: int) -> None:
    for results in run_ranks(losses_and_gradients, ranks):
        for pairs in results:
            for ours, full in pairs:
                torch.testing.assert_close(ours, full, rtol=1e-5, atol=2e-6)


class LargestOutput(TorchDispatchMode):
    """Records the largest last dimension of the results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        widths = [
            leaf.shape[-1]
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 1
        ]
        self.width = max(self.width, *widths, 0)
        return output


def train_and_generate(world):
    ids, targets, _ = make_batch()
    model, full = Ends(tied=False), Ends(tied=False)
    split(model, world)
    chunks = ChunkedLoss(model.head, LogitTransform(), targets, None, CHUNK)
    with LargestOutput() as largest, chunked_loss(chunks):
        chunks.result(model(ids)).backward()
    logits = model(ids)
    functional.cross_entropy(logits[0], targets).backward()
    model.zero_grad()
    functional.cross_entropy(model(ids)[0], targets, reduction="sum").backward()
    functional.cross_entropy(full(ids)[0], targets, reduction="sum").backward()
    (rows,) = ranges(EMBEDDING, VOCABULARY, world.size, world.rank)
    gradient = full.embedding.weight.grad[rows.start : rows.start + rows.length]
    empty = ChunkedLoss(model.head, LogitTransform(), targets[:0], None, CHUNK)
    with chunked_loss(empty):  # a batch without labels
        empty.result(model(ids[:, :0])).backward()
    world.barrier()
    pairs = (logits.detach(), full(ids).detach()), (model.embedding.weight.grad, gradient)
    return largest.width, pairs


def test_training_computes_parts_and_other_code_gets_all_logits() -> None:
    for width, pairs in run_ranks(train_and_generate, 2):
        assert width <= -(-VOCABULARY // 2)
        for ours, full in pairs:
            torch.testing.assert_close(ours, full, rtol=1e-5, atol=2e-6)


def low_precision_losses(world):
    """Return the losses with bfloat16 weights, and in float32 of the same logits."""
    ids, targets, _ = make_batch()
    full = Ends(False, torch.bfloat16)
    logits = full(ids)[0].float()
    model = Ends(False, torch.bfloat16)
    split(model, world)
    losses = torch.zeros(TOKENS)
    chunks = ChunkedLoss(model.head, LogitTransform(), targets, None, CHUNK, token_losses=losses)
    with torch.no_grad(), chunked_loss(chunks):
        chunks.result(model(ids))
    world.barrier()
    return losses, functional.cross_entropy(logits, targets, reduction="none").detach()


def test_maximum_and_sum_are_in_float32() -> None:
    for losses, expected in run_ranks(low_precision_losses, 2):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


def small_model(**settings):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    numbers = {"vocab_size": 34, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**{**numbers, **heads, **settings}))


@pytest.mark.parametrize(
    ("lora", "tied", "whole"),
    [
        ({"target_modules": ["q_proj"]}, False, []),
        ({"target_modules": ["q_proj", "lm_head"]}, False, ["lm_head"]),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False, ["embed"]),
        ({"target_modules": ["q_proj", "embed_tokens"]}, True, ["embed", "lm_head"]),
    ],
)
def test_layers_with_adapters_are_whole(lora, tied: bool, whole: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        small_model(tie_word_embeddings=tied), LoraConfig(task_type="CAUSAL_LM", **lora)
    )
    layers = vocabulary_layers(model)
    assert len(layers) == 2
    for layer in layers:
        is_whole = any(name in layer.name for name in whole)
        assert (layer.reason is not None) == is_whole, layer
    split_names = {layer.name for layer in layers if layer.reason is None}
    assert split_names == {
        name for name, style in find_tensor_plan(model, {}).items() if style in (EMBEDDING, HEAD)
    }


def test_a_plan_of_the_user_comes_first() -> None:
    model = small_model(tie_word_embeddings=False)
    plan = find_tensor_plan(model, {"lm_head": "colwise_gather_output"})
    assert plan["lm_head"] == "colwise_gather_output"
    assert plan["model.embed_tokens"] == EMBEDDING
