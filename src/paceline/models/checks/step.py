"""Run a model forward and backward on the meta device, to find out whether it can be trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from paceline.core.errors import ConfigError, first_line
from paceline.models.adapters.targets import adapter_layers, short_names
from paceline.models.shape.trace import TRACE_ERRORS, made_up_inputs, runs_on_its_device


def check_adapted_step(adapted: Any) -> None:
    """Run a step over made-up tokens on a model on the meta device.

    A model that also fails without its adapters passes: some cannot run on the meta device.

    Raises:
        ConfigError: the step fails because of the adapters.
    """
    failure = step_failure(adapted)
    if failure is None:
        return
    layer, error = failure
    with adapted.disable_adapter():
        if step_failure(adapted) is not None:
            return
    place = f"the adapter on {short_names([layer])}" if layer else "a model with these adapters"
    raise ConfigError(
        "{place} cannot be trained: {kind}: {reason}",
        code="unfit-adapter",
        fix="list other modules in `lora.target_modules`, such as [q_proj, k_proj, v_proj, o_proj]",
        place=place,
        kind=type(error).__name__,
        reason=first_line(error),
    )


def step_failure(model: Any) -> tuple[str | None, Exception] | None:
    """Run a step over made-up tokens on a model on the meta device. Return the error and the
    adapter layer that it occurred in, if it was in one; None if the step does not fail."""
    inputs = made_up_inputs(model)
    if inputs is None:
        return None
    active: list[str] = []
    was_training = model.training
    try:
        with runs_on_its_device(model), _following(model, active):
            logits = model.train()(**inputs).logits
            if logits.requires_grad:
                logits.float().sum().backward()
    except TRACE_ERRORS as error:
        return (active[-1] if active else None), error
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
    return None


@contextmanager
def _following(adapted: nn.Module, active: list[str]) -> Iterator[None]:
    """Keep the names of the adapter layers that are running in ``active`` within the block."""
    handles: list[Any] = []
    for name, layer in adapter_layers(adapted):

        def enter(*_: object, name: str = name) -> None:
            active.append(name)

        def leave(*_: object) -> None:
            active.pop()

        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
