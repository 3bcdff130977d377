"""Describe the model of a config without loading its weights: shape and dimensions; for models
other than language models, also a trial on torch's meta device, which computes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError, first_line
from paceline.core.texts import UserText
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import config_folder
from paceline.models.kernels.attention_choice import attention_text
from paceline.models.kernels.layer_kernels import LayerKernels, has_attention, layer_kernels
from paceline.models.kinds import reads_images
from paceline.models.shape.dims import LanguageDims, dims_of
from paceline.models.shape.record import ModelShape, total_bytes

if TYPE_CHECKING:
    from torch import nn

    from paceline.tasks.base import Task


@dataclass(frozen=True)
class ModelProfile:
    """A model to plan for.

    Args:
        dims: sizes of a language model; None for other models, and for language models whose
            config.json is of an unknown architecture.
        activation_bytes, flops: figures of one micro-batch, from the trial; 0 if the trial was not
            possible. Unused with ``dims``.
        fused_attention: the model stores no attention scores.
        mapped_bytes: bytes of frozen weights that are used in the pages of the model's files.
        attention: attention implementation of a language model; None without attention layers.
        layers: what computes the recurrent and convolution layers of a language model.
        has_batch_norm: whether the result depends on the size of the micro-batches.
        has_replaceable_attention: whether attention can exchange keys and values between ranks.
        num_experts: number whose divisors are the numbers of ranks that can divide the experts; 0
            if no number can.
    """

    shape: ModelShape
    dims: LanguageDims | None = None
    activation_bytes: int = 0
    flops: float = 0.0
    fused_attention: bool = True
    mapped_bytes: int = 0
    notes: tuple[str, ...] = ()
    attention: str | None = None
    layers: tuple[LayerKernels, ...] = ()
    has_batch_norm: bool = False
    has_replaceable_attention: bool = False
    num_experts: int = 0

    @property
    def knows_activations(self) -> bool:
        """Whether the memory of activations is known."""
        return self.dims is not None or self.activation_bytes > 0

    def kernel_texts(self, config: Config, device_type: str) -> list[UserText]:
        """Return what computes each kind of layers, for users.

        Args:
            device_type: type of the devices to plan for.
        """
        texts = [each.notice(device_type) for each in self.layers]
        if self.attention is not None:
            texts.insert(0, attention_text(config, self.attention, device_type))
        return texts

    def scaled(self, share: float) -> Self:
        """Return the profile for a micro-batch of ``share`` times the size."""
        activation_bytes = round(self.activation_bytes * share)
        return replace(self, activation_bytes=activation_bytes, flops=self.flops * share)


#: What the profile of a language model does not depend on. Every other key may change it.
_NOT_OF_LANGUAGE_MODELS: Mapping[str, set[str] | bool] = {
    "dataset": True, "val_dataset": True, "split_dataset_ratio": True, "format": True,
    "system": True, "output_dir": True, "resume": True, "recovery": True, "evaluation": True,
    "parallel": {
        "mode", "optimize_for", "allow_lossy", "data", "shard", "context", "context_method",
        "tensor", "pipeline", "expert", "num_gpus", "cpu_offload",
    },
    "train_args": {
        "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size",
        "per_device_eval_batch_size", "gradient_accumulation_steps", "global_batch_size",
        "gradient_checkpointing", "warmup_ratio", "warmup_steps", "seed", "max_length",
        "logging_steps", "save_steps", "eval_steps",
    },
}  # fmt: skip
#: Profiles of language models by key; None if they are not kept.
_remembered: dict[str, ModelProfile] | None = None


def remember_profiles() -> dict[str, ModelProfile]:
    """Keep the profiles of language models for later plans of this process. Return them; the caller
    may add others and remove some."""
    global _remembered
    if _remembered is None:
        _remembered = {}
    return _remembered


def _language_key(config: Config) -> str:
    """Return a text that is equal for configs with the same profile: the settings that may change
    it, and the state of the model's files."""
    from paceline.models.weights.stored_files import files_identity

    folder = config_folder(resolve_model(config.model))
    files = None if folder is None or not (folder / "config.json").is_file() else folder
    settings = config.model_dump(mode="json", exclude=_NOT_OF_LANGUAGE_MODELS)
    identity = None if files is None else files_identity(files)
    return json.dumps([settings, identity], sort_keys=True, default=str)


