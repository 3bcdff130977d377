"""Image classifiers: two small built-in ones, and any of Hugging Face's."""

from __future__ import annotations

import json
import math
import shutil
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line, nearest
from paceline.core.files import write_json_atomic
from paceline.core.hub import go_offline_if_unreachable
from paceline.data.images import ImageForm
from paceline.models.json_config import read_object

if TYPE_CHECKING:
    import torch
    from torch import nn

#: The built-in image models, by name.
BUILT_IN = ("builtin:small-cnn", "builtin:mlp")
_ALLOWED = ", ".join(BUILT_IN) + ", or a Hugging Face image classifier as a folder or hub id"
_PREPROCESSOR = "preprocessor_config.json"
_FORMAT = "paceline-image-classifier"


# -- built-in models
def build_small_cnn(
    *, in_channels: int, image_size: int, hidden: int, num_classes: int
) -> nn.Module:
    """Three convolutions with GroupNorm, then the mean over the positions: [N, C, H, W] to logits
    [N, num_classes].

    No BatchNorm: its statistics would be those of a micro-batch on one rank, and so would the
    result depend on the number of ranks and on accumulation. ``image_size`` is not needed: the mean
    takes any.
    """
    from torch import nn

    widths = [in_channels, hidden, hidden, 2 * hidden]
    layers: list[tuple[str, nn.Module]] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        stride = 1 if number == 0 else 2
        layers += [
            (f"conv{number}", nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1)),
            (f"norm{number}", nn.GroupNorm(math.gcd(8, after), after)),
            (f"act{number}", nn.ReLU()),
        ]
    layers += [
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("head", nn.Linear(widths[-1], num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))


def build_mlp(*, in_channels: int, image_size: int, hidden: int, num_classes: int) -> nn.Module:
    """Two hidden layers over the pixels: [N, C, image_size, image_size] to logits [N,
    num_classes]."""
    from torch import nn

    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden0=nn.Linear(in_channels * image_size * image_size, hidden),
            act0=nn.ReLU(),
            hidden1=nn.Linear(hidden, hidden),
            act1=nn.ReLU(),
            head=nn.Linear(hidden, num_classes),
        )
    )


_BUILDERS = {"builtin:small-cnn": build_small_cnn, "builtin:mlp": build_mlp}


def is_builtin(name: str) -> bool:
    return name.startswith("builtin:")


# -- before any rank exists
def check_image_model(config: Config) -> None:
    """Raise ConfigError for a name or folder that is no image classifier. Reads a local config.json
    at most."""
    name = config.model
    if is_builtin(name):
        if name not in BUILT_IN:
            near = nearest(name, BUILT_IN)
            raise ConfigError(
                f"`model: {name}` is no image model, and `task: classify` needs one",
                allowed=_ALLOWED,
                fix=f"write `model: {near or BUILT_IN[0]}`",
            )
        return
    folder = Path(name).expanduser()
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(
                f"`model: {name}` does not exist", allowed=_ALLOWED, fix="check the path"
            )
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"`model: {name}` is no model: it has no config.json",
            allowed=_ALLOWED,
            fix="check the path",
        )
    try:
        result = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if result.get("format") == _FORMAT:
        return
    language = [
        architecture
        for architecture in result.get("architectures") or []
        if architecture.endswith(("ForCausalLM", "LMHeadModel"))
    ]
    if language:
        raise _not_an_image_model(name, language[0])


def _not_an_image_model(name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"`model: {name}` is a {kind}, and `task: classify` trains image classifiers",
        allowed=_ALLOWED,
        fix="set `task: sft` for a language model, or name an image model",
    )


def find_form(config: Config, *, digits: bool) -> tuple[ImageForm, list[tuple[str, str]]]:
    """What the model takes, and what a person should know of it. Loads no weights.

    Built-in models take digits as they are and a folder's images in RGB at ``classify.image_size``;
    others say in their config.json and preprocessor_config.json what they were trained with.
    """
    size = config.classify.image_size
    if is_builtin(config.model):
        return (ImageForm(1, 8, 8) if digits else ImageForm(3, size, size)), []
    own = _own_spec(config.model)
    if own is not None:
        side = own["args"]["image_size"]
        return ImageForm(own["args"]["in_channels"], side, side), []
    model_config = _hub_config(config)
    notices: list[tuple[str, str]] = []
    wanted = getattr(model_config, "image_size", None)
    height, width = (
        (wanted if isinstance(wanted, list | tuple) else (wanted, wanted))
        if wanted
        else (size, size)
    )
    if (height, width) != (size, size):
        notices.append(
            ("info", f"images are resized to {height} × {width}, as {config.model} takes them")
        )
    channels = int(getattr(model_config, "num_channels", 3))
    mean, std = _normalisation(config.model)
    if mean is None or std is None:
        notices.append(
            ("info", f"{config.model} asks for no normalisation of the pixels: they stay in [0, 1]")
        )
    elif len(mean) != channels or len(std) != channels:
        raise ConfigError(
            f"{_PREPROCESSOR} of {config.model} has {len(mean)} means for {channels} channels"
        )
    return ImageForm(channels, int(height), int(width), mean, std), notices


