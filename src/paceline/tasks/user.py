"""The user's own task, from a file or a module, and the guards on what it hands over."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, did_you_mean, nearest
from paceline.tasks.base import Prepared, Task

if TYPE_CHECKING:
    from paceline.config.schema import Config

_FORM = "./file.py:Class or package.module:Class"
_NEEDED = ("build_datasets", "build_model", "loss")
#: Methods of Lightning, transformers and of tutorials that Paceline does not call, and what to use
#: instead.
_NOT_CALLED = {
    (
        "the optimizer and its schedule come from `train_args` (`optim`, `learning_rate`, "
        "`lr_scheduler_type`)"
    ): (
        "configure_optimizers build_optimizer build_optimizers create_optimizer create_scheduler "
        "get_optimizer make_optimizer build_scheduler build_lr_scheduler configure_scheduler "
        "create_optimizer_and_scheduler optimizer_step lr_scheduler_step "
        "configure_gradient_clipping clip_gradients zero_grad optimizer_zero_grad"
    ),
    (
        "Paceline makes the loaders and the samplers; set `train_args` "
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
    """An instance of the class that ``config.task`` names, with its datasets guarded.

    Every rank calls this afresh, so an instance never travels between processes.

    Raises:
        ConfigError: no such file or class, a class of another kind, or user code that raises: with
            the line of it.
    """
    if config.lora.enable:
        raise ConfigError(
            "`lora.enable: true` has no effect on a task of your own",
            fix="take it out, and wrap the model with peft.get_peft_model in your build_model",
        )
    where, _, class_name = config.task.strip().rpartition(":")
    if not where or (class_name.endswith(".py") and not class_name.isidentifier()):
        where, class_name = config.task.strip(), ""
    module = _load_file(where) if where.endswith(".py") else _load_module(where)
    kind = _find_class(module, where, class_name)
    task = _construct(kind, config)
    # A partial of functions of this module: a task that a loader process is sent can be pickled.
    task.build_datasets = partial(_build_datasets, task)  # type: ignore[method-assign]
    task.prepare = partial(_prepare, task)  # type: ignore[method-assign]
    return task


def _load_file(where: str) -> ModuleType:
    path = Path(where).expanduser()
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")]
        raise ConfigError(
            f"`task: {where}:…`: there is no file {path.resolve()}",
            allowed=f"{_FORM}, a path from the current folder ({Path.cwd()})",
            fix=did_you_mean(path.name, siblings, "check the path", f"{path.parent / '{}'}"),
        )
    path = path.resolve()
    loaded = sys.modules.get(_module_name(path))
    if loaded is not None:
        return loaded
    # As when a script is run: its folder comes first, so that it may import the files beside it.
    # Processes that a loader starts are given the same sys.path, and find the module by its name.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _raised(f"{where} cannot be imported", error, path) from error
    return module


def _module_name(path: Path) -> str:
    """The file's own name where nothing else goes by it, else one made from its path: the same in
    every process."""
    known = sys.modules.get(path.stem)
    taken = known is not None and getattr(known, "__file__", None) != str(path)
    if not taken and path.stem.isidentifier():
        try:
            spec = importlib.util.find_spec(path.stem)
        except (ImportError, ValueError):
            spec = None
        taken = spec is not None and spec.origin != str(path)
    if not taken and path.stem.isidentifier():
        return path.stem
    return f"paceline_task_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"


def _load_module(where: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(error.name + ".")):
            raise ConfigError(
                f"`task: {where}:…`: there is no module {error.name!r} (looked in the environment"
                f" and in {Path.cwd()})",
                allowed=_FORM,
                fix="check the name, install the package, or give a file: `task: ./file.py:Class`",
            ) from error
        raise _raised(f"the module {where} cannot be imported", error) from error
    except Exception as error:
        raise _raised(f"the module {where} cannot be imported", error) from error


def _find_class(module: ModuleType, where: str, class_name: str) -> type[Task]:
    tasks = sorted(
        name
        for name, one in vars(module).items()
        if inspect.isclass(one) and issubclass(one, Task) and one is not Task
    )
    listing = "classes that are tasks there: " + (", ".join(tasks) or "none")
    if not class_name:
        raise ConfigError(
            f"`task: {where}` names no class",
            allowed=f"{_FORM}; {listing}",
            fix=f"write `task: {where}:{(tasks or ['Class'])[0]}`",
        )
    found = getattr(module, class_name, None)
    if found is None:
        near = nearest(class_name, tasks)
        raise ConfigError(
            f"`task: {where}:{class_name}`: there is no class {class_name} in {where}",
            allowed=listing,
            fix=(
                f"did you mean `task: {where}:{near or tasks[0]}`?"
                if tasks
                else "write one: a subclass of paceline.Task"
            ),
        )
    if not inspect.isclass(found) or not issubclass(found, Task) or found is Task:
        given = (
            "the base class itself"
            if found is Task
            else "a class"
            if inspect.isclass(found)
            else _kind(found)
        )
        raise ConfigError(
            f"`task: {where}:{class_name}`: {class_name} is {given}, not a subclass of"
            " paceline.Task",
            allowed=listing,
            fix=f"write `class {class_name}(paceline.Task):`",
        )
    missing = [name for name in _NEEDED if getattr(found, name) is getattr(Task, name)]
    if missing:
        raise ConfigError(
            f"`task: {where}:{class_name}`: {class_name} has no {', '.join(missing)}",
            allowed=(
                "a task needs build_datasets(self), build_model(self) and loss(self, model, batch)"
            ),
            fix=f"add {', '.join(missing)} to {class_name}",
        )
    return found


def _construct(kind: type[Task], config: Config) -> Task:
    try:
        task = kind(config)
    except ConfigError:
        raise
    except Exception as error:
        wrong_arguments = isinstance(error, TypeError) and f"{kind.__name__}.__init__()" in str(
            error
        )
        fix = (
            "let it take the config: def __init__(self, config): super().__init__(config)"
            if wrong_arguments
            else None
        )
        raise _raised(
            f"{kind.__name__}(config) cannot be made", error, _file_of(kind), fix
        ) from error
    if getattr(task, "config", None) is not config:
        raise ConfigError(
            f"{kind.__name__}.__init__ leaves self.config unset",
            fix="call super().__init__(config) in it, or leave __init__ out",
        )
    return task


def _build_datasets(task: Task) -> tuple[Any, Any | None]:
    """The user's ``build_datasets``, its result checked."""
    name = type(task).__name__
    try:
        found = type(task).build_datasets(task)
    except ConfigError:
        raise
    except Exception as error:
        raise _raised(f"{name}.build_datasets failed", error, _file_of(type(task))) from error
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConfigError(
            f"{name}.build_datasets gave {_kind(found)}",
            allowed="a pair: (training dataset, validation dataset or None)",
            fix="end it with e.g. `return train, None`",
        )
    train, evaluation = found
    guard_dataset(train, f"the training dataset of {name}")
    if evaluation is not None:
        guard_dataset(evaluation, f"the validation dataset of {name}")
    for dataset in (one for one in found if one is not None):
        if (
            f"{type(dataset).__module__}.{type(dataset).__name__}"
            == "torch.utils.data.dataset.TensorDataset"
        ):
            # draws nothing at random: the loader need not seed each look-up
            dataset.deterministic = True
    return train, evaluation


