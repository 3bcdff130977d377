"""Build, load and save image classifiers: two small built-in models, and Hugging Face models."""

from __future__ import annotations

import json
import math
import shutil
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line, unknown_name
from paceline.core.files import write_json_atomic
from paceline.core.hub import go_offline_if_unreachable
from paceline.core.texts import UserText
from paceline.data.images import ImageForm
from paceline.models.hub_configs import find_file
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
    """Build a CNN that maps images [N, C, H, W] to logits [N, num_classes]: three convolutions with
    GroupNorm, then the mean over positions.

    BatchNorm would compute statistics over the micro-batch of one rank, so results would depend on
    the number of ranks and on accumulation. ``image_size`` is unused, because the mean supports any
    size.
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
    """Build an MLP with two hidden layers that maps images [N, C, image_size, image_size] to logits
    [N, num_classes]."""
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


# -- before ranks start
def check_image_model(config: Config) -> None:
    """Raise ConfigError for a name or folder that is not an image classifier. Reads at most a local
    config.json."""
    name = config.model
    if is_builtin(name):
        if name not in BUILT_IN:
            raise unknown_name("built-in image model", name, BUILT_IN, allowed=_ALLOWED)
        return
    folder = Path(name).expanduser()
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(
                "`model: {name}` does not exist",
                code="missing-image-model",
                allowed=_ALLOWED,
                fix="check the path",
                name=name,
            )
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "`model: {name}` is not a model: it has no config.json",
            code="no-model-config",
            allowed=_ALLOWED,
            fix="check the path",
            name=name,
        )
    try:
        content = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(
            "{folder} is not valid JSON: {reason}",
            code="model-file-invalid-json",
            folder=folder / "config.json",
            reason=error,
        ) from error
    if content.get("format") == _FORMAT:
        return
    language = [
        architecture
        for architecture in content.get("architectures") or []
        if architecture.endswith(("ForCausalLM", "LMHeadModel"))
    ]
    if language:
        raise _not_an_image_model(name, language[0])


def _not_an_image_model(name: str, kind: str) -> ConfigError:
    return ConfigError(
        "`model: {name}` is a {kind}, but `task: classify` trains image classifiers",
        code="not-an-image-classifier",
        allowed=_ALLOWED,
        fix="set `task: sft` for a language model, or name an image model",
        name=name,
        kind=kind,
    )


def find_form(config: Config, *, digits: bool) -> tuple[ImageForm, list[tuple[str, str]]]:
    """Return the image size, channels and normalization that the model expects, and notices about
    them. Loads no weights.

    Built-in models accept digits unchanged, and images of a folder in RGB at
    ``classify.image_size``. For other models, config.json and preprocessor_config.json contain the
    form that they were trained with.
    """
    size = config.classify.image_size
    if is_builtin(config.model):
        return (ImageForm(1, 8, 8) if digits else ImageForm(3, size, size)), []
    saved = _saved_model(config.model)
    if saved is not None:
        side = saved["args"]["image_size"]
        return ImageForm(saved["args"]["in_channels"], side, side), []
    model_config = _hub_config(config)
    notices: list[tuple[str, str]] = []
    image_size = getattr(model_config, "image_size", None) or size
    height, width = image_size if isinstance(image_size, list | tuple) else (image_size, image_size)
    if (height, width) != (size, size):
        notices.append(
            (
                "info",
                UserText(
                    "images are resized to {height} × {width}, the size of {model}",
                    code="images-resized",
                    height=height,
                    width=width,
                    model=config.model,
                ),
            )
        )
    channels = int(getattr(model_config, "num_channels", 3))
    mean, std = _normalization(config.model)
    if mean is None or std is None:
        notices.append(
            (
                "info",
                UserText(
                    "{model} does not normalize pixels: they stay in [0, 1]",
                    code="pixels-not-normalized",
                    model=config.model,
                ),
            )
        )
    elif len(mean) != channels or len(std) != channels:
        raise ConfigError(
            "{preprocessor} of {model} has {num_mean} means for {channels} channels",
            code="wrong-number-of-channels",
            preprocessor=_PREPROCESSOR,
            model=config.model,
            num_mean=len(mean),
            channels=channels,
        )
    return ImageForm(channels, int(height), int(width), mean, std), notices


def _hub_config(config: Config) -> Any:
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoConfig

    go_offline_if_unreachable(config.model)
    try:
        hub_config = AutoConfig.from_pretrained(
            _local(config.model), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load(config.model, error) from error
    is_remote = "AutoModelForImageClassification" in (getattr(hub_config, "auto_map", None) or {})
    if not is_remote and type(hub_config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise _not_an_image_model(config.model, f"model of type {hub_config.model_type}")
    return hub_config


def _normalization(name: str) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    file = find_file(name, _PREPROCESSOR)
    content = {} if file is None else json.loads(file.read_text())
    mean, std = content.get("image_mean"), content.get("image_std")
    if (
        content.get("do_normalize") is not False
        and isinstance(mean, list)
        and isinstance(std, list)
    ):
        return tuple(mean), tuple(std)
    return None, None


# -- on every rank
def load_image_model(config: Config, form: ImageForm, classes: list[str]) -> nn.Module:
    """Load the model to train, on the CPU in float32. It maps images [N, C, H, W] to logits [N,
    num_classes].

    Raises:
        ConfigError: the model cannot be loaded.
    """
    if is_builtin(config.model):
        return _BUILDERS[config.model](**builtin_args(config, form, len(classes)))
    saved = _saved_model(config.model)
    if saved is not None:
        if saved["classes"] != classes:
            raise ConfigError(
                "`model: {model}` was trained on the classes {classes}, but the data has"
                " {classes_of_data}",
                code="other-classes",
                fix="use data with the same classes, or start from a built-in model",
                model=config.model,
                classes=_few(saved["classes"]),
                classes_of_data=_few(classes),
            )
        return load_classifier(config.model)[0].train()
    import torch
    from transformers import AutoModelForImageClassification

    from paceline.models.weights.load import load_pretrained

    try:
        model: nn.Module = load_pretrained(
            AutoModelForImageClassification,
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
    """Return the arguments of a built-in model."""
    assert form.height is not None
    return {
        "in_channels": form.channels,
        "image_size": form.height,
        "hidden": config.classify.hidden_size,
        "num_classes": num_classes,
    }


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits [N, num_classes] in a model's output, which is a tensor or has an attribute
    ``logits``."""
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output
    return logits


