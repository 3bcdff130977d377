"""Estimate the FLOPs of a language model from its config.json. Imports no torch."""

from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims


def language_flops(
    dims: LanguageDims,
    config: Config,
    tokens: float,
    labels: float,
    sample_tokens: float,
    *,
    with_recomputation: bool = True,
) -> float:
    """Estimate the FLOPs of forward and backward over a micro-batch.

    A weight that multiplies each token takes 2 FLOPs in the forward pass, 2 for the gradient of its
    input and 2 for its own gradient (Kaplan et al., "Scaling Laws for Neural Language Models",
    2020, section 2.1: 6 per parameter and token). With adapters, frozen weights have no gradient
    (4); recomputation adds a forward pass (8; Korthikanti et al., 2022, appendix A). The two matrix
    products of attention take 4 × queries × attended tokens (on average half of the sample), and
    twice that in the backward pass.

    Args:
        tokens: number of tokens in the micro-batch.
        labels: number of tokens that the head processes.
        sample_tokens: number of tokens in a sample.
        with_recomputation: whether to count the forward pass that activation checkpointing repeats.
    """
    args = config.train_args
    again = 0.0  # selective checkpointing repeats no large matrix product
    if with_recomputation and args.recomputation != "selective":
        again = args.recomputed_share(dims.layers)
    passes = (2 if config.lora.enable else 3) + again
    attention = 2 * (dims.queries + dims.values) * sample_tokens / 2 * (3 + again)
    head = 2 * dims.hidden * dims.vocabulary * (2 if config.lora.enable else 3)
    linear = len(dims.linear_layers)
    layers = 2 * dims.weights_per_token * passes + (dims.layers - linear) * attention
    if dims.linear_attention is not None:
        layers += linear * dims.linear_attention.flops * (3 + again)
    return tokens * layers + labels * head


def float8_flops(dims: LanguageDims, config: Config, tokens: float) -> float:
    """Return the FLOPs of forward and backward over ``tokens`` that `train_args.fp8` computes in
    float8, without recomputation."""
    products = {"none": 0, "rowwise_with_gw_hp": 2}.get(config.train_args.fp8, 3)
    return tokens * 2 * dims.weights_per_token * products
