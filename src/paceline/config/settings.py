"""The settings of a config by native key: their precedence (file < overrides), and keys that
exclude each other when one comes from the file and one from an override."""

from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError

from paceline.config.entries import (
    FILE,
    FOREIGN_SECTIONS,
    OVERRIDE,
    ConfigEntry,
    EntryCollector,
    Notice,
    Problem,
    as_bool,
    as_number,
    short,
)
from paceline.config.fields import KEYS, MAPPINGS, SOURCE_KEYS, literals, takes
from paceline.config.metrics.evaluation import GENERATED_METRICS, LABEL_METRICS, value_names
from paceline.config.modes import MODES
from paceline.config.schema.base import Logger
from paceline.config.schema.lora import ALL_LINEAR
from paceline.config.schema.tasks import TASKS
from paceline.config.yaml_read import YamlValue
from paceline.core.texts import UserText

#: The value of a key that an override resets to its default.
RESET: Any = object()
#: Native keys that other tools have too, with values of their own.
SHARED_KEYS = (
    "callbacks", "lora.target_modules", "new_special_tokens", "parallel.mode", "report_to",
    "split_dataset_ratio", "task", "train_args.attn_implementation",
    "train_args.gradient_checkpointing", "train_args.lr_scheduler_kwargs",
    "train_args.lr_scheduler_type", "train_args.metric_for_best_model", "train_args.optim",
    "train_args.packing_strategy", "train_args.per_device_train_batch_size",
    "train_args.precision", "train_args.tf32", "train_args.torch_compile",
    "train_args.torch_compile_mode", "train_args.truncation_strategy", "train_args.warmup_steps",
)  # fmt: skip
#: Native values of the shared keys that the schema reads as text.
_NAMES = {
    "lora.target_modules": (ALL_LINEAR,),
    "parallel.mode": MODES,
    "task": TASKS,
    "train_args.metric_for_best_model": (
        "loss", "accuracy", *LABEL_METRICS, *(value_names([*GENERATED_METRICS]) or ())
    ),
}  # fmt: skip
#: (key set by an override, key of the file that it excludes, values that do not exclude it)
_EXCLUSIVE: list[tuple[str, str, tuple[YamlValue, ...]]] = [
    ("train_args.warmup_ratio", "train_args.warmup_steps", ()),
    ("train_args.num_train_epochs", "train_args.max_steps", ()),
    ("val_dataset", "split_dataset_ratio", (None,)),
    ("split_dataset_ratio", "val_dataset", (None, 0)),
]


@dataclass(eq=False)
class Assignment:
    """A value for a native key (dotted), or for a name with ``_`` in front, which is resolved
    later."""

    target: str
    value: Any
    entry: ConfigEntry
    weak: bool = False


def overridden_text(subject: str, winner: ConfigEntry) -> UserText:
    """Return the notice that a key has no effect, because another one sets the same."""
    return UserText(
        "{subject} is overridden by {winner}",
        code="key-overridden",
        subject=subject,
        winner=winner.shown(),
    )


