"""Choose the kernel that computes attention over packed rows. Imports no torch."""

from dataclasses import dataclass, field
from functools import cache
from importlib import metadata

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText

#: The kernel that runs on every device: torch's scaled_dot_product_attention, one call for all
#: samples of the same length.
SDPA = "sdpa"
#: torch.nn.attention.varlen.varlen_attn.
VARLEN = "varlen_attn"
MAX_HEAD_SIZE = 256
_LOW = ("bfloat16", "float16")


@dataclass(frozen=True)
class AttentionSetup:
    """What the choice of a kernel depends on.

    Args:
        dtype: data type of matrix products.
        capability: compute capability of the GPU, or None on other devices.
        installed: names of the fused kernels that are installed.
        head_size: size of an attention head, or None if it is not known.
        has_dropout: whether attention weights have dropout.
    """

    device_type: str
    dtype: str = "float32"
    capability: tuple[int, int] | None = None
    installed: frozenset[str] = field(default_factory=frozenset)
    head_size: int | None = None
    has_dropout: bool = False


@dataclass(frozen=True)
class FusedKernel:
    """A kernel that computes attention for all samples of a packed row in one call.

    Args:
        name: as in ``train_args.attn_implementation``, except :data:`VARLEN`.
        package: the package that contains it.
        min_major: lowest major compute capability.
        auto_majors: major compute capabilities on which ``auto`` selects it; None: all.
        has_dropout: whether it supports dropout of attention weights.
        has_softcap: whether it supports soft-capped logits.
    """

    name: str
    package: str
    min_major: int
    auto_majors: tuple[int, ...] | None = None
    has_dropout: bool = False
    has_softcap: bool = False

    def missing(self, setup: AttentionSetup) -> str | None:
        """Return why the kernel cannot be used, or None if it can."""
        if setup.device_type != "cuda":
            return f"it has no kernel for `{setup.device_type}`"
        if setup.dtype not in _LOW:
            return f"it computes in bfloat16 and float16, and this run in {setup.dtype}"
        if setup.capability is not None and setup.capability[0] < self.min_major:
            major, minor = setup.capability
            return (
                f"it needs compute capability {self.min_major}.0, and this GPU has {major}.{minor}"
            )
        if self.name not in setup.installed:
            if self.name == VARLEN:
                return "this build of torch has no flash attention"
            return f"the package `{self.package}` is not installed"
        if setup.head_size is not None and setup.head_size > MAX_HEAD_SIZE:
            return f"its head size is at most {MAX_HEAD_SIZE}, and the model's is {setup.head_size}"
        if setup.has_dropout and not self.has_dropout:
            return "it does not support dropout of attention weights"
        return None

    def is_automatic(self, setup: AttentionSetup) -> bool:
        major = None if setup.capability is None else setup.capability[0]
        return self.auto_majors is None or major in self.auto_majors


#: In the order in which ``auto`` prefers them.
FUSED_KERNELS = (
    FusedKernel("flash_attention_4", "flash-attn-4", 9, auto_majors=()),
    FusedKernel("flash_attention_3", "flash-attn-3", 8, auto_majors=(9,)),
    FusedKernel(VARLEN, "torch", 8),
    FusedKernel("flash_attention_2", "flash-attn", 8, has_dropout=True, has_softcap=True),
)


@dataclass(frozen=True)
class AttentionChoice:
    """A kernel for packed rows, and why it was chosen."""

    kernel: str
    reason: str


def fused_kernel(name: str) -> FusedKernel | None:
    """Return the fused kernel of that name, or None for :data:`SDPA` and the like."""
    return next((kernel for kernel in FUSED_KERNELS if kernel.name == name), None)


def choose_attention(requested: str, setup: AttentionSetup) -> AttentionChoice:
    """Choose the kernel for packed rows.

    Args:
        requested: ``train_args.attn_implementation``.
    """
    if requested != "auto":
        name = requested if fused_kernel(requested) else SDPA
        return AttentionChoice(name, f"`train_args.attn_implementation: {requested}`")
    reasons = {}
    for kernel in FUSED_KERNELS:
        if kernel.is_automatic(setup):
            missing = kernel.missing(setup)
            if missing is None:
                return AttentionChoice(kernel.name, f"{setup.dtype} on {setup.device_type}")
            reasons[kernel.name] = missing
    if setup.device_type == "cpu":
        return AttentionChoice(SDPA, "fused kernels for packed rows need a GPU")
    return AttentionChoice(SDPA, f"{VARLEN} cannot be used: {reasons[VARLEN]}")


@cache
def installed_packages() -> frozenset[str]:
    """Return the names of the fused kernels whose packages are installed."""
    names = set()
    for kernel in FUSED_KERNELS:
        try:
            metadata.distribution(kernel.package)
        except metadata.PackageNotFoundError:
            continue
        names.add(kernel.name)
    return frozenset(names - {VARLEN})


def expected_attention(config: Config, device_type: str) -> AttentionChoice:
    """Choose the kernel for packed rows before the device is known exactly, for estimates."""
    args = config.train_args
    installed = installed_packages() | {VARLEN}
    setup = AttentionSetup(device_type, args.mixed_dtype or "float32", installed=installed)
    return choose_attention(args.attn_implementation, setup)


def joins_samples(config: Config, device_type: str) -> bool:
    """Return whether the results of the samples of a packed row are joined by a copy, because they
    are not computed in one call. For estimates, before the device is known exactly."""
    return expected_attention(config, device_type).kernel == SDPA


def attention_text(config: Config, implementation: str, device_type: str) -> UserText:
    """Return which kernel will compute the attention layers of a run, for a plan.

    Args:
        implementation: attention of the model for padded rows.
    """
    kernel = implementation
    if config.train_args.packing is not False and implementation == SDPA:
        kernel = expected_attention(config, device_type).kernel
    return UserText(
        "layers: attention, computed by {kernel}", code="attention-layers", kernel=kernel
    )


def check_attention(
    config: Config, device_type: str, capability: tuple[int, int] | None = None
) -> None:
    """Check that the devices of a run can compute the requested attention.

    Args:
        capability: lowest compute capability of the GPUs.

    Raises:
        ConfigError: if they cannot.
    """
    requested = config.train_args.attn_implementation
    what = f"`train_args.attn_implementation: {requested}` is not supported"
    if requested == "flex_attention" and device_type == "cpu":
        raise ConfigError(
            "{subject} on a CPU: torch has no backward pass of it there",
            code="attention-on-cpu",
            allowed="auto, sdpa, eager",
            fix="set `train_args.attn_implementation: auto`",
            subject=what,
        )
    kernel = fused_kernel(requested)
    if kernel is None or config.task not in CAUSAL_TASKS:
        return
    dtype = config.train_args.mixed_dtype or "float32"
    missing = kernel.missing(AttentionSetup(device_type, dtype, capability, installed_packages()))
    if missing is None:
        return
    if device_type != "cuda":
        fix = "set `train_args.attn_implementation: auto`, which selects what the device supports"
    elif dtype not in _LOW:
        fix = "set `train_args.precision: bf16-mixed`, or `train_args.attn_implementation: auto`"
    elif kernel.name not in installed_packages():
        fix = f"install `{kernel.package}`, or set `train_args.attn_implementation: auto`"
    else:
        fix = "set `train_args.attn_implementation: auto`"
    raise ConfigError(
        "{subject}: {missing}",
        code="attention-missing",
        allowed="auto, sdpa, eager",
        fix=fix,
        subject=what,
        missing=missing,
    )
