"""Find out how a language model computes its logits, so that the loss can be computed in chunks."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.distributed import torch_compat
from paceline.models.blocks import base_model, evaluation_mode, wrap_forward
from paceline.models.checks.cache import check_of_model
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import LogitTransform
from paceline.models.json_config import JsonObject

#: Numbers up to this one are exact in bfloat16, and large enough to show a soft cap.
_LARGEST = 64
_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, IndexError)


def output_head(model: Any) -> Any:
    """Return the module that computes the logits, or None."""
    find = getattr(base_model(model), "get_output_embeddings", None)
    return find() if callable(find) else None


def choose_transform(model: Any, config: Config) -> LogitTransform | str:
    """Return the result of :func:`find_transform`. A function that was found is stored for later
    runs with the same model."""
    stored = check_of_model("loss in chunks", model, config)
    if (numbers := stored.read()) is not None:
        return LogitTransform(**numbers)
    transform = find_transform(model, next(model.parameters()).device)
    if isinstance(transform, LogitTransform):
        stored.write(asdict(transform))
    return transform


def find_transform(model: Any, device: torch.device) -> LogitTransform | str:
    """Find out what the model does to the output of its head, with a forward of a few tokens in
    which known numbers take the place of that output.

    Returns:
        The function, or why the loss cannot be computed in chunks.
    """
    head = output_head(model)
    if not isinstance(head, nn.Module):
        return "it has no output head"
    config = base_model(model).config.get_text_config()
    ids = torch.arange(8, device=device).unsqueeze(0) % max(int(config.vocab_size), 1)
    seen: list[torch.Tensor] = []

    def replace_output(forward: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(hidden)
        seen.append(hidden)
        count = torch.arange(logits.numel(), device=logits.device, dtype=torch.float32)
        return (count % (2 * _LARGEST + 1) - _LARGEST).view(logits.shape)

    restore = wrap_forward(head, replace_output)
    try:
        with evaluation_mode(model), torch.no_grad():
            results = model(input_ids=ids, use_cache=False).logits
    except _ERRORS as error:
        return f"its head cannot be replaced: {error}"
    finally:
        restore()
    if len(seen) != 1:
        return f"it calls its head {len(seen)} times"
    if seen[0].shape[:-1] != ids.shape:
        return "the input of its head has another shape than the tokens"
    if not torch_compat.has_values(results):
        return _by_name(config.to_dict())
    count = torch.arange(results.numel(), device=device, dtype=torch.float32)
    grid = (count % (2 * _LARGEST + 1) - _LARGEST).view(results.shape)
    for transform in _candidates(config.to_dict()):
        expected = transform.apply(grid)
        if torch.allclose(results.float(), expected, rtol=1e-5, atol=1e-5):
            return _compare(model, head, transform, seen[0])
    return "it changes the output of its head in another way than by a factor or a soft cap"


def _by_name(config: JsonObject) -> LogitTransform:
    """Return the function of a config.json by the names of transformers' families, for models
    without values."""
    scale, divisor = _number(config, "logit_scale"), _number(config, "logits_scaling")
    return LogitTransform(
        scale=scale or 1.0 / (divisor or 1.0), cap=_number(config, "final_logit_softcapping")
    )


def _number(config: JsonObject, key: str) -> float | None:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) else None


def _candidates(config: JsonObject) -> Iterator[LogitTransform]:
    """Yield the functions with the numbers of a config.json, such as ``logit_scale`` (Cohere),
    ``logits_scaling`` (Granite, a divisor) and ``final_logit_softcapping`` (Gemma 2)."""
    yield LogitTransform()
    numbers = {
        float(value)
        for value in config.values()
        if isinstance(value, int | float) and not isinstance(value, bool) and value
    }
    for number in sorted(numbers):
        yield LogitTransform(scale=number)
        yield LogitTransform(scale=1 / number)
        yield LogitTransform(cap=number)


def _compare(
    model: Any, head: nn.Module, transform: LogitTransform, hidden: torch.Tensor
) -> LogitTransform | str:
    """Compare the loss and its gradient with the loss and gradient of the head's full output."""
    targets = torch.arange(1, 1 + hidden[..., 0].numel(), device=hidden.device)
    results = []
    with evaluation_mode(model), torch.enable_grad():
        # A CPU multiplies fewer than 4 rows with another kernel. It adds the products of a large
        # vocabulary one by one, and small ones are lost in a sum that is large already.
        for chunk_tokens in (4, None):
            x = hidden.detach().clone().requires_grad_()
            if chunk_tokens is None:
                logits = transform.apply(head(x).float())
                loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
            else:
                chunks = ChunkedLoss(head, transform, targets, None, chunk_tokens)
                with chunked_loss(chunks):
                    loss = chunks.result(head(x))
            results.append((loss.detach(), *torch.autograd.grad(loss, x)))
    tolerance = 1e-4 if results[0][1].dtype == torch.float32 else 5e-2
    for chunked, full in zip(*results, strict=True):
        largest = full.float().abs().max().clamp(min=1e-6)
        if not bool((chunked.float() - full.float()).abs().max() <= tolerance * largest):
            return "its head gives another loss for a part of the tokens"
    return transform