class Settings:
    """Collects values of native keys; ``winners`` then holds the value of each."""

    is_foreign = False

    def __init__(self) -> None:
        self.assigned: list[Assignment] = []
        self.problems: list[Problem] = []
        self.moved: list[ConfigEntry] = []
        self.empty: list[ConfigEntry] = []
        self.winners: dict[str, Assignment] = {}
        self.general_notices: list[Notice] = []

    def add(self, entry: ConfigEntry, target: str) -> None:
        """Add an entry of a native key."""
        if entry.value is None and target in KEYS and not takes(KEYS[target], type(None)):
            self.add_empty(entry, target)
            return
        self.assign(Assignment(target, entry.value, entry))
        if not entry.key.startswith(target):
            self.moved.append(entry)

    def add_empty(self, entry: ConfigEntry, target: str) -> None:
        """Reset the target to its default if an override is empty; an empty key of a file has no
        effect."""
        if target and entry.layer == OVERRIDE:
            self.assign(Assignment(target, RESET, entry))
        else:
            self.empty.append(entry)

    def assign(self, assignment: Assignment) -> list[Assignment]:
        """Record an assignment. A free mapping is split by key, so that overrides merge into
        it."""
        target, value = assignment.target, assignment.value
        is_free = any(target == key or target.startswith(f"{key}.") for key in MAPPINGS)
        if is_free and isinstance(value, dict) and value:
            parts = [
                Assignment(f"{target}.{key}", item, assignment.entry, assignment.weak)
                for key, item in value.items()
            ]
            return [leaf for part in parts for leaf in self.assign(part)]
        assignment.value = _without_quotes(target, value)
        self.assigned.append(assignment)
        return [assignment]

    def resolve_precedence(self) -> None:
        """Fill ``winners``: an override before the file, a strong value before a weak one. Two
        strong values that disagree are a problem."""
        by_target: dict[str, list[Assignment]] = {}
        for assignment in self.assigned:
            by_target.setdefault(assignment.target, []).append(assignment)
        for target, assignments in by_target.items():
            layer = max(assignment.entry.layer for assignment in assignments)
            top = [assignment for assignment in assignments if assignment.entry.layer == layer]
            strong = [assignment for assignment in top if not assignment.weak]
            self.winners[target] = (strong or top)[0]
            if layer >= FILE:
                self._check_agreement(strong)

    def _check_agreement(self, assignments: list[Assignment]) -> None:
        for other in assignments[1:]:
            if not _same_setting(other.target, assignments[0].value, other.value):
                sets = f"both set `{other.target.lstrip('_')}`"
                self.add_disagreement(assignments[0].entry, other.entry, f": {sets}")
                return

    def add_disagreement(
        self, first: ConfigEntry, second: ConfigEntry, why: str, target: str | None = None
    ) -> None:
        """Record the problem that two entries disagree; ``why`` is added to the message."""
        what = UserText(
            "{first} and {second} disagree{why}",
            code="disagreement",
            first=first.located(),
            second=second.located(),
            why=why,
        )
        fix = "keep one of the two"
        self.problems.append(Problem(what, second, fix=fix, target=target))

    def value_of(self, target: str) -> Any:
        winner = self.winners.get(target)
        return None if winner is None or winner.value is RESET else winner.value

    def set_winner(self, target: str, value: Any, by: Assignment) -> None:
        """Let the key of ``by`` set a target, after precedence is resolved."""
        self.winners[target] = Assignment(target, value, by.entry)

    def exclude(self) -> None:
        """Reset keys of the file that an override or another key excludes, and check the keys of
        LoRA."""
        for key, other, inert in _EXCLUSIVE:
            winner, excluded = self.winners.get(key), self.winners.get(other)
            if winner is None or winner.value in (RESET, *inert):
                continue
            if excluded is None or excluded.value in (RESET, None, False, 0, -1):
                continue
            if not winner.entry.layer == OVERRIDE > excluded.entry.layer:
                continue
            if not self.is_reported(excluded.entry):
                self._inform(overridden_text(excluded.entry.located(), winner.entry))
            self.set_winner(other, RESET, winner)
        self._warmup()
        self._lora()

    def is_reported(self, entry: ConfigEntry) -> bool:
        """Return whether the entry has a notice of its own, which tells what overrides it."""
        return False

    def _warmup(self) -> None:
        """Apply transformers' rule for its two keys: `warmup_steps` counts if it is more than
        0."""
        steps = self.winners.get("train_args.warmup_steps")
        ratio = self.value_of("train_args.warmup_ratio")
        if steps is not None and steps.value == 0 and steps.value is not False and ratio:
            shown = f"`warmup_ratio: {short(ratio)}`"
            self._inform(
                UserText(
                    "{subject} is overridden by {winner}",
                    code="key-overridden",
                    subject="`warmup_steps: 0`",
                    winner=shown,
                )
            )
            self.set_winner("train_args.warmup_steps", RESET, steps)

    def _lora(self) -> None:
        """Enable LoRA, or warn, if a config has keys of LoRA but does not set `lora.enable`."""
        settings = [
            winner
            for target, winner in self.winners.items()
            if target.startswith("lora.") and winner.value is not RESET
        ]
        if "lora.enable" in self.winners or not settings:
            return
        entry = settings[0].entry
        if self.enables_lora(entry):
            self.set_winner("lora.enable", True, settings[0])
            self._inform(
                UserText(
                    "{shown} is set without a method: `lora.enable: true`, as in the tool that"
                    " the config was written for",
                    code="lora-enabled-by-key",
                    shown=entry.shown(),
                )
            )
        else:
            text = UserText(
                "{shown} is set but `lora.enable` is not true: all weights are trained",
                code="lora-not-enabled",
                shown=entry.shown(),
            )
            self.general_notices.append(("warning", text))

    def enables_lora(self, entry: ConfigEntry) -> bool:
        """Return whether a key of LoRA selects LoRA in the tool that the config was written
        for."""
        return False

    def _inform(self, text: str) -> None:
        self.general_notices.append(("info", text))

    def notices(self) -> list[Notice]:
        """Return all notices, in the order of the config."""
        return self.general_notices

    def key_of(self, entry: ConfigEntry) -> str | None:
        """Return the native key that an entry sets, as far as its name tells."""
        return native_key(entry)

    def find(self, key: str) -> ConfigEntry | None:
        """Return the entry that sets a native key."""
        winner = self.winners.get(key) or next(
            (winner for name, winner in self.winners.items() if name.startswith(f"{key}.")), None
        )
        return winner.entry if winner and winner.value is not RESET else None

    def nested(self) -> dict[str, YamlValue]:
        """Return the winning values as a nested mapping, with shorter paths applied first."""
        data: dict[str, YamlValue] = {}
        for target, winner in sorted(self.winners.items(), key=lambda item: item[0].count(".")):
            if winner.value is RESET:
                continue
            *parents, last = target.split(".")
            parent = data
            for part in parents:
                inner = parent.get(part)
                # `dataset.format=alpaca` applies to each source of a list.
                if isinstance(inner, list) and part in SOURCE_KEYS:
                    sources = [{"path": item} if isinstance(item, str) else item for item in inner]
                    parent[part] = [{**source, last: winner.value} for source in sources]
                    break
                if isinstance(inner, str) and part in SOURCE_KEYS:
                    inner = {"path": inner}  # `dataset.format=alpaca` and `dataset: data.jsonl`
                section: dict[str, YamlValue] = dict(inner) if isinstance(inner, dict) else {}
                parent[part] = section
                parent = section
            else:
                parent[last] = winner.value
        return data


