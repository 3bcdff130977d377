"""Floating-point operations of a micro-batch. No torch here."""

from paceline.config.schema import Config
from paceline.models.shape.activations import LanguageDims


def language_flops(
    dims: LanguageDims, config: Config, tokens: float, labels: float, sample_tokens: float
) -> float:
    """Operations of forward and backward over a micro-batch.

    A weight that multiplies each token costs 2 forward, 2 for the gradient of its input and 2 for
    its own (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1: 6 a
    parameter and token); with adapters the frozen weights have no gradient of their own (4), and
    recomputation adds a forward (Korthikanti et al., 2022, appendix A: 8). Attention's two products
    cost 4 × queries × tokens looked back at, half of the sample on average, and twice that
    backward.

    Args:
        tokens: of the micro-batch; labels: those that go through the head; sample_tokens: of a
            sample.
    """
    weights = dims.attention_weights + dims.experts_per_token * dims.expert_weights
    again = 1 if config.train_args.gradient_checkpointing else 0
    passes = (2 if config.lora.enable else 3) + again
    attention = 4 * dims.queries * sample_tokens / 2 * (3 + again)
    head = 2 * dims.hidden * dims.vocabulary * (2 if config.lora.enable else 3)
    return dims.layers * tokens * (2 * weights * passes + attention) + labels * head
