"""What is commonly said about the settings that `paceline bench tuning` measures, each with a
source, to be shown beside the measured values."""

from dataclasses import dataclass
from typing import Literal

#: What a claim is about: the bytes that are sent, the tokens per second, or the peak memory.
Figure = Literal["traffic", "throughput", "memory"]


@dataclass(frozen=True)
class TechniqueClaim:
    """A claim about a technique.

    Attributes:
        technique: see :class:`paceline.bench.tuning_changes.TuningChange`.
        text: the claim as it is usually quoted.
        figure: what it is about.
        source: title of a source.
        says: what the source says, which may be less than the claim.
    """

    technique: str
    text: str
    figure: Figure
    source: str
    url: str
    says: str


CLAIMS = (
    TechniqueClaim(
        "compression",
        "gradient compression saves 30 to 50 % of the bandwidth",
        "traffic",
        "PyTorch, DDP Communication Hooks",
        "https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html",
        "gradients are cast to 16 bits before the all-reduce: half of the bytes of float32",
    ),
    TechniqueClaim(
        "precision",
        "mixed precision is 2 to 3 times as fast",
        "throughput",
        "TensorFlow, Mixed precision",
        "https://www.tensorflow.org/guide/mixed_precision",
        "more than 3 times on modern GPUs, more than 2 times on recent Intel CPUs, 60 % on TPUs",
    ),
    TechniqueClaim(
        "checkpointing",
        "activation checkpointing needs 40 % less memory",
        "memory",
        "PyTorch Forums, FSDP training - no GPU memory decrease",
        "https://discuss.pytorch.org/t/fsdp-training-no-gpu-memory-decrease/167734/9",
        "about 40 % less GPU memory for the segmentation of large images, reported by a user",
    ),
    TechniqueClaim(
        "prefetch",
        "prefetching gives 25 % more throughput",
        "throughput",
        "J. Patrick Park, Data Prefetching in Deep Learning",
        "https://www.jpatrickpark.com/post/prefetcher/",
        "45 % more batches in an example with given times; nothing if the loader is the bottleneck",
    ),
)
