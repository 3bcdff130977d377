"""The console, which prints the events of a run as lines on a terminal or in a log file.

A console is a listener of :class:`paceline.core.event_log.EventLog`. It never raises: a closed
terminal, a broken pipe or an unexpected event must not affect the training.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from paceline.core import formatting
from paceline.core.events import (
    Event,
    ModelFigures,
    RunEndEvent,
    RunStartEvent,
    StepEvent,
)
from paceline.core.formatting import shares_text
from paceline.core.log import is_shown
from paceline.messages.event_text import INFO, WARNING, event_text
from paceline.observe.terminal import RunProgress, SafeStream, Terminal

if TYPE_CHECKING:
    from pydantic import JsonValue

_MIN_INTERVAL_S = 1.0  # between the lines of a long run that logs every step
_SHORT_RUN_STEPS = 100  # a run with at most this many steps prints all logged steps
#: The events that are printed as one sentence, and their style. Warnings are yellow.
_STYLES = {
    "resume": "green",
    "notice": "",
    "hang": "bold red",
    "hang_end": "yellow",
    "straggler": "yellow",
    "straggler_end": "yellow",
    "link": "yellow",
    "link_end": "yellow",
    "balance": "cyan",
    "eval": "cyan",
    "checkpoint": "dim",
    "profile": "cyan",
}


class Console:
    """Prints the events of a run: on a terminal as lines that stay in the scroll-back, above a live
    progress line; otherwise as plain lines without control codes.

    Args:
        stream: where to print; standard error by default. With ``json_mode`` it must not be
            standard output, which is reserved for the result.
        json_mode: whether a program reads the result; lines are then plain even on a terminal.
    """

    def __init__(self, stream: TextIO | None = None, json_mode: bool = False) -> None:
        if stream is None or (json_mode and stream is sys.stdout):
            stream = sys.stderr
        self._stream = SafeStream(stream)
        self.live = self._stream.is_terminal() and not json_mode
        self._terminal = Terminal(self._stream, self.live)
        self.progress = RunProgress()
        self._unprinted: StepEvent | None = None
        self._printed_at: float | None = None
        self._prints_all_steps = False

    @property
    def broken(self) -> bool:
        """Whether the output can no longer be read (closed terminal, broken pipe)."""
        return self._stream.broken

    def __call__(self, event: Event) -> None:
        kind = event.get("type")
        is_known = kind in ("run_start", "step", "run_end") or kind in _STYLES
        if not is_known or self._stream.broken:
            return
        try:
            is_first_step = self.progress.step is None
            self.catch_up(event)
            if is_shown() or is_shown(event_text(event)[0]):
                self._print_event(event, is_first_step)
        except OSError:
            self._stream.broken = True
        except Exception as error:  # an event that cannot be printed must not end the training
            self.print(
                f"warning: cannot show a {formatting.clean(kind)} event"
                f" ({type(error).__name__}: {error}); the run continues.",
                "yellow",
            )

    def catch_up(self, event: Event) -> None:
        """Update the state of the console with an event that another process has printed."""
        if event["type"] == "run_start":
            self._flush_step()
            self.progress = RunProgress(event)
            self._printed_at = None
            self._prints_all_steps = _prints_all_steps(event)
        elif event["type"] == "resume":
            self.progress.resumed_from = event.get("step")
        elif event["type"] == "step":
            self.progress.add(event)
        elif event["type"] == "eval":
            self.progress.eval_loss = event.get("loss")
            self.progress.eval_metrics = event.get("metrics") or {}

    def close(self) -> None:
        """Leave the progress line in its last state and restore the terminal. May be called
        twice."""
        try:
            self._flush_step()
            self._terminal.close()
        except Exception:
            self._stream.broken = True

    def print(self, text: str, style: str = "") -> None:
        """Print one or more lines above the progress line."""
        try:
            self._terminal.print(formatting.clean(text), style)
        except Exception:
            self._stream.broken = True

    def _print_event(self, event: Event, is_first_step: bool) -> None:
        if event["type"] == "run_start":
            for label, text in start_lines(event):
                self._terminal.print_labelled(label, formatting.clean(text))
        elif event["type"] == "step":
            self._print_step(event, is_first_step)
        elif event["type"] == "run_end":
            self._flush_step()
            self._terminal.redraw(self.progress, force=True)
            self._terminal.close()
            styles = {"done": "bold green", "stopped": "bold yellow"}
            style = styles.get(event.get("status", ""), "bold red")
            for label, text in end_lines(self.progress, event):
                self._terminal.print_labelled(label, formatting.clean(text), style)
                style = ""
        else:
            level, text = event_text(event)
            style = "yellow" if level == WARNING else _STYLES[event["type"]]
            self.print(text if level == INFO else f"warning: {text}", style)

    def _print_step(self, event: StepEvent, is_first: bool) -> None:
        if is_first and event.get("since_start_s") is not None:
            self.print(f"first step after {formatting.duration(event['since_start_s'])}", "green")
        self._unprinted = event
        is_last = self.progress.total is not None and event["step"] >= self.progress.total
        now = formatting.finite(event.get("time")) or 0.0
        is_due = self._printed_at is None or not 0 <= now - self._printed_at < _MIN_INTERVAL_S
        # The progress line shows the last step, so a terminal needs no further line about it.
        is_wanted = not self.live and (self._prints_all_steps or is_last)
        if is_first or is_due or is_wanted:
            self._flush_step()
        elif self.live:
            self._unprinted = None
        self._terminal.redraw(self.progress, force=is_first)

    def _flush_step(self) -> None:
        if self._unprinted is None:
            return
        self._printed_at = formatting.finite(self._unprinted.get("time")) or 0.0
        self._unprinted = None
        self._terminal.print_step(self.progress)


def _prints_all_steps(start: RunStartEvent) -> bool:
    """Return whether every logged step is printed on a plain line: in a short run, or if
    `logging_steps` limits the number of logged steps."""
    total = formatting.finite((start.get("derived") or {}).get("steps"))
    train_args = (start.get("config") or {}).get("train_args")
    logging_steps = train_args.get("logging_steps") if isinstance(train_args, dict) else None
    every = formatting.finite(logging_steps) or 1
    return every > 1 or (total is not None and total <= _SHORT_RUN_STEPS)


def start_lines(event: RunStartEvent) -> list[tuple[str, str]]:
    """Return (label, text) of each line at the start of a run. Unknown figures are omitted."""
    model, ranks = event.get("model") or {}, formatting.ranks(event.get("world_size"))
    lines = []
    if event.get("output_dir"):
        lines.append(("run", str(event["output_dir"])))
    config = event.get("config") or {}
    if config.get("task"):
        lines.append(("task", str(config["task"])))
    if model:
        lines.append(("model", f"{model.get('name')}: {_parameters(model)}"))
    lines.append(("parallel", f"{event.get('strategy')}, {ranks}, {event.get('device')}"))
    if event.get("precision"):
        lines.append(("precision", str(event["precision"])))
    peak = event.get("peak")
    if peak:
        lines.append(("peak", formatting.peak_line(peak)))
    if event.get("data"):
        lines.append(("data", formatting.data_line(event["data"])))
    if event.get("sources"):
        lines.append(("sources", formatting.sources_line(event["sources"])))
    if event.get("packing"):
        lines.append(("packing", formatting.packing_line(event["packing"])))
    lines += derived_lines(event.get("derived") or {})
    if event.get("output_dir"):
        command = f"paceline watch {shlex.quote(str(event['output_dir']))}"
        lines.append(("watch", f"{command}   (from another terminal)"))
    return lines


def _parameters(model: ModelFigures) -> str:
    total = formatting.finite(model.get("parameters"))
    trained = formatting.finite(model.get("trainable_parameters"))
    text = f"{formatting.count(total)} parameters"
    if trained is None:
        return text
    if trained == total:
        return f"{text}, all trained"
    share = f" ({100 * trained / total:.3g} %)" if total else ""
    return f"{text}, {formatting.count(trained)} trained{share}"


def derived_lines(derived: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return (label, text) for each value that is derived from the config."""
    if not derived:
        return []
    get, count, counted = derived.get, formatting.count, formatting.counted
    batch = f"{counted(get('global_batch_size'), 'sample')} = {_factors(derived)}"
    if get("tokens_per_step") is not None:
        batch += f", about {counted(get('tokens_per_step'), 'token')} per step"
    epochs = formatting.finite(get("epochs"))
    epochs_text = "" if epochs is None else f", {counted(epochs, 'epoch')}"
    per_epoch = get("steps_per_epoch")
    steps = "epoch of unknown size" if per_epoch is None else f"{count(per_epoch)} per epoch"
    warmup = "no warm-up"
    if get("warmup_steps"):
        warmup = f"after {counted(get('warmup_steps'), 'step')} of warm-up"
    every = get("eval_every_steps")
    return [
        ("batch", batch),
        ("steps", f"{count(get('steps'))} ({steps}{epochs_text})"),
        ("rate", f"{formatting.rate(get('learning_rate'))}, {warmup}"),
        ("evaluation", _every(every)),
    ]