def _local(name: str) -> str:
    path = Path(name).expanduser()
    return str(path) if path.exists() else name


def _cannot_load(name: str, error: BaseException) -> ConfigError:
    return ConfigError(
        "`model: {name}` cannot be loaded: {reason}",
        code="image-model-not-loaded",
        allowed=_ALLOWED,
        fix="download the model where there is a network and set `model=/path/to/folder`",
        name=name,
        reason=first_line(error),
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- saving and loading
def save_image_model(
    model: Any, config: Config, form: ImageForm, classes: list[str], folder: Path
) -> None:
    """Write a model that :func:`load_classifier` and, for a Hugging Face model, ``transformers``
    can load."""
    saved = _saved_model(config.model)
    if not is_builtin(config.model) and saved is None:
        model.save_pretrained(str(folder))
        preprocessor = find_file(config.model, _PREPROCESSOR)
        if preprocessor is not None:
            shutil.copyfile(preprocessor, folder / _PREPROCESSOR)
        return
    from safetensors.torch import save_model

    save_model(model, str(folder / "model.safetensors"))
    spec = saved or {
        "format": _FORMAT,
        "model": config.model,
        "args": builtin_args(config, form, len(classes)),
        "classes": classes,
    }
    write_json_atomic(folder / "config.json", spec)


class _SavedClassifier(TypedDict):
    """The config.json of a saved built-in model."""

    format: str
    model: str
    args: dict[str, int]
    classes: list[str]


def _saved_model(name: str) -> _SavedClassifier | None:
    """Return the config.json of a folder that this module wrote, or None for any other folder."""
    content = read_object(Path(name).expanduser() / "config.json") or {}
    return cast(_SavedClassifier, content) if content.get("format") == _FORMAT else None


def load_classifier(folder: str | Path) -> tuple[nn.Module, list[str]]:
    """Load a trained image classifier.

    Returns:
        The model, in evaluation mode on the CPU, and the names of its classes.

    Example::

        model, classes = load_classifier("output/digits/model")
        # images: float32 [N, C, H, W] in [0, 1]; logits: [N, len(classes)]
        logits = model(images)
        names = [classes[index] for index in logits.argmax(dim=1)]

    A Hugging Face classifier is returned as ``transformers`` loads it, so its logits are
    ``model(images).logits``.

    Raises:
        ConfigError: the folder does not contain an image classifier.
    """
    folder = Path(folder).expanduser()
    spec = _saved_model(str(folder))
    if spec is not None:
        from safetensors.torch import load_model

        model = _BUILDERS[spec["model"]](**spec["args"])
        load_model(model, str(folder / "model.safetensors"))
        return model.eval(), list(spec["classes"])
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "{folder} is not an image classifier: it has no config.json",
            code="missing-image-config",
            allowed="the `model` folder of a run",
            folder=folder,
        )
    from transformers import AutoModelForImageClassification

    try:
        hub_model = AutoModelForImageClassification.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise _cannot_load(str(folder), error) from error
    names = hub_model.config.id2label
    return hub_model.eval(), [names[number] for number in sorted(names)]
