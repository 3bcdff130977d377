"""Estimate what a layer of experts keeps and allocates, if each expert gets the same number of
tokens. Imports no torch.

The terms are the tensors of ``grouped_mm_experts_forward`` of transformers and, if ranks divide the
experts, the tensors of the exchange between them. Both compute *rows*: each token has one for each
of its experts.
"""

from dataclasses import dataclass

from paceline.models.shape.adapter_memory import MergedExperts
from paceline.models.shape.dims import LanguageDims

FLOAT32_BYTES = 4
#: Bytes per row of the numbers that order rows (int64): the chosen expert, the position in the
#: order of the experts, the token, and the position in the order of the tokens.
_ORDER_BYTES = 4 * 8
#: The same with an exchange: a rank also orders the rows that it receives.
_EXCHANGE_ORDER_BYTES = 3 * 8


@dataclass(frozen=True)
class ExpertMoments:
    """Bytes that exist in the backward pass of a layer of experts in addition to all that its block
    saved, without gradients of parameters; negative if backward has freed more than it allocates.

    Args:
        saved: what the layer saved.
        weighting: when the gradients of the results and of their weights are computed.
        down: when the gradients of the second product are computed.
        gate: when the gradients of the gate and of the up projection are computed.
        up: when the gradients of the first product are computed.
        repeating: when backward repeats the forward pass of the layer before it begins with it; 0
            if it does not.
    """

    saved: float
    weighting: float
    down: float
    gate: float
    up: float
    repeating: float = 0.0

    def peak(self, down_gradient: float, up_gradient: float) -> float:
        """Return the peak with the gradients of the experts' weights.

        Args:
            down_gradient: bytes when the second product is computed.
            up_gradient: bytes when the first product is computed.
        """
        products = max(self.down + down_gradient, self.gate, self.up + up_gradient)
        return max(self.weighting, products, self.repeating)


@dataclass(frozen=True)
class ExpertRows:
    """Bytes per token of what a layer of experts computes.

    Args:
        dims: widths of the part of a layer that a rank computes.
        element_bytes: bytes per element of the hidden states and of the experts' products, which
            have the dtype of the weights: autocast does not apply to grouped products.
        low: bytes per element of the router's result.
        are_trained: whether the weights of the experts are trained or have adapters.
        are_exchanged: whether ranks divide the experts.
        autocasts: whether autocast selects the precision of sums.
    """

    dims: LanguageDims
    element_bytes: int
    low: int
    are_trained: bool = True
    are_exchanged: bool = False
    autocasts: bool = True

    @property
    def _hidden(self) -> int:
        """Bytes of the rows of hidden states."""
        return self.element_bytes * self.dims.hidden * self.dims.experts_per_token

    @property
    def _inner(self) -> int:
        """Bytes of the rows of inner features."""
        return self.element_bytes * self.dims.feed_forward * self.dims.experts_per_token

    @property
    def _weighted(self) -> int:
        """Bytes of the rows times their weights, in the wider of both dtypes."""
        is_low = self.autocasts and self.dims.autocast_routing
        weight_bytes = FLOAT32_BYTES if self.dims.float32_routing and not is_low else self.low
        width = max(self.element_bytes, weight_bytes)
        return width * self.dims.hidden * self.dims.experts_per_token

    @property
    def saved(self) -> float:
        """Bytes that are kept for backward: the inner results, the results of the experts, with
        which the gradients of the rows' weights are computed, and, for the gradients of the weights
        of experts, the inputs of both products."""
        inputs = self._hidden + self._inner if self.are_trained else 0
        # gate and up, and the activation of the gate; a clamped gate, its sigmoid, the product of
        # both, and the clamped up projection plus 1
        inner = 1
        if self.dims.gated:
            inner = 6 if self.dims.clamped_gate else 3
        return inputs + inner * self._inner + self._hidden + self._routing

    @property
    def _routing(self) -> float:
        """Bytes of the router's probabilities, and of the weights and the order of rows."""
        order = _ORDER_BYTES + (_EXCHANGE_ORDER_BYTES if self.are_exchanged else 0)
        probabilities = FLOAT32_BYTES * self.dims.experts
        return probabilities + (order + 2 * FLOAT32_BYTES) * self.dims.experts_per_token

    @property
    def in_forward(self) -> float:
        """Bytes that a forward pass allocates in addition, when it adds the results up: the
        weighted results in the order of the experts and of the tokens.

        With an exchange, the rank that computes the rows has the rows that it received, their
        results with weight 1, the sums over one row each, which autocast computes in float32, and
        the same in the dtype of the rows. The rank of the tokens has the results in the order of
        the experts, and the weighted ones. Where experts have biases, the rank that computes the
        rows has a bias for each. Frozen experts keep their inputs only until then.
        """
        rows = self._hidden
        beside = (rows if self.dims.clamped_gate else 0) + (0 if self.are_trained else rows)
        if not self.are_exchanged:
            return 2 * self._weighted + beside
        in_experts = 2 * rows
        if self.autocasts and self.element_bytes < FLOAT32_BYTES:
            in_experts = 2 * rows + rows // self.element_bytes * FLOAT32_BYTES
        return max(rows + in_experts + beside, 2 * rows + self._weighted)

    @property
    def waiting(self) -> float:
        """Bytes of the gradient of the weighted results, which exists when backward needs the saved
        results. The gradient of a sum in float32 is one row per token, unless it is cast."""
        per_row = self.dims.hidden * self.dims.experts_per_token
        if not self.are_exchanged or self._weighted < FLOAT32_BYTES * per_row:
            return self._weighted
        return 0 if self.element_bytes == FLOAT32_BYTES else FLOAT32_BYTES * self.dims.hidden

    @property
    def in_weighting(self) -> float:
        """Bytes that backward allocates where it computes the gradients of the results and of their
        weights: the gradient of the weighted results, and its products with both."""
        return self.waiting + 2 * self._weighted

    def in_backward(
        self, tokens: float, merged: MergedExperts, repeated: float | None, after: float
    ) -> ExpertMoments:
        """Return what a backward pass of ``tokens`` tokens allocates.

        Args:
            merged: what adapters of fused experts need.
            repeated: bytes per token that the forward pass of the block allocates, if backward
                repeats it.
            after: bytes per token that the block saves after the experts.
        """
        first = (2 if self.dims.gated else 1) * self._inner  # the result of the first product
        inputs = self._hidden + self._inner if self.are_trained else 0
        between = self.saved - self._hidden - inputs - first
        product = self._inner if self.are_trained else 0
        # Backward repeats the block when it needs something that the block saved: after the
        # experts, or else the results of the experts, for which there is a gradient then.
        weighting, repeating = self.in_weighting, 0.0
        if repeated is not None and after:
            repeating = (repeated - after) * tokens - merged.shared
        elif repeated is not None:
            weighting = max(weighting, self.waiting + repeated)
        # Each result is freed when backward has passed it, and its gradient takes its place.
        return ExpertMoments(
            saved=self.saved * tokens + merged.saved,
            weighting=tokens * weighting,
            down=tokens * self._inner + merged.gradient,
            gate=tokens * (self._inner - product + first) - merged.gradient,
            up=merged.first_gradient - merged.gradient - tokens * (product + between),
            repeating=repeating,
        )