def _prepare(task: Task) -> Prepared:
    name = type(task).__name__
    try:
        found = type(task).prepare(task)
    except ConfigError:
        raise
    except Exception as error:
        raise _raised(f"{name}.prepare failed", error, _file_of(type(task))) from error
    if not isinstance(found, Prepared):
        raise ConfigError(
            f"{name}.prepare gave {_kind(found)}",
            allowed="a paceline.tasks.base.Prepared",
            fix="return one, or leave prepare out",
        )
    return replace(found, notices=[*_contract_notices(type(task)), *found.notices])


def _contract_notices(kind: type[Task]) -> list[tuple[str, str]]:
    """Warnings about methods that Paceline does not call, and about a loss that is declared not to
    be additive."""
    defined = {
        name
        for base in kind.__mro__
        if base is not Task and issubclass(base, Task)
        for name, member in vars(base).items()
        if not name.startswith("_") and callable(member)
    }
    notices = []
    for instead, names in _NOT_CALLED.items():
        unused = [name for name in names.split() if name in defined]
        if unused:
            notices.append(
                (
                    "warning",
                    (
                        f"{kind.__name__} defines {', '.join(unused)}, which Paceline does not"
                        f" call: {instead}"
                    ),
                )
            )
    hooks = {
        name for name, member in vars(Task).items() if not name.startswith("_") and callable(member)
    }
    known = {name for names in _NOT_CALLED.values() for name in names.split()}
    for name in sorted(defined - hooks - known):
        question = did_you_mean(name, hooks - defined, form="{}", cutoff=0.85)
        if question:
            text = f"{kind.__name__} defines {name}, which Paceline does not call. "
            notices.append(("warning", text + question[0].upper() + question[1:]))
    if not kind.additive:
        text = (
            f"{kind.__name__} sets `additive = False`: the loss depends on the micro-batch size and"
            " on the number of ranks"
        )
        notices.append(("warning", text))
    return notices


