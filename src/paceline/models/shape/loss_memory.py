"""Estimate the memory of the loss of a language model and of its head. Imports no torch."""

import math
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims
from paceline.models.shape.loss_chunks import choose_loss_chunks

FLOAT32_BYTES = 4
#: On a CPU, the loss in chunks converts logits in 16 bit to float32 a few rows at a time, of this
#: size in bytes. No value depends on it.
FLOAT_LOGITS_BYTES = 16 << 20


@dataclass(frozen=True)
class LossMemory:
    """Bytes that the loss and the head's output need.

    Args:
        in_model: during the forward pass of the model, which computes the output of the head.
        forward: at the end of the forward pass.
        backward: at the start of the backward pass.
        saved: kept in between.
        output_gradient: when the backward pass of the model starts: the gradient of the logits. If
            the loss is computed in chunks: the gradients that it has computed.
        input_gradient: bytes of the gradient of the head's input.
        in_chunks: whether the loss is computed for some of the tokens at a time, by the head.
    """

    in_model: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    saved: float = 0.0
    output_gradient: float = 0.0
    input_gradient: float = 0.0
    in_chunks: bool = False

    @property
    def peak(self) -> float:
        return max(self.forward, self.backward)


NO_LOSS = LossMemory()


def loss_memory(
    dims: LanguageDims,
    config: Config,
    labels: float,
    low: int,
    low_weights: bool,
    device_type: str,
    head_parts: int,
) -> LossMemory:
    """Return the memory of the loss and of the head's output.

    Args:
        head_parts: number of ranks that split the head.
    """
    frozen, width = config.lora.enable, dims.vocabulary
    output = low if low != FLOAT32_BYTES else 0  # before it is cast to float32
    input_gradient = FLOAT32_BYTES * dims.hidden * labels
    chunks = choose_loss_chunks(config.train_args, width, device_type)
    if head_parts > 1:  # always computed in chunks
        chunks = chunks._replace(tokens=chunks.tokens or math.ceil(labels))
        width = math.ceil(width / head_parts)
    elif not chunks.divides(labels):
        logits = low * width * labels
        capped = logits if dims.softcaps_logits else 0
        saved = FLOAT32_BYTES * width * labels  # log-probabilities
        forward = 2 * saved + output * width * labels
        return LossMemory(
            in_model=logits + capped,
            forward=forward + capped,
            backward=3 * saved + capped,
            saved=saved + capped,
            output_gradient=logits,
            input_gradient=input_gradient,
        )
    # Gradients in float32, which the loss has already computed.
    saved = FLOAT32_BYTES * dims.hidden * (labels + (0 if frozen else width))
    logits = width * min(labels, chunks.tokens)
    in_float32 = FLOAT32_BYTES * logits
    if device_type == "cpu":
        if output and head_parts == 1:
            in_float32 = min(in_float32, FLOAT_LOGITS_BYTES)
        # A soft cap computes the quotient and its tanh.
        in_float32 *= 3 if dims.softcaps_logits else 1
    elif dims.softcaps_logits:  # in place, and its slope
        in_float32 *= 2
    # Backward casts gradients to the dtype of the weights.
    cast = low * dims.hidden * width if low_weights and not frozen else 0
    forward = saved + output * logits + in_float32
    return LossMemory(
        in_model=forward,
        forward=forward,
        backward=saved + cast,
        saved=saved,
        output_gradient=saved,
        input_gradient=input_gradient,
        in_chunks=True,
    )