def _hub_config(config: Config) -> Any:
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoConfig

    go_offline_if_unreachable(config.model)
    try:
        result = AutoConfig.from_pretrained(
            _local(config.model), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load(config.model, error) from error
    remote = "AutoModelForImageClassification" in (getattr(result, "auto_map", None) or {})
    if not remote and type(result) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise _not_an_image_model(config.model, f"model of type {result.model_type}")
    return result


def _normalisation(name: str) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    file = _preprocessor_file(name)
    content = {} if file is None else json.loads(file.read_text())
    mean, std = content.get("image_mean"), content.get("image_std")
    if (
        content.get("do_normalize") is not False
        and isinstance(mean, list)
        and isinstance(std, list)
    ):
        return tuple(mean), tuple(std)
    return None, None


def _preprocessor_file(name: str) -> Path | None:
    local = Path(name).expanduser() / _PREPROCESSOR
    if local.is_file():
        return local
    if Path(name).expanduser().exists():
        return None
    from transformers.utils.hub import cached_file

    result = cached_file(name, _PREPROCESSOR, _raise_exceptions_for_missing_entries=False)
    return None if result is None else Path(result)


# -- on every rank
def load_image_model(config: Config, form: ImageForm, classes: list[str]) -> nn.Module:
    """The model to train, on the CPU in float32: [N, C, H, W] to logits [N, num_classes].

    Raises:
        ConfigError: it cannot be loaded; the text says how to give a local path.
    """
    if is_builtin(config.model):
        return _BUILDERS[config.model](**builtin_args(config, form, len(classes)))
    own = _own_spec(config.model)
    if own is not None:
        if own["classes"] != classes:
            raise ConfigError(
                f"`model: {config.model}` was trained on the classes {_few(own['classes'])}; the"
                f" data has {_few(classes)}",
                fix="give data of the same classes, or start from a built-in model",
            )
        return load_classifier(config.model)[0].train()
    import torch
    from transformers import AutoModelForImageClassification

    try:
        model: nn.Module = AutoModelForImageClassification.from_pretrained(
            _local(config.model),
            num_labels=len(classes),
            id2label=dict(enumerate(classes)),
            label2id={name: number for number, name in enumerate(classes)},
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load(config.model, error) from error
    return model


def builtin_args(config: Config, form: ImageForm, num_classes: int) -> dict[str, int]:
    """The arguments that a built-in model is made with."""
    assert form.height is not None
    return {
        "in_channels": form.channels,
        "image_size": form.height,
        "hidden": config.classify.hidden_size,
        "num_classes": num_classes,
    }


def logits_of(output: Any) -> torch.Tensor:
    """A model's output as logits [N, num_classes]: the tensor itself, or its ``logits``."""
    result: torch.Tensor = output.logits if hasattr(output, "logits") else output
    return result


def _local(name: str) -> str:
    path = Path(name).expanduser()
    return str(path) if path.exists() else name


def _cannot_load(name: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"`model: {name}` cannot be loaded: {first_line(error)}",
        allowed=_ALLOWED,
        fix=(
            "download the model where there is a network and give its folder:"
            " `model=/path/to/folder`"
        ),
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- saving and loading
def save_image_model(
    model: Any, config: Config, form: ImageForm, classes: list[str], folder: Path
) -> None:
    """Write what :func:`load_classifier` reads; of a Hugging Face model, what plain
    ``transformers`` reads too."""
    own = _own_spec(config.model)
    if not is_builtin(config.model) and own is None:
        model.save_pretrained(str(folder))
        preprocessor = _preprocessor_file(config.model)
        if preprocessor is not None:
            shutil.copyfile(preprocessor, folder / _PREPROCESSOR)
        return
    from safetensors.torch import save_model

    save_model(model, str(folder / "model.safetensors"))
    spec = own or {
        "format": _FORMAT,
        "model": config.model,
        "args": builtin_args(config, form, len(classes)),
        "classes": classes,
    }
    write_json_atomic(folder / "config.json", spec)


class _SavedModel(TypedDict):
    """The config.json of a saved built-in model."""

    format: str
    model: str
    args: dict[str, int]
    classes: list[str]


def _own_spec(name: str) -> _SavedModel | None:
    """The config.json of a folder that this module wrote, else None."""
    content = read_object(Path(name).expanduser() / "config.json") or {}
    return cast(_SavedModel, content) if content.get("format") == _FORMAT else None


def load_classifier(folder: str | Path) -> tuple[nn.Module, list[str]]:
    """A trained image classifier: (model in evaluation mode on the CPU, names of its classes).

    Example::

        model, classes = load_classifier("output/digits/model")
        # images: float32 [N, C, H, W] in [0, 1]; logits: [N, len(classes)]
        logits = model(images)
        names = [classes[one] for one in logits.argmax(dim=1)]

    A Hugging Face classifier comes back as ``transformers`` loads it: its logits are
    ``model(images).logits``.

    Raises:
        ConfigError: the folder holds no image classifier.
    """
    folder = Path(folder).expanduser()
    spec = _own_spec(str(folder))
    if spec is not None:
        from safetensors.torch import load_model

        model = _BUILDERS[spec["model"]](**spec["args"])
        load_model(model, str(folder / "model.safetensors"))
        return model.eval(), list(spec["classes"])
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds no image classifier: it has no config.json",
            allowed="the `model` folder of a run",
        )
    from transformers import AutoModelForImageClassification

    try:
        hub_model = AutoModelForImageClassification.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise _cannot_load(str(folder), error) from error
    names = hub_model.config.id2label
    return hub_model.eval(), [names[number] for number in sorted(names)]
