"""Choose how samples share a row, by a test on the model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config.schema import Config
from paceline.data.collate import segment_inputs
from paceline.distributed import torch_compat
from paceline.models import attention
from paceline.models.blocks import base_model, evaluation_mode
from paceline.models.checks.cache import check_of_model
from paceline.models.kernels.attention_choice import SDPA, AttentionChoice, choose_attention


@dataclass(frozen=True)
class PackingChoice:
    """How samples share a row.

    Args:
        rows: "segments" (attention within each sample only), "positions" (the model's own
            attention, with samples separated by position_ids), or "none" (padded rows).
        reason: why the attention was chosen.
    """

    rows: str
    reason: str


def choose_packing(
    model: Any, device: torch.device, config: Config, device_type: str = "cpu"
) -> PackingChoice:
    """Choose how samples share a row, and switch the model to the attention that this requires.

    Runs two short samples separately and in one row, and compares the logits. Architectures that
    mix samples (state-space models, older attention implementations) are trained with padding. If
    tensors have no values, as in a simulation, the logits count as equal. That a model passed the
    test is stored for later runs; one that did not is tested again, because the reason may have
    been a lack of memory. A strategy that splits the model keeps it on the CPU until then; its
    attention is nevertheless computed on the device that the run trains on, by the kernel that
    trains.

    Args:
        device: device of the model, which may still be the CPU.
        device_type: type of device that the run trains on.
    """
    base = base_model(model)
    numbers = base.config.get_text_config()
    if getattr(numbers, "attention_chunk_size", None):
        # Attention chunks are counted from the start of the row, which two short samples would not
        # reveal.
        return PackingChoice("none", "the model computes attention in chunks")
    requested = config.train_args.attn_implementation
    choice = choose_attention(requested, attention.attention_setup(config, base, device_type))
    passed = PackingChoice("segments", choice.reason)
    stored = check_of_model("packing", model, config, device_type, choice.kernel)
    if stored.read() is not None and attention.install(base, choice.kernel) is not None:
        return passed
    packing = _check_packing(model, device, config, choice, device_type)
    if packing == passed:
        stored.write({"kernel": choice.kernel})
    return packing


def _check_packing(
    model: Any,
    device: torch.device,
    config: Config,
    choice: AttentionChoice,
    device_type: str,
) -> PackingChoice:
    base = base_model(model)
    vocabulary = int(getattr(base.config.get_text_config(), "vocab_size", 0))
    generator = torch.Generator().manual_seed(0)
    lengths = (7, 5)
    ids = [
        torch.randint(0, max(vocabulary, 2), (1, length), generator=generator).to(device)
        for length in lengths
    ]
    row = {
        "input_ids": torch.cat(ids, dim=1),
        "position_ids": torch.cat(
            [torch.arange(length, device=device) for length in lengths]
        ).unsqueeze(0),
    }
    with evaluation_mode(model), torch.no_grad(), _autocast(config, device, choice.kernel):
        alone = torch.cat(
            [model(input_ids=tokens, use_cache=False).logits for tokens in ids], dim=1
        ).float()
        segments = segment_inputs(lengths, device)
        for kernel in dict.fromkeys((choice.kernel, SDPA)):
            if attention.install(base, kernel) is None:
                continue
            with _attention_on(device_type, alone, config, kernel):
                agrees = _agrees(model, alone, row | segments, is_fused=kernel != SDPA)
            if agrees:
                reason = choice.reason
                if kernel != choice.kernel:
                    reason = f"{choice.kernel} does not compute this model's attention"
                return PackingChoice("segments", reason)
            attention.uninstall(base)
        rows = "positions" if _agrees(model, alone, row) else "none"
        return PackingChoice(rows, "the model's own attention")


def _autocast(config: Config, device: torch.device, kernel: str) -> AbstractContextManager[Any]:
    """Return autocast for a fused kernel, which does not compute in float32, and for modules that
    are trained in full in float32 between frozen ones in 16 bits."""
    low, lora = config.train_args.mixed_dtype, config.lora
    is_fused = kernel != SDPA and device.type != "cpu"
    mixes_dtypes = lora.enable and bool(lora.modules_to_save or config.adds_tokens)
    if low is None or not (is_fused or mixes_dtypes):
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, low))


@contextmanager
def _attention_on(
    device_type: str, like: torch.Tensor, config: Config, kernel: str
) -> Iterator[None]:
    """Compute the attention that is installed on the device that the run trains on within the
    block, if the model is still on the CPU.

    Args:
        like: a result of the model, whose device is the model's.
    """
    if like.device.type == device_type or not torch_compat.has_values(like):
        yield
        return
    device = torch.device(device_type)

    def compute(
        installed: Any, module: torch.nn.Module, *states: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        query = states[0]
        states = tuple(_moved(state, device) for state in states)
        options = {name: _moved(option, device) for name, option in options.items()}
        with _autocast(config, device, kernel):
            result, _ = installed(module, *states, **options)
        return result.to(query.device, query.dtype), None

    with attention.wrapped(compute):
        yield


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _agrees(
    model: Any, expected: torch.Tensor, inputs: dict[str, Any], is_fused: bool = False
) -> bool:
    try:
        result = model(**inputs, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return False
    if not torch_compat.has_values(result):
        return True
    is_exact = result.dtype == torch.float32 and next(model.parameters()).dtype == torch.float32
    # A fused kernel computes in 16 bits, also where the rest of the model computes in float32.
    is_exact = is_exact and not is_fused
    tolerance = 1e-4 if is_exact else 5e-2
    limit = tolerance * expected.abs().max().clamp(min=1.0)
    return bool((result.float() - expected).abs().max() <= limit)
