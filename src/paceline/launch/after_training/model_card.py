"""The model card of a trained model: ``README.md`` in its repository. Imports no torch."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core import formatting
from paceline.core.event_log import read_events
from paceline.core.events import RunStartEvent
from paceline.core.hub import is_hub_id
from paceline.core.run_dir import RunDir
from paceline.models.json_config import JsonObject, read_object
from paceline.models.kinds import LANGUAGE, saved_kind

#: Keys of the config that belong to the machine of the run and not to the training.
_LOCAL_KEYS = ("output_dir", "checkpoint_dir", "resume")
#: The hub's tag of the models that transformers' class loads.
_PIPELINE_TAGS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSequenceClassification": "text-classification",
}


def model_card(run: Path, folder: Path, repository: str) -> str:
    """Return the card of the model in ``folder`` that the run trained. Figures that are unknown,
    such as the figures of a folder without a report, are left out. Paths of models and data are
    reduced to their names."""
    files = RunDir(run)
    report = read_object(files.report) or {}
    starts = [event for event in read_events(files.events) if event["type"] == "run_start"]
    start: RunStartEvent = starts[-1] if starts else {}
    config = start.get("config") or {}
    is_adapter = (folder / "adapter_config.json").is_file()
    sources = _sources(config)
    auto_class = _auto_class(config, folder)
    gguf = next((file.name for file in folder.glob("*.gguf")), None)
    library = "peft" if is_adapter else "gguf" if gguf is not None else "transformers"
    metadata = _metadata(config, sources, library, auto_class)
    page = {
        "metadata": yaml.safe_dump(metadata, sort_keys=False),
        "name": repository.rpartition("/")[2],
        "repository": repository,
        "base": _public(str(config.get("model") or "unknown")),
        "is_adapter": is_adapter,
        "auto_class": auto_class,
        "gguf": gguf,
        "quantization": _quantization(folder),
        "num_labels": _num_labels(folder) if is_adapter else None,
        "has_adapters": bool(_section(config, "lora").get("enable")),
        "task": config.get("task"),
        "sources": [_public(source) for source in sources],
        "data": _section(report, "data"),
        "results": _results(report),
        "benchmarks": _benchmarks(report),
        "training": _training(report, start),
        "versions": start.get("versions") or {},
        "config": _config_text(config),
    }
    return str(_template().render(page))


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("model_card.md.jinja")


def _section(content: JsonObject, key: str) -> JsonObject:
    section = content.get(key)
    return section if isinstance(section, dict) else {}


def _sources(config: JsonObject) -> list[str]:
    data = config.get("dataset") or []
    items = data if isinstance(data, list) else [data]
    return [str(item.get("path") if isinstance(item, dict) else item) for item in items]


def _is_public(name: str) -> bool:
    return is_hub_id(name.partition("#")[0]) and name.count("/") == 1


def _public(name: str) -> str:
    """Return a name without the folders of this machine."""
    if name.startswith(("builtin:", "modelscope:")) or _is_public(name):
        return name
    return Path(name).name


def _auto_class(config: JsonObject, folder: Path) -> str | None:
    """Return the name of transformers' class that loads the model; None if none of them does, or if
    the task is not known."""
    auto_class = saved_kind(folder).auto_class
    is_saved_here = config.get("task") in (*CAUSAL_TASKS, "reward", "classify")
    if is_saved_here and (auto_class != LANGUAGE.auto_class or config["task"] in CAUSAL_TASKS):
        return auto_class
    return None


def _quantization(folder: Path) -> str | None:
    """Return how weights in a folder are quantized, such as ``compressed-tensors``, or None."""
    settings = _section(read_object(folder / "config.json") or {}, "quantization_config")
    return None if not settings else str(settings.get("quant_method"))


def _num_labels(folder: Path) -> int | None:
    """Return the number of classes of the adapters of a text classifier, or None for others."""
    names = saved_kind(folder).settings.get("id2label")
    return None if names is None else len(names)


def _metadata(
    config: JsonObject, sources: list[str], library: str, auto_class: str | None
) -> dict[str, str | list[str]]:
    base, task = str(config.get("model") or ""), str(config.get("task"))
    adapters = _section(config, "lora").get("enable")
    metadata: dict[str, str | list[str]] = {
        "library_name": library,
        "tags": ["paceline", task, *(["lora"] if adapters else [])],
    }
    if auto_class is not None:
        metadata["pipeline_tag"] = _PIPELINE_TAGS[auto_class]
    if _is_public(base):
        metadata["base_model"] = base
    public = [source.partition("#")[0] for source in sources if _is_public(source)]
    if public:
        metadata["datasets"] = public
    return metadata


def _results(report: JsonObject) -> list[tuple[str, str]]:
    rows = [
        ("training loss", report.get("final_train_loss")),
        ("evaluation loss", report.get("final_eval_loss")),
        *_section(report, "final_eval_metrics").items(),
    ]
    return [(name, formatting.loss(value)) for name, value in rows if value is not None]


def _benchmarks(report: JsonObject) -> list[tuple[str, str, str]]:
    """Return task, metric and value of each result of lm-evaluation-harness."""
    tasks = _section(_section(report, "lm_eval"), "results")
    return [
        (task, metric, formatting.loss(value))
        for task in tasks
        for metric, value in _section(tasks, task).items()
    ]


def _training(report: JsonObject, start: RunStartEvent) -> list[tuple[str, str]]:
    fmt, get = formatting, report.get
    derived = start.get("derived") or {}
    model, mesh = start.get("model") or {}, start.get("mesh") or {}
    devices = sorted({str(rank.get("device")) for rank in mesh.get("ranks", [])})
    rows = [
        ("parameters", fmt.short_count(model.get("parameters"))),
        ("trained parameters", fmt.short_count(model.get("trainable_parameters"))),
        ("steps", fmt.count(get("steps"))),
        ("samples seen", fmt.count(get("samples_seen"))),
        ("tokens", fmt.short_count(get("train_tokens"))),
        ("global batch size", fmt.count(derived.get("global_batch_size"))),
        ("peak learning rate", fmt.rate(derived.get("learning_rate"))),
        ("precision", get("precision")),
        ("strategy", get("strategy")),
        ("ranks", fmt.count(get("world_size"))),
        ("devices", ", ".join(devices) or get("device")),
        ("wall time", fmt.duration(get("wall_s"))),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, fmt.UNKNOWN)]


def _config_text(config: JsonObject) -> str:
    """Return the config as YAML, without what belongs to the machine of the run."""
    kept = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    for key in ("model", "tokenizer", "dataset", "val_dataset"):
        if kept.get(key):
            kept[key] = _public_tree(kept[key])
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True) if kept else ""


def _public_tree(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return _public(value)
    if isinstance(value, list):
        return [_public_tree(item) for item in value]
    if isinstance(value, dict):
        return {**value, "path": _public(str(value.get("path")))}
    return value