def guard_dataset(dataset: Any, what: str) -> None:
    """Raise ConfigError unless ``dataset`` has a length and is looked up by index. ``what``: its
    name in the message."""
    classes = _class_names(type(dataset))
    if "IterableDataset" in classes:
        raise ConfigError(
            f"{what} is an IterableDataset ({type(dataset).__name__}): what cannot be looked up by"
            " index has no fixed order, cannot be shared out among ranks without gaps, and cannot"
            " go on in the middle of an epoch",
            allowed="a map-style dataset: __len__() and __getitem__(index)",
            fix=(
                "read it into a list or a file first, or index it; torch.utils.data.Dataset shows"
                " the form"
            ),
        )
    if "DataLoader" in classes:
        raise ConfigError(
            f"{what} is a DataLoader; Paceline makes the loaders itself, one a rank",
            fix=(
                "return the dataset; set batch size, workers and `shuffle` in train_args, collate"
                " in collate(self, samples)"
            ),
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if missing:
        raise ConfigError(
            f"{what} is {_kind(dataset)} without {' and '.join(missing)}",
            allowed="a map-style dataset: __len__() and __getitem__(index)",
            fix=f"add {' and '.join(missing)}, or return a list of samples",
        )
    try:
        len(dataset)
    except Exception as error:  # torch's samplers and wrappers define __len__ and raise in it
        raise ConfigError(
            f"{what} is {_kind(dataset)}, whose len() raises {_brief(error)}"
        ) from error


def guard_model(model: Any) -> None:
    """Raise ConfigError where ``model`` is no module, or it or a part of it is wrapped for several
    devices already.

    Works on class names, so that nothing needs to be imported to look for it.
    """
    if "Module" not in _class_names(type(model)):
        raise ConfigError(
            f"build_model gave {_kind(model)}",
            allowed="a torch.nn.Module",
            fix="end build_model with `return model`",
        )
    for path, module in model.named_modules():
        wrapper = next((one for one in _WRAPPERS if one in _class_names(type(module))), None)
        if wrapper is None:
            continue
        place = f"its part `{path}`" if path else "it"
        cure = (
            "return the plain module"
            if wrapper == "FSDPModule"
            else "return the module inside (its `.module`)"
        )
        raise ConfigError(
            f"the model is wrapped already: {place} is a {wrapper}. Paceline places the model on"
            " every rank and reduces the gradients itself; wrapped twice, they would be reduced"
            " twice or not at all",
            fix=f"unwrap it: {cure}; how it is spread is `parallel.mode`",
        )


def _class_names(kind: type) -> set[str]:
    """Names of the class and its bases, as far as they are torch's."""
    return {one.__name__ for one in kind.__mro__ if one.__module__.split(".")[0] == "torch"}


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of {type(value).__name__}"


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[0][:300]}" if lines else "")


def _file_of(kind: type) -> Path | None:
    found = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(found) if found else None


def _raised(
    what: str, error: BaseException, path: Path | None = None, fix: str | None = None
) -> ConfigError:
    """User code raised: say what, and at which line of the user's file (else at the last line of
    all)."""
    if isinstance(error, SyntaxError) and error.filename:
        return ConfigError(
            f"{what}: {type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})",
            fix=fix,
        )
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if path is not None and one.filename == str(path)]
    frame = (own or frames)[-1]
    line = f": `{frame.line}`" if frame.line else ""
    return ConfigError(
        f"{what}: {_brief(error)} ({frame.filename}, line {frame.lineno}{line})", fix=fix
    )