def _every(steps: float | None) -> str:
    if not steps:
        return "none"
    return "every step" if steps == 1 else f"every {formatting.counted(steps, 'step')}"


def _factors(derived: Mapping[str, float | None]) -> str:
    count, ranks = formatting.count, formatting.ranks(derived.get("world_size"))
    micro = derived.get("micro_batch_size")
    accumulation = derived.get("gradient_accumulation_steps")
    batch, replicas = derived.get("global_batch_size"), derived.get("replicas")
    if replicas is not None and replicas != derived.get("world_size"):
        ranks = f"{formatting.counted(int(replicas), 'replica')} on {ranks}"
    # A run that keeps its global batch size on a different number of ranks may have uneven shares.
    if batch and accumulation and replicas:
        micro, rest = divmod(int(batch), int(accumulation * replicas))
        if rest:
            about = "" if derived.get("tokens_per_step") is None else "about "
            shared = f"{about}{shares_text(int(batch), int(replicas))} on {ranks}"
            largest = f"at most {micro + 1} per micro-batch"
            return f"{shared}: {largest} × {count(accumulation)} accumulation"
    return f"{count(micro)} per micro-batch × {count(accumulation)} accumulation × {ranks}"


def _answers_text(config: Mapping[str, JsonValue]) -> bool:
    """Return whether `paceline generate` answers with the trained model."""
    # Imports the config's schema, which `paceline watch` does not need until a run is done.
    from paceline.config.schema.tasks import CAUSAL_TASKS
    from paceline.models.vision.types import vision_type

    if config.get("task") not in CAUSAL_TASKS:
        return False
    vision = config.get("vision")
    is_text_only = isinstance(vision, dict) and vision.get("text_only") is True
    is_text = is_text_only or config.get("task") != "sft"
    return is_text or vision_type(str(config.get("model"))) is None