def describe(config: Config) -> ModelProfile:
    """Build the model without weights and describe it.

    Raises:
        ConfigError: there is no such model, or the task's code fails to build it.
    """
    if config.task in CAUSAL_TASKS and not reads_images(config):
        if _remembered is None:
            return _language(config)
        key = _language_key(config)
        if key not in _remembered:
            _remembered[key] = _language(config)
        return _remembered[key]
    from paceline.tasks import load_task

    task = load_task(config)
    task.check()
    return _other(task, config)


def _language(config: Config) -> ModelProfile:
    from paceline.models.attention import attention_of, is_replaceable
    from paceline.models.blocks import base_model
    from paceline.models.experts.layers import num_divided_experts
    from paceline.models.language import language_model_on_meta
    from paceline.models.shape.outline import outline
    from paceline.models.weights.release import release_notice

    _check_folder(config)
    part = _part_of_equal_blocks(config)
    if part is None:
        model: nn.Module = language_model_on_meta(config)
        part = model, outline(model, config)
    model, shape = part
    base: Any = base_model(model)
    dims = dims_of(base.config.to_dict())
    of_release = release_notice(config)
    notes: tuple[str, ...] = () if of_release is None else (of_release,)
    if dims is None:
        notes += ("the activations and operations of this model are not known and left out",)
    elif dims.linear_layers:
        notes += (
            UserText(
                "model: the memory of linear attention is estimated for transformers' own"
                " operations; the kernels of flash-linear-attention keep less",
                code="linear-attention-memory",
            ),
        )
    fused = attention_of(base) != "eager"
    return ModelProfile(
        shape,
        dims,
        fused_attention=fused,
        mapped_bytes=_mapped_bytes(shape, config),
        notes=notes,
        attention=attention_of(base) if has_attention(base) else None,
        layers=tuple(layer_kernels(base)),
        num_experts=num_divided_experts(base),
        has_replaceable_attention=has_attention(base) and is_replaceable(base),
    )


def _part_of_equal_blocks(config: Config) -> tuple[nn.Module, ModelShape] | None:
    """Build the model without its equal blocks, because adapters of hundreds of layers take
    seconds. Return it with the shape of the whole model; None if that is not possible."""
    from paceline.models.blocks import find_blocks
    from paceline.models.language import language_model_on_meta
    from paceline.models.shape.equal_blocks import without_equal_blocks
    from paceline.models.shape.outline import outline_of_all_blocks

    if _names_single_blocks(config):
        return None
    stand_ins: dict[str, str] = {}
    with ExitStack() as stack:

        def leave_out(model: nn.Module) -> None:
            stand_ins.update(stack.enter_context(without_equal_blocks(model)))

        try:
            model = language_model_on_meta(config, before_adapters=leave_out)
        except ConfigError:  # the error of the whole model names all that it has
            return None
        if not stand_ins:
            return None
        prefix = find_blocks(model)[0][0].removesuffix(next(iter(stand_ins)))  # of adapters
        names = {f"{prefix}{name}": f"{prefix}{each}" for name, each in stand_ins.items()}
        shape = outline_of_all_blocks(model, config, names)
    return None if shape is None else (model, shape)


def _names_single_blocks(config: Config) -> bool:
    """Return whether the config may treat a block differently from other blocks."""
    args, lora = config.train_args, config.lora
    targets = lora.target_modules
    names = [*lora.modules_to_save, *(targets if isinstance(targets, list) else [])]
    return bool(
        args.freeze
        or args.trainable
        or args.trainable_layers is not None
        or config.parallel.tensor_plan
        or lora.adapter is not None
        or (isinstance(targets, str) and targets != "all-linear")
        or any("." in name for name in names)
    )


