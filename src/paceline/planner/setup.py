"""What is run in a training step: model, batch, layout, precision and software. From this, the
planner predicts the time of the step (:mod:`paceline.planner.time`).

A set-up need not be possible with Paceline: `benchmarks/planner_assume.py` describes any other.
Imports no torch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from paceline.models.shape.dims import LanguageDims

Precision = Literal["float32", "bf16", "fp8"]
Recomputation = Literal["none", "full", "selective", "attention", "alternate-products"]
Software = Literal["eager", "eager-2023", "compiled", "fused", "native"]
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit", "adamw-4bit"]
Attention = Literal["flash", "flash-1"]
Float8Scaling = Literal["tensor", "row", "block", "fused"]
CrossEntropy = Literal["plain", "chunked", "fused", "compiled"]


@dataclass(frozen=True)
class TrainingSetup:
    """A training step of a language model.

    Args:
        samples: samples of a micro-batch, for each replica of the model.
        length: tokens of a sample.
        micro_batches: number of micro-batches of a step.
        label_share: share of the tokens that the head processes.
        data, shard: replicas of the model; groups of ``shard`` of them divide the training state.
        tensor, pipeline, context, expert: ranks that divide layers, the sequence of layers, the
            tokens of a sample, and the experts (these are part of ``data × shard``).
        zero_stage: what ``shard`` ranks divide: 1 the optimizer's state, 2 also gradients, 3 also
            weights.
        sequence_parallel: whether tensor ranks divide the tokens outside the split layers.
        async_tensor: whether exchanges of tensor parallelism overlap with matrix products.
        chunks: number of pipeline stages of a rank.
        splits_head: whether tensor ranks divide the embedding and the head.
        precision: precision of matrix products.
        weight_bytes: bytes of a stored trained weight, without another copy.
        low_copy: whether a copy of the weights in 16 bit is stored beside them.
        gradient_bytes: bytes of a stored gradient.
        reduce_bytes: bytes of a gradient in a reduction between ranks.
        recompute_share: share of the layers that ``recompute`` applies to.
        lora_rank: 0: all weights are trained.
        frozen_bits: bits of a frozen weight: 16, 8 or 4.
        trains_embeddings: whether embedding and head are trained beside adapters.
        offload: what is in host memory: ``optimizer``, ``weights``, ``activations``.
        attention: kernels; ``flash-1`` are those before FlashAttention-2, and those with a bias.
        fp8_scaling: what shares a scale in float8; ``fused``: kernels cast where they compute.
        software: how kernels are launched and fused: PyTorch in eager mode (``eager``; with the
            Python stack of 2023: ``eager-2023``), ``torch.compile`` (``compiled``), fused kernels
            launched from Python such as Megatron's (``fused``), or an engine without Python that
            launches CUDA graphs (``native``).
        devices_per_host: number of devices of a host.
        hosts_per_switch: hosts that reach each other without the upper levels of switches; 0: all.
        oversubscription: by how much groups of more hosts are slower.
        bucket_bytes: largest size of the buckets of gradients that are reduced during backward.
        sync_bytes: what a rank sends once per step; None: by ``zero_stage``.
        link_bytes_s, host_network_bytes_s: rates of one device, and of a host as a whole, in one
            direction; None: as the table of devices gives it.
    """

    dims: LanguageDims
    samples: float = 1.0
    length: float = 1024.0
    micro_batches: int = 1
    label_share: float = 1.0
    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    async_tensor: bool = False
    chunks: int = 1
    splits_head: bool = False
    precision: Precision = "bf16"
    weight_bytes: int = 4
    low_copy: bool = False
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    optimizer: Optimizer = "adamw"
    recompute: Recomputation = "none"
    recompute_share: float = 1.0
    cross_entropy: CrossEntropy = "plain"
    lora_rank: int = 0
    frozen_bits: int = 16
    trains_embeddings: bool = False
    offload: tuple[str, ...] = ()
    attention: Attention = "flash"
    fp8_scaling: Float8Scaling = "tensor"
    software: Software = "eager"
    devices_per_host: int = 8
    bucket_bytes: float = 25 * 2**20
    sync_bytes: float | None = None
    hosts_per_switch: int = 0
    oversubscription: float = 1.0
    link_bytes_s: float | None = None
    host_network_bytes_s: float | None = None

    @property
    def world_size(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        return self.data * self.shard

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank."""
        return self.samples * self.length / self.context

    @property
    def step_tokens(self) -> float:
        """Tokens of a step of all ranks."""
        return self.replicas * self.samples * self.length * self.micro_batches

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation, and of a gathered weight."""
        return 4 if self.precision == "float32" else 2

    @property
    def expert_element_bytes(self) -> int:
        """Bytes of an element of the hidden states that experts get. PyTorch's autocast does not
        apply to grouped products, so they have the dtype of the experts' weights."""
        is_low = self.is_frozen or self.low_copy or self.weight_bytes < 4
        if self.software in ("eager", "compiled") and not is_low:
            return 4
        return self.element_bytes

    @property
    def expert_copies(self) -> int:
        """Number of ranks with the same experts."""
        return max(1, self.data * self.shard * self.context // self.expert)

    @property
    def is_frozen(self) -> bool:
        return self.lora_rank > 0

    @property
    def stage_layers(self) -> float:
        """Layers on a rank, on average."""
        return self.dims.layers / self.pipeline

    @property
    def passes_again(self) -> float:
        """Forward passes over a layer's matrix products in backward, as a mean over all layers."""
        return _PRODUCTS_AGAIN[self.recompute] * self.recompute_share

    @property
    def stops_early(self) -> bool:
        """Whether recomputation stops when all saved tensors exist again, as in PyTorch 2.1 and
        later: the last product of a block is not repeated."""
        return self.recompute == "full" and self.software in ("eager", "compiled")

    @cached_property
    def last_product_share(self) -> float:
        """Share of a layer's operations in matrix products that the last one has."""
        dims = self.dims
        last = dims.hidden * dims.feed_forward * dims.experts_per_token
        mlp = dims.experts_per_token * dims.expert_weights
        return last / (dims.attention_weights + mlp)

    @property
    def products_again(self) -> float:
        """Matrix products that backward repeats, in units of all of the forward pass."""
        skipped = self.last_product_share if self.stops_early else 0.0
        return self.passes_again * (1 - skipped)

    @property
    def attention_again(self) -> float:
        """Forward passes over the attention in backward, as a mean over all layers."""
        return _ATTENTION_AGAIN[self.recompute] * self.recompute_share

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer outside of experts, or of all of it in a dense model."""
        dims = self.dims
        mlp = dims.expert_weights if dims.experts == 1 else dims.hidden * dims.experts
        return dims.attention_weights + mlp

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of the experts of a layer; 0 in a dense model."""
        return 0 if self.dims.experts == 1 else self.dims.experts * self.dims.expert_weights

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, and the same number in a head that is not tied to it."""
        return self.dims.vocabulary * self.dims.hidden

    @cached_property
    def stage_parameters(self) -> float:
        """Parameters of the fullest rank's stage before they are sharded, without experts."""
        dims = self.dims
        layers = self.stage_layers * self.layer_parameters / self.tensor
        tables = 2 if not dims.tied and self.pipeline == 1 else 1
        split = self.tensor if self.splits_head else 1
        return layers + tables * self.table_parameters / split + dims.positions * dims.hidden

    @cached_property
    def stage_expert_parameters(self) -> float:
        """Parameters of the experts on a rank, before they are sharded."""
        return self.stage_layers * self.expert_parameters / self.expert / self.tensor

    @cached_property
    def adapter_parameters(self) -> float:
        """Parameters of the adapters on a rank."""
        widths = sum(map(sum, self.dims.linears.values()))
        return self.lora_rank * widths * self.stage_layers / self.tensor

    @property
    def trained_expert_parameters(self) -> float:
        """Trained parameters of the experts on a rank, without adapters."""
        return 0.0 if self.is_frozen else self.stage_expert_parameters

    @property
    def trained_parameters(self) -> float:
        """Trained parameters of a rank's stage before they are sharded."""
        if not self.is_frozen:
            return self.stage_parameters + self.stage_expert_parameters
        tables = self.table_parameters * (1 if self.dims.tied else 2)
        return self.adapter_parameters + (tables if self.trains_embeddings else 0)


#: Share of the forward pass over a layer's matrix products that is repeated in backward.
#: `alternate-products` is torchtitan's per-operation policy: every second product is stored.
_PRODUCTS_AGAIN = {
    "none": 0.0, "full": 1.0, "selective": 0.0, "attention": 0.0, "alternate-products": 0.35,
}  # fmt: skip
_ATTENTION_AGAIN = {
    "none": 0.0, "full": 1.0, "selective": 0.0, "attention": 1.0, "alternate-products": 0.0,
}  # fmt: skip