def end_lines(progress: RunProgress, event: RunEndEvent) -> list[tuple[str, str]]:
    """Return (label, text) of each line at the end of a run: its result, its files, and the next
    commands."""
    start, status = progress.start, str(event.get("status"))
    root = str(start.get("output_dir") or "")
    config = start.get("config") or {}
    lines = [(status, _result(progress, event))]
    sources = (progress.step or {}).get("sources")
    if sources:
        losses = [f"{row['name']} {formatting.loss(row['loss'])}" for row in sources]
        lines.append(("by source", f"training loss {', '.join(losses)}"))
    if event.get("reason"):
        lines.append(("reason", str(event["reason"])))
    if event.get("network"):
        lines.append(("network", str(event["network"])))
    if not root:
        return lines
    quoted = shlex.quote(root)
    if status == "done":
        lines += [("report", f"{root}/report.html"), ("model", f"{root}/model/")]
        if _answers_text(config):
            lines.append(("try it", f'paceline generate {quoted} "…"'))
        lines.append(("show again", f"paceline watch {quoted}"))
    else:
        lines.append(("resume", resume_hint(root, config)))
        if status == "stopped":
            lines.append(("report", f"{root}/report.html"))
    return lines


def resume_hint(output_dir: str, config: Mapping[str, JsonValue]) -> str:
    """Return instructions to resume a run that ended early."""
    command = f"paceline sft {shlex.quote(f'{output_dir}/config.yaml')}"
    if config.get("resume") == "never":
        return (
            "its config has `resume: never`; to resume from the latest checkpoint, run"
            f" `{command} resume=auto`"
        )
    return f"run the same command again, or `{command}`, to resume from the latest checkpoint"


def _result(progress: RunProgress, event: RunEndEvent) -> str:
    step = event.get("step") if event.get("step") is not None else progress.done
    total = f" of {progress.total:,}" if progress.total and step != progress.total else ""
    parts = [f"{formatting.count(step)}{total} step{'' if step == 1 and not total else 's'}"]
    wall_s = formatting.finite(event.get("wall_s"))
    if wall_s is not None:
        parts[0] += f" in {formatting.duration(wall_s)}"
    if progress.step is not None:
        first = "" if progress.resumed_from else f"{formatting.loss(progress.first_loss)} → "
        parts.append(f"training loss {first}{formatting.loss(progress.step.get('loss'))}")
    if progress.eval_loss is not None:
        parts.append(f"evaluation loss {formatting.loss(progress.eval_loss)}")
    parts += [f"{name} {value:.4g}" for name, value in progress.eval_metrics.items()]
    return ", ".join(parts)