def _mapped_bytes(shape: ModelShape, config: Config) -> int:
    from paceline.models.weights.release import weights_bytes
    from paceline.models.weights.stored_files import MIN_CONVERTED_BYTES, mapped_bytes

    folder = config_folder(resolve_model(config.model))
    if folder is None or not config.lora.enable:
        return 0
    frozen = shape.parameter_bytes - total_bytes(shape.trained)
    dtype = config.train_args.mixed_dtype or "float32"
    mapped = mapped_bytes(folder, dtype)
    is_copied = weights_bytes(folder, dtype) - mapped >= MIN_CONVERTED_BYTES
    return frozen if is_copied else min(mapped, frozen)


def _check_folder(config: Config) -> None:
    """Check that a model's folder is complete except for the weights, which are not needed."""
    from paceline.models.files import check_files

    try:
        check_files(config)
    except ConfigError as error:
        if error.code not in ("missing-weights", "missing-weight-files"):
            raise


def _other(task: Task, config: Config) -> ModelProfile:
    from paceline.models.shape.outline import Probe, outline

    task.prepared = task.prepare()
    model, on_meta = _build(task)
    dataset, _ = task.build_datasets()
    shape = outline(model, config)
    notes = []
    activation_bytes, flops = 0, 0.0
    if on_meta:
        try:
            task.prepare_trial(model)
            shape = outline(
                model,
                config,
                Probe(lambda built: task.trial_loss(built, task.collate([dataset[0]])), rows=1),
            )
            activation_bytes, flops = _trial(task, model, config, dataset)
        except Exception as error:  # the user's code, on tensors without values
            notes.append(
                "activations are not known: the model does not run without values"
                f" ({type(error).__name__}: {first_line(error)})"
            )
    else:
        notes.append("activations are not known: the model cannot be built without values")
    return ModelProfile(
        shape,
        None,
        activation_bytes,
        flops,
        notes=tuple(notes),
        has_batch_norm=_has_batch_norm(model),
    )


def _has_batch_norm(model: nn.Module) -> bool:
    from paceline.models.blocks import BATCH_NORMS

    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


def _build(task: Task) -> tuple[nn.Module, bool]:
    """Return the task's model, and whether it is on the meta device."""
    import torch

    from paceline.models.transforms.parameters import freeze_parameters

    try:
        with torch.device("meta"):
            model = task.build_model()
        freeze_parameters(model, task.config.train_args)
        if all(parameter.device.type == "meta" for parameter in model.parameters()):
            return model, True
    except ConfigError:
        raise
    except Exception:  # code that reads values; the second try, on the CPU, reports real errors
        pass
    try:
        model = task.build_model()
        freeze_parameters(model, task.config.train_args)
        return model, False
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "`task: {task}`: build_model failed: {kind}: {reason}",
            code="build-model-failed",
            fix="run `paceline sft --debug` to see the traceback",
            task=task.config.task,
            kind=type(error).__name__,
            reason=error,
        ) from error


def _trial(task: Task, model: nn.Module, config: Config, dataset: Any) -> tuple[int, float]:
    """Return the bytes stored for backward, and the operations of forward and backward, of one
    micro-batch in float32. Nothing is computed."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from paceline.distributed import torch_compat
    from paceline.models.transforms.activation_checkpointing import checkpoint_activations

    checkpoint_activations(model, config.train_args.recomputation)
    size = config.train_args.per_device_train_batch_size
    batch = task.collate([dataset[index % len(dataset)] for index in range(size)])
    weights = {
        torch_compat.storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())
    }
    # Holds the storages themselves, because the id of a freed storage is reused.
    stored: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = torch_compat.storage_id(tensor)
        if key not in weights:
            stored[key] = tensor.untyped_storage()
        return tensor

    counter = FlopCounterMode(display=False)
    with counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = task.trial_loss(model, batch)
            size_bytes = sum(storage.nbytes() for storage in stored.values())
        stored.clear()
        loss.backward()
    return size_bytes, float(counter.get_total_flops())
