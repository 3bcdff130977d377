"""Tiny models in the formats of quantized releases, each with a plain model of the same weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from families import make_model
from safetensors.torch import load_file, save_file

#: Layers that releases leave in 16 bits.
KEPT = ("lm_head", "embed", "norm", "router", "gate.weight")
BLOCK = (16, 16)
FP8_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": list(BLOCK),
}
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def make_release(family: str, folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """Write a quantized model of a family, MXFP4 for gpt_oss and FP8 for others; return its folder
    and the folder of a model with the dequantized weights in float32.

    Args:
        overrides: values in the model's config that differ from the family's.
    """
    if family == "gpt_oss":
        overrides = {"intermediate_size": 64, **overrides}  # blocks of 32 numbers
    source = make_model(family, folder, **overrides)
    plain, release = folder / f"{family}-plain", folder / f"{family}-release"
    for target in (plain, release):
        shutil.copytree(source, target)
    quantized, dequantized = {}, {}
    torch.manual_seed(0)
    for name, weight in load_file(source / "model.safetensors").items():
        if family == "gpt_oss":
            added, value = _in_mxfp4(name, weight)
        else:
            added, value = _in_fp8(name, weight)
        quantized |= added
        dequantized[name] = value
    save_file(quantized, release / "model.safetensors", metadata={"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    method = MXFP4_CONFIG if family == "gpt_oss" else FP8_CONFIG
    edit_config(release, dtype="bfloat16", quantization_config=method)
    edit_config(plain, dtype="float32")
    return release, plain


def edit_config(folder: Path, **values: Any) -> None:
    """Change values in the config.json of a model."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _in_mxfp4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored tensors of a weight, and its dequantized values."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        kept = weight.bfloat16()
        return {name: kept}, kept.float()
    num_experts, num_inputs, num_outputs = weight.shape
    shape = (num_experts, num_outputs, num_inputs // 32)
    codes = torch.randint(0, 16, (*shape, 32))
    exponents = torch.randint(119, 123, shape)
    values = torch.tensor(E2M1)[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)
    values = values * 2.0 ** (exponents - 127).float().unsqueeze(-1)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    stored = {f"{name}_blocks": packed.byte(), f"{name}_scales": exponents.byte()}
    plain = values.reshape(num_experts, num_outputs, num_inputs).transpose(1, 2).contiguous()
    return stored, plain


def _in_fp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if weight.dim() != 2 or any(part in name for part in KEPT):
        kept = weight.bfloat16()
        return {name: kept}, kept.float()
    rows, columns = weight.shape
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    plain = torch.empty_like(weight)
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
            )
            scale = weight[part].abs().max() / 448
            numbers[part] = (weight[part] / scale).to(torch.float8_e4m3fn)
            plain[part] = numbers[part].float() * scale
            scales[row, column] = scale
    return {name: numbers, f"{name}_scale_inv": scales}, plain
