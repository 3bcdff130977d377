"""Load a user's task from a file or a module, and check what its methods return."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from paceline.core.errors import ConfigError, did_you_mean, nearest
from paceline.core.texts import UserText
from paceline.core.user_code import error_summary, import_user_module, user_error
from paceline.tasks.base import Prepared, Task

if TYPE_CHECKING:
    from paceline.config.schema import Config

_FORM = "./file.py:Class or package.module:Class"
_REQUIRED = ("build_datasets", "build_model", "loss")
#: What to use instead of methods that are common in Lightning, transformers and tutorials and that
#: Paceline does not call.
_NOT_CALLED = {
    (
        "the optimizer and its schedule are set by `train_args` (`optim`, `learning_rate`, "
        "`lr_scheduler_type`)"
    ): (
        "configure_optimizers build_optimizer build_optimizers create_optimizer create_scheduler "
        "get_optimizer make_optimizer build_scheduler build_lr_scheduler configure_scheduler "
        "create_optimizer_and_scheduler optimizer_step lr_scheduler_step "
        "configure_gradient_clipping clip_gradients zero_grad optimizer_zero_grad"
    ),
    (
        "Paceline creates the data loaders and samplers; set `train_args` "
        "(`per_device_train_batch_size`, `shuffle`, `dataloader_num_workers`) and return the "
        "datasets from build_datasets"
    ): (
        "train_dataloader val_dataloader test_dataloader predict_dataloader build_dataloader "
        "build_dataloaders make_dataloader make_dataloaders get_dataloader get_dataloaders "
        "get_train_dataloader get_eval_dataloader build_train_dataloader build_val_dataloader "
        "build_sampler get_sampler train_sampler sampler batch_sampler get_train_sampler "
        "dataloader prepare_data"
    ),
    "the training loop calls loss(self, model, batch)": (
        "training_step train_step compute_loss forward backward train_epoch train_one_epoch fit "
        "on_train_start on_train_end on_train_epoch_start on_train_epoch_end on_train_batch_start "
        "on_train_batch_end on_before_optimizer_step configure_callbacks configure_model "
        "training_epoch_end"
    ),
    "evaluation calls evaluate(self, model, batch) and metrics(self, gathered)": (
        "validation_step val_step test_step predict_step eval_step compute_metrics "
        "validation_epoch_end on_validation_epoch_end on_validation_start on_validation_end "
        "validate"
    ),
    "the collate function is collate(self, samples)": ("collate_fn data_collator get_collate_fn"),
}
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def load_user_task(config: Config) -> Task:
    """Return an instance of the class that ``config.task`` names, in a :class:`UserTask`.

    Every rank calls this, so that no instance is sent between processes.

    Raises:
        ConfigError: the file or the class does not exist or is not a task, or user code raised an
            exception; the message shows the line.
    """
    if config.lora.enable:
        raise ConfigError(
            "`lora.enable: true` has no effect on a task of your own",
            code="no-effect",
            fix="remove it, and wrap the model with peft.get_peft_model in build_model",
        )
    location, _, class_name = config.task.strip().rpartition(":")
    if not location or (class_name.endswith(".py") and not class_name.isidentifier()):
        location, class_name = config.task.strip(), ""
    module = import_user_module(location, f"task: {config.task}", _FORM)
    task_class = _find_class(module, location, class_name)
    return cast(Task, UserTask(_create(task_class, config)))


class UserTask:
    """A wrapper around a user's task that checks the datasets. All other attributes are the
    task's.

    It is not a subclass of :class:`Task`, because the default methods would hide the user's.
    """

    def __init__(self, task: Task) -> None:
        vars(self)["task"] = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.task, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return UserTask, (self.task,)

    def build_datasets(self) -> tuple[Any, Any | None]:
        name = type(self.task).__name__
        datasets = self._call("build_datasets")
        if not isinstance(datasets, tuple) or len(datasets) != 2:
            raise ConfigError(
                "{name}.build_datasets returned {kind}",
                code="wrong-result",
                allowed="a pair: (training dataset, validation dataset or None)",
                fix="end it with e.g. `return train, None`",
                name=name,
                kind=_kind(datasets),
            )
        for dataset, kind in zip(datasets, ("training", "validation"), strict=True):
            if dataset is None and kind == "validation":
                continue
            guard_dataset(dataset, f"the {kind} dataset of {name}")
            class_name = f"{type(dataset).__module__}.{type(dataset).__name__}"
            if class_name == "torch.utils.data.dataset.TensorDataset":
                # It draws no random numbers, so the loader need not seed each look-up.
                dataset.deterministic = True
        return datasets

    def prepare(self) -> Prepared:
        if type(self.task).prepare is Task.prepare:
            prepared = Task.prepare(cast(Task, self))
        else:
            prepared = self._call("prepare")
        if not isinstance(prepared, Prepared):
            raise ConfigError(
                "{kind}.prepare returned {result}",
                code="wrong-prepare-result",
                allowed="a paceline.tasks.base.Prepared",
                fix="return one, or omit prepare",
                kind=type(self.task).__name__,
                result=_kind(prepared),
            )
        notices = [*_contract_notices(type(self.task)), *prepared.notices]
        return replace(prepared, notices=notices)

    def _call(self, name: str) -> Any:
        task_class = type(self.task)
        try:
            return getattr(self.task, name)()
        except ConfigError:
            raise
        except Exception as error:
            text = f"{task_class.__name__}.{name} failed"
            raise user_error(text, error, _file_of(task_class)) from error


def _find_class(module: ModuleType, location: str, class_name: str) -> type[Task]:
    tasks = sorted(name for name, value in vars(module).items() if _is_task(value))
    listing = "task classes in it: " + (", ".join(tasks) or "none")
    if not class_name:
        raise ConfigError(
            "`task: {location}` names no class",
            code="task-without-class",
            allowed="{form}; {listing}",
            fix="write `task: {location}:{tasks}`",
            location=location,
            form=_FORM,
            listing=listing,
            tasks=(tasks or ["Class"])[0],
        )
    task_class = getattr(module, class_name, None)
    if task_class is None:
        near = nearest(class_name, tasks)
        raise ConfigError(
            "`task: {location}:{class_name}`: {location} has no class {class_name}",
            code="unknown-task-class",
            allowed=listing,
            fix="did you mean `task: {location}:{near}`?"
            if tasks
            else "write one: a subclass of paceline.Task",
            location=location,
            class_name=class_name,
            near=near or next(iter(tasks), ""),
        )
    if not _is_task(task_class):
        kind = "a class" if inspect.isclass(task_class) else _kind(task_class)
        if task_class is Task:
            kind = "the base class itself"
        raise ConfigError(
            "`task: {location}:{class_name}`: {class_name} is {kind}, not a subclass of"
            " paceline.Task",
            code="not-a-task",
            allowed=listing,
            fix="write `class {class_name}(paceline.Task):`",
            location=location,
            class_name=class_name,
            kind=kind,
        )
    missing = [name for name in _REQUIRED if getattr(task_class, name) is getattr(Task, name)]
    if missing:
        raise ConfigError(
            "`task: {location}:{class_name}`: {class_name} has no {missing}",
            code="missing-method",
            allowed="a task needs build_datasets(self), build_model(self) and loss(self, model,"
            " batch)",
            fix="add {missing} to {class_name}",
            location=location,
            class_name=class_name,
            missing=", ".join(missing),
        )
    return cast("type[Task]", task_class)


def _is_task(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Task) and value is not Task


def _create(task_class: type[Task], config: Config) -> Task:
    name = task_class.__name__
    try:
        task = task_class(config)
    except ConfigError:
        raise
    except Exception as error:
        fix = None
        if isinstance(error, TypeError) and f"{name}.__init__()" in str(error):
            fix = "accept the config: def __init__(self, config): super().__init__(config)"
        raise user_error(f"{name}(config) failed", error, _file_of(task_class), fix) from error
    if getattr(task, "config", None) is not config:
        raise ConfigError(
            "{name}.__init__ does not set self.config",
            code="missing-config",
            fix="call super().__init__(config) in it, or omit __init__",
            name=name,
        )
    return task


def _contract_notices(task_class: type[Task]) -> list[tuple[str, str]]:
    """Return warnings about methods that Paceline does not call, and about a loss that is declared
    as not additive."""
    name = task_class.__name__
    defined = {
        method
        for base in task_class.__mro__
        if base is not Task and issubclass(base, Task)
        for method in _public_methods(base)
    }
    warnings = []
    not_called = set()
    for alternative, methods in _NOT_CALLED.items():
        not_called.update(methods.split())
        unused = [method for method in methods.split() if method in defined]
        if unused:
            warnings.append(
                UserText(
                    "{name} defines {methods}, which Paceline does not call: {alternative}",
                    code="methods-not-called",
                    name=name,
                    methods=", ".join(unused),
                    alternative=alternative,
                )
            )
    hooks = _public_methods(Task)
    for method in sorted(defined - hooks - not_called):
        question = did_you_mean(method, hooks - defined, form="{}", cutoff=0.85)
        if question:
            question = question[0].upper() + question[1:]
            warnings.append(
                UserText(
                    "{name} defines {method}, which Paceline does not call. {question}",
                    code="similar-method-not-called",
                    name=name,
                    method=method,
                    question=question,
                )
            )
    if not task_class.additive:
        warnings.append(
            UserText(
                "{name} sets `additive = False`: the loss depends on the micro-batch size and on"
                " the number of ranks",
                code="loss-not-additive",
                name=name,
            )
        )
    return [("warning", text) for text in warnings]


def _public_methods(task_class: type) -> set[str]:
    return {
        name
        for name, member in vars(task_class).items()
        if not name.startswith("_") and callable(member)
    }


def guard_dataset(dataset: Any, name: str) -> None:
    """Raise ConfigError unless ``dataset`` has a length and can be indexed. ``name`` describes the
    dataset in the message."""
    classes = _torch_classes(type(dataset))
    if "IterableDataset" in classes:
        raise ConfigError(
            "{name} is an IterableDataset ({kind}), which is not supported: it has no fixed order,"
            " cannot be split among ranks without gaps, and cannot resume in the middle of an"
            " epoch",
            code="iterable-dataset",
            allowed="a map-style dataset: __len__() and __getitem__(index)",
            fix="read it into a list or a file, or index it; see torch.utils.data.Dataset",
            name=name,
            kind=type(dataset).__name__,
        )
    if "DataLoader" in classes:
        raise ConfigError(
            "{name} is a DataLoader; Paceline creates the data loaders itself, one per rank",
            code="data-loader",
            fix="return the dataset; set batch size, workers and `shuffle` in train_args, collate"
            " in collate(self, samples)",
            name=name,
        )
    methods = [
        method for method in ("__len__", "__getitem__") if not hasattr(type(dataset), method)
    ]
    missing = " and ".join(methods)
    if missing:
        raise ConfigError(
            "{name} is {kind} without {missing}",
            code="not-a-dataset",
            allowed="a map-style dataset: __len__() and __getitem__(index)",
            fix="add {missing}, or return a list of samples",
            name=name,
            kind=_kind(dataset),
            missing=missing,
        )
    try:
        len(dataset)
    except Exception as error:  # torch's samplers and wrappers define __len__ and raise in it
        raise ConfigError(
            "{name} is {kind}, whose len() raises {reason}",
            code="dataset-without-length",
            name=name,
            kind=_kind(dataset),
            reason=error_summary(error),
        ) from error


def guard_model(model: Any) -> None:
    """Raise ConfigError if ``model`` is not a module, or if it or a part of it is already wrapped
    for several devices. Compares class names, so that it imports nothing."""
    if "Module" not in _torch_classes(type(model)):
        raise ConfigError(
            "build_model returned {kind}",
            code="not-a-module",
            allowed="a torch.nn.Module",
            fix="end build_model with `return model`",
            kind=_kind(model),
        )
    for path, module in model.named_modules():
        classes = _torch_classes(type(module))
        wrapper = next((wrapper for wrapper in _WRAPPERS if wrapper in classes), None)
        if wrapper is None:
            continue
        place = f"its part `{path}`" if path else "it"
        plain = (
            "the plain module" if wrapper == "FSDPModule" else "the module inside (its `.module`)"
        )
        raise ConfigError(
            "the model is already wrapped: {place} is a {wrapper}. Paceline places the model on"
            " every rank and reduces the gradients itself; with a second wrapper they would be"
            " reduced twice or not at all",
            code="wrapped-model",
            fix="unwrap it: return {plain}; `parallel.mode` selects the strategy",
            place=place,
            wrapper=wrapper,
            plain=plain,
        )


def _torch_classes(cls: type) -> set[str]:
    """Return the names of the class and its bases that are defined by torch."""
    return {base.__name__ for base in cls.__mro__ if base.__module__.split(".")[0] == "torch"}


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of {type(value).__name__}"


def _file_of(cls: type) -> Path | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file) if file else None
