"""Widths of linear attention, and what it saves for backward. Imports no torch.

The terms are the tensors of ``GatedDeltaNet.forward`` and ``torch_chunk_gated_delta_rule`` of
transformers, which compute a layer where no kernels of flash-linear-attention are installed. Those
kernels save much less: queries, keys, values, gates and one matrix of 64 numbers per token and
head, all but the gates in the low precision. A plan assumes transformers' own code, so it is an
upper bound for a run with the kernels.
"""

from dataclasses import dataclass

FLOAT32_BYTES = 4
#: Number of tokens whose results are computed at once.
_CHUNK = 64
#: Numbers in float32 per token and head: the factors of both norms, the learning rate, the argument
#: of the softplus, three powers of the decay, and the factor of the last norm.
_NUMBERS = 2 + 1 + 1 + 3 + 1


@dataclass(frozen=True)
class LinearAttention:
    """Widths of a gated delta rule (Yang et al., "Gated Delta Networks", 2024).

    Args:
        key_heads, heads: number of heads of queries and keys, and of values. Queries and keys are
            repeated for all heads.
        key_size, value_size: widths of a head.
        joins_projections: whether one linear layer computes queries, keys, values and the gate, and
            another the numbers per head, instead of four layers.
    """

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    joins_projections: bool = False

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values, which the convolution mixes."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.value_size

    @property
    def keys(self) -> int:
        """Width of the keys that are repeated for all heads."""
        return self.heads * self.key_size

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each linear layer."""
        into = (
            {
                "in_proj_qkvz": (hidden, self.mixed + self.values),
                "in_proj_ba": (hidden, 2 * self.heads),
            }
            if self.joins_projections
            else {
                "in_proj_qkv": (hidden, self.mixed),
                "in_proj_z": (hidden, self.values),
                "in_proj_b": (hidden, self.heads),
                "in_proj_a": (hidden, self.heads),
            }
        )
        return into | {"out_proj": (self.values, hidden)}

    @property
    def flops(self) -> int:
        """FLOPs of the rule per token in a forward pass: the products within a chunk, both
        triangular systems, and the products with the state."""
        within = 4 * _CHUNK * self.keys + 2 * _CHUNK * self.values
        systems = _CHUNK * (self.keys + self.values)
        return within + systems + 6 * self.heads * self.key_size * self.value_size

    def saved(self, low: int, stored: int, autocasts: bool, frozen: bool) -> float:
        """Return what the layer saves in bytes per token, without the inputs of its projections.

        Args:
            low: bytes per element of the results of matrix products.
            stored: bytes per element of the weights.
            autocasts: whether autocast casts the factors of matrix products. Otherwise products are
                in float32, as the other operations of the rule are.
            frozen: whether the weights are frozen.
        """
        convolution = low * 2 * self.mixed  # its input and its result
        numbers = FLOAT32_BYTES * self.heads * (_NUMBERS + (0 if frozen else 1))
        return convolution + numbers + self._rule(low, autocasts) + self._norm(low, stored, frozen)

    def _rule(self, low: int, autocasts: bool) -> float:
        """Return what the delta rule saves: queries and keys before and after their norm, values,
        keys times the learning rate, the decay between two tokens of a chunk, the triangular matrix
        and both solutions; the result of each product, and its factors."""
        keys, values, scores = self.keys, self.values, self.heads * _CHUNK
        states = self.heads * self.key_size * self.value_size / _CHUNK
        saved = FLOAT32_BYTES * (6 * keys + 2 * values + 2 * scores)
        if not autocasts:
            # The factors of products that nothing else saves, and a state per chunk.
            return saved + FLOAT32_BYTES * (2 * scores + 2 * keys + values + scores + states)
        within = low * (4 * keys + 2 * scores)
        # Autocast copies the new values twice, and the state that a chunk begins with, which is
        # saved in float32 too.
        between = low * (3 * keys + 2 * values + scores + 2 * states) + FLOAT32_BYTES * states
        return saved + within + between

    def _norm(self, low: int, stored: int, frozen: bool) -> float:
        """Return what the norm saves: its input, the result before and after scaling, the gate and
        its activation; and the product with it, which the output projection reads."""
        size = 3 * FLOAT32_BYTES + max(low, stored)
        return self.values * (size + (0 if frozen else 2 * low))
