"""Build the model, its strategy and optimizer, and the data pipeline of a rank."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.train_state import frozen_digest
from paceline.config.derive import ResolvedValues
from paceline.config.metrics.best import check_best_metric
from paceline.config.schema import Config
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.errors import RunError
from paceline.core.texts import UserText
from paceline.data.loader_process import LoaderOptions, loader_options
from paceline.data.order.base import Order
from paceline.data.order.build import build_order
from paceline.data.pipeline import DataPipeline
from paceline.data.streaming.base import StreamedDataset
from paceline.distributed.communicator import Communicator
from paceline.distributed.devices import cpu_cores
from paceline.distributed.seeds import seed_everything
from paceline.distributed.side_group import SideGroup
from paceline.models.adapters.quantize import move_scales
from paceline.models.context.place import ContextPlace
from paceline.models.experts.counts import count_experts
from paceline.models.shape.outline import Probe, outline
from paceline.models.transforms.activation_offloading import reduce_activations
from paceline.models.transforms.compile import compile_blocks
from paceline.models.transforms.float8 import convert_to_float8
from paceline.models.transforms.parameters import freeze_parameters, parameter_settings
from paceline.models.weights.load import converted_weights, move_model
from paceline.parallel.strategy import Strategy, make_strategy
from paceline.tasks import load_task, uses_transformers
from paceline.tasks.base import Task
from paceline.tasks.user import UserTask, guard_model
from paceline.train.optimizers.averaging import average_weights
from paceline.train.optimizers.build import (
    Schedule,
    build_optimizer,
    matrices_of,
    optimizer_notices,
)
from paceline.train.optimizers.host_state import offload_state
from paceline.train.optimizers.rounding import add_rounding
from paceline.train.precision import Precision
from paceline.train.reference import add_reference_values
from paceline.train.run_spec import RunSpec
from paceline.train.state import (
    TrainComponents,
    initialize_adapters,
)

#: Largest number of loader processes of a rank that streams its data, if the config sets none.
_MAX_STREAM_WORKERS = 4


def expert_notices(model: nn.Module, spec: RunSpec, device_type: str) -> list[tuple[str, str]]:
    """Return a warning if products of a model's fused experts are computed in float32 on an
    accelerator: autocast does not apply to grouped products (torch 2.13), so they have the
    precision of the weights."""
    dtype = spec.config.train_args.mixed_dtype
    if device_type == "cpu" or dtype is None or spec.layout.has_low_weights:
        return []
    has_float32_experts = any(
        parameter.dim() == 3 and "experts" in name and parameter.dtype == torch.float32
        for name, parameter in model.named_parameters()
    )
    if not has_float32_experts:
        return []
    text = UserText(
        "the experts of this model are computed in float32 with `{strategy}`, which is slow:"
        " with `parallel.mode: zero2` or `zero3` they are computed in {dtype}",
        code="experts-in-float32",
        strategy=spec.layout.strategy,
        dtype=dtype,
    )
    return [("warning", text)]


def build_components(
    spec: RunSpec,
    comm: Communicator,
    adjust: Callable[[nn.Module], object] | None = None,
    side: SideGroup | None = None,
) -> tuple[TrainComponents, DataPipeline, list[tuple[str, str]]]:
    """Build the model and the data pipeline, seeded by ``train_args.seed``.

    The order is the same for every strategy: activation checkpointing and offloading wrap the
    forward of the blocks, so that the hooks run outside of it; then the strategy sets up the model.

    Args:
        adjust: function that may change the model before the strategy sets it up.
        side: the group through which checkpoints are read, if some rank does not see the folder.

    Returns:
        The components, the data pipeline, and notices as (level, text).
    """
    quiet_libraries(spec.config, comm.device.type)
    task = load_task(spec.config)
    task.prepared = spec.data
    task.device_type = comm.device.type
    task.tensor_ranks = spec.layout.axes.tensor
    task.global_batch_size = spec.derived.global_batch_size
    if comm.axes.context > 1:
        task.place = ContextPlace(comm.subgroup("context"))
    strategy = make_strategy(spec.layout.strategy, spec.config, comm)
    with strategy.model_init_context():
        model = build_model(task, spec.config)
    if adjust is not None:
        adjust(model)
    initialize_adapters(model, spec, comm, side)
    strategy.num_devices = spec.layout.axes.replicas if spec.layout.num_processes == 1 else 1
    if not any(param.requires_grad for param in model.parameters()):
        raise RunError(
            "the model has no trainable parameters: every parameter is frozen",
            code="no-trainable-parameters",
            fix="set requires_grad of the parameters to train",
        )
    if strategy.rank0_has_full_model:
        # Otherwise it stays on the CPU until it is split: it may not fit on one device.
        move_model(model, comm.device)
        move_scales(model, comm.device)
    with converted_weights(model):
        notices = task.setup(model) + expert_notices(model, spec, comm.device.type)
    datasets = task.build_datasets()
    if isinstance(task, UserTask) and spec.resume_from is None:
        # Not imported for built-in tasks.
        from paceline.tasks.additivity import check_additive, evaluated_names

        # Runs on every rank, because the loss may issue collectives.
        seed = spec.config.train_args.seed
        notices += check_additive(task.task, model, datasets[0], seed)
        if spec.config.train_args.metric_for_best_model and datasets[1] is not None:
            names = evaluated_names(task.task, model, datasets[1], seed)
            check_best_metric(spec.config.train_args, names)
    probe = None
    if spec.layout.axes.pipeline > 1:
        # The loss of one sample shows which tensors the stages must send to each other.
        probe = Probe(lambda model: task.loss(model, task.collate([datasets[0][0]])), rows=1)
    strategy.probe = None if probe is None else probe.run
    digest = frozen_digest(model)
    experts = count_experts(model, comm.device)
    components = distribute(task, model, strategy, spec.config, spec.derived, probe, digest)
    components = replace(components, experts=experts)
    notices += strategy.notices
    options, of_loader = loader_options(
        spec.config.train_args,
        comm.device.type,
        _stream_workers(datasets[0], comm),
        task.collate,
        *datasets,
    )
    notices += of_loader
    data = _build_data(spec, components, options, *datasets)
    if task.num_reference_values:
        notices += add_reference_values(task, components, data, spec.config)
    return components, data, notices


def distribute(
    task: Task,
    model: nn.Module,
    strategy: Strategy,
    config: Config,
    derived: ResolvedValues,
    probe: Probe | None = None,
    digest: str | None = None,
) -> TrainComponents:
    """Distribute the model over the ranks, and build the optimizer. A collective.

    Args:
        digest: digest of the frozen weights.
    """
    with converted_weights(model):
        shape, decayed = outline(model, config, probe), matrices_of(model)
    settings = parameter_settings(model, config, derived.learning_rate)
    strategy.notices += convert_to_float8(model, config.train_args)
    placed = strategy.setup(model)
    move_scales(model, strategy.world.device)
    args = config.train_args
    optimizer = strategy.setup_optimizer(
        lambda named: build_optimizer(
            args, derived.learning_rate, named, decayed, shape.optimizer.matrices, settings
        )
    )
    strategy.notices += optimizer_notices(args, shape.optimizer, optimizer)
    if args.ema_decay is not None:
        average_weights(optimizer, args.ema_decay)
    if args.weight_dtype == "bfloat16":
        add_rounding(optimizer, args.seed, strategy.tensor_shards())
    offload_state(optimizer, strategy)
    precision = Precision(args, strategy.world)
    strategy.scaler = precision.scaler
    schedule = Schedule(optimizer, args, derived)
    return TrainComponents(task, placed, shape, strategy, optimizer, schedule, precision, digest)


def _stream_workers(dataset: Any, comm: Communicator) -> int:
    """Return the number of loader processes of a rank that streams its data, if the config sets
    none; 0 if the rank does not. They tokenize ahead of the step."""
    if not isinstance(dataset, StreamedDataset):
        return 0
    return max(1, min(_MAX_STREAM_WORKERS, cpu_cores() // comm.env.local_world_size))


def _build_data(
    spec: RunSpec,
    components: TrainComponents,
    options: LoaderOptions,
    train_dataset: Any,
    eval_dataset: Any | None,
) -> DataPipeline:
    strategy, task = components.strategy, components.task
    replica, num_replicas = strategy.replica, strategy.num_replicas
    accumulation = spec.derived.gradient_accumulation_steps
    if spec.layout.num_processes == 1:  # this process runs the micro-batches of all devices
        accumulation *= spec.layout.axes.replicas
    if spec.config.task in ROLLOUT_TASKS:
        from paceline.train.rollouts.build import build_rollout_pipeline

        return build_rollout_pipeline(
            spec, components, options, train_dataset, eval_dataset, accumulation
        )
    return DataPipeline(
        train_dataset,
        eval_dataset,
        _sample_order(spec, task, train_dataset),
        task.collate,
        options,
        last_step=spec.derived.steps,
        accumulation=accumulation if strategy.has_data else 0,
        replica=replica,
        num_replicas=num_replicas,
    )


def _sample_order(spec: RunSpec, task: Task, dataset: Any) -> Order:
    batch_size = spec.derived.global_batch_size
    if isinstance(dataset, StreamedDataset):
        return dataset.order(batch_size)
    return build_order(
        spec.config,
        spec.data.sources,
        batch_size,
        spec.derived.steps_per_epoch or 1,
        getattr(dataset, "lengths", None),
        len(dataset),
        is_packed=getattr(task, "packed", True),
    )


def build_model(task: Task, config: Config) -> nn.Module:
    seed_everything(config.train_args.seed, "init")
    model = task.build_model()
    guard_model(model)
    freeze_parameters(model, config.train_args)
    if config.adds_tokens:
        from paceline.models.new_tokens import (
            check_token_embeddings,  # not needed by most runs
        )

        check_token_embeddings(model, config)
    compile_blocks(model, config.train_args)
    reduce_activations(model, config)
    return model


def quiet_libraries(config: Config, device_type: str) -> None:
    """Suppress messages of libraries that users cannot act on."""
    if device_type == "cpu":
        # transformers imports DeepSpeed if it is installed, which would search for accelerators and
        # print that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # peft calls deprecated functions of transformers, which users cannot change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    # The launcher prints this warning once for all ranks.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if "transformers" in sys.modules or uses_transformers(config):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