def read_native(collector: EntryCollector) -> Settings | None:
    """Return the settings of a config; None if a key or a value is not Paceline's own."""
    settings = Settings()
    bound = [(entry, native_key(entry)) for entry in collector.entries]
    tasks = [entry.value for entry, target in bound if target == "task"]
    has_task = bool(tasks) and None not in tasks
    for entry, target in bound:
        if target is None or entry.section in FOREIGN_SECTIONS:
            return None
        if entry.value is not None and not _is_native(target, entry, has_task):
            return None
        settings.add(entry, target)
    if any("_component_" in key for key in collector.extensions):
        return None
    settings.problems += collector.problems
    settings.resolve_precedence()
    settings.exclude()
    return settings


def native_key(entry: ConfigEntry) -> str | None:
    """Return the native key that an entry sets by its name. Keys of `train_args` may be written at
    the top level, and top-level keys under `train_args`."""
    rest = entry.path[2:] if entry.section else entry.path[1:]
    if not entry.section or entry.section in FOREIGN_SECTIONS:
        candidates = [entry.name, f"train_args.{entry.name}"]
    elif entry.section == "train_args":
        candidates = [f"train_args.{entry.name}", entry.name]
    else:
        candidates = [f"{entry.section}.{entry.name}"]
    for target in candidates:
        if target in KEYS and (not rest or target in MAPPINGS or target in SOURCE_KEYS):
            return ".".join((target, *rest))
    return None


def _is_native(target: str, entry: ConfigEntry, has_task: bool) -> bool:
    """Return whether a value of a native key has Paceline's own form, with which no other tool's
    value can be confused."""
    value = entry.value
    if isinstance(value, dict) and "_component_" in value:
        return False  # torchtune
    if target.startswith("parallel.deepspeed_config"):
        return False
    if target in SOURCE_KEYS:
        return _is_native_data(value, entry, has_task)
    if target == "lora.modules_to_save":
        return not entry.token or isinstance(value, list)
    if target not in SHARED_KEYS:
        return True
    if isinstance(value, str) and target in _NAMES:
        is_user_code = target in ("task", "parallel.mode") and ":" in value
        return value in _NAMES[target] or (is_user_code and value == value.strip())
    if isinstance(value, list):
        return bool(value) and all(_is_native_item(target, item) for item in value)
    info = KEYS[target]
    if isinstance(value, float):
        return takes(info, float) and not value.is_integer()
    if isinstance(value, str):
        return value in literals(info)
    return takes(info, type(value)) or str(value) in literals(info)


def _is_native_data(value: Any, entry: ConfigEntry, has_task: bool) -> bool:
    """Return whether data sources are named without the other tools' forms, and without columns
    that tell the training method."""
    for source in value if isinstance(value, list) else [value]:
        if isinstance(source, str):
            has_form = "," in source or (":" in source and "/" in source)
            if entry.token and (has_form or source != source.strip()):
                return False
        elif not isinstance(source, dict) or entry.token or "type" in source:
            return False
        elif not has_task and isinstance(columns := source.get("columns"), dict | list):
            names = {*columns, *(columns.values() if isinstance(columns, dict) else ())}
            if names & {"rejected", "label"}:
                return False
    return True


def _is_native_item(target: str, item: Any) -> bool:
    if not isinstance(item, str) or item != item.strip():
        return False
    if target == "report_to":
        return item in get_args(Logger)
    if target == "callbacks":
        return ":" in item
    if target == "new_special_tokens":
        return not item.endswith(".txt")
    return target == "lora.target_modules" and not item.lower().startswith("all")


def _without_quotes(target: str, value: Any) -> Any:
    """Return true, false or the number that text stands for, if the target takes it and no text."""
    info = KEYS.get(target)
    if not isinstance(value, str) or info is None or takes(info, str) or value in literals(info):
        return value
    value = as_bool(value) if takes(info, bool) else value
    return as_number(value) if takes(info, int, float) else value


def agree(first: Any, second: Any) -> bool:
    """Return whether two values are equal, without treating true as 1."""
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def _same_setting(target: str, first: Any, second: Any) -> bool:
    """Return whether two values of a native key mean the same, such as true and ``full``."""
    if agree(first, second):
        return True
    info = KEYS.get(target)
    if info is None or not {type(first), type(second)} <= {bool, int, float, str}:
        return False
    field_type: Any = Annotated[info.annotation, info]
    adapter: TypeAdapter[Any] = TypeAdapter(field_type)
    try:
        return agree(adapter.validate_python(first), adapter.validate_python(second))
    except ValidationError:
        return False
