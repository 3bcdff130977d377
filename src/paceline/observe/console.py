"""What a person sees while a run goes on: events in, lines on a terminal (or in a log file) out.

A console is a listener of :class:`paceline.core.event_log.EventLog`. It never raises: a closed
terminal, a broken pipe or an event it does not understand must not touch the training.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from paceline.core import formatting
from paceline.core.event_text import event_text
from paceline.core.events import (
    BalanceEvent,
    CheckpointEvent,
    DerivedFigures,
    EvalEvent,
    Event,
    HangEndEvent,
    HangEvent,
    LinkEvent,
    ModelFigures,
    NoticeEvent,
    ResumeEvent,
    RunEndEvent,
    RunStartEvent,
    StepEvent,
    StragglerEndEvent,
    StragglerEvent,
)
from paceline.core.formatting import shares_text
from paceline.core.log import is_shown
from paceline.observe.terminal import LiveTerminal, PlainTerminal, SafeStream

if TYPE_CHECKING:
    from pydantic import JsonValue

_PLAIN_GAP_S = 1.0  # of a long run that logs every step, at most about one plain line per second
_SHORT_RUN_STEPS = 100  # a run with no more steps than this prints all that it logs
_RECENT_STEPS = 64  # step times that the estimate of the time left looks at


class Progress:
    """Where the run stands, gathered from its events: all that a progress line shows."""

    def __init__(self) -> None:
        self.start: RunStartEvent = {}
        self.step: StepEvent | None = None
        self.first_loss: Any = None
        self.eval_loss: Any = None
        self.resumed_from: int | None = None
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)

    def begin(self, event: RunStartEvent) -> None:
        self.__init__()  # type: ignore[misc]
        self.start = event
        self.resumed_from = event.get("resumed_from_step") or None

    def add(self, event: StepEvent) -> None:
        if self.step is None:
            self.first_loss = event.get("loss")
        self.step = event
        seconds = formatting.finite(event.get("step_time_s"))
        if seconds is not None:
            self._step_times.append(seconds)

    @property
    def derived(self) -> DerivedFigures:
        return self.start.get("derived") or {}

    @property
    def total(self) -> int | None:
        steps = formatting.finite(self.derived.get("steps"))
        return int(steps) if steps else None

    @property
    def done(self) -> int:
        return int(self.step["step"]) if self.step is not None else self.resumed_from or 0

    @property
    def eta_s(self) -> float | None:
        """Seconds left, from the median of the recent step times: one slow step (a save, an
        evaluation) does not move it."""
        if not self._step_times or self.total is None:
            return None
        return max(0, self.total - self.done) * statistics.median(self._step_times)

    def fields(self) -> list[tuple[str, str, int]]:
        """(style, text, rank of importance) of each figure of the progress line; 0 is never left
        out."""
        step = self.step or {}
        per_second, unit = formatting.throughput(step, self.derived.get("global_batch_size"))
        epoch = formatting.finite(step.get("epoch"))
        bad = (formatting.number(step.get("loss")) is not None) and formatting.finite(
            step.get("loss")
        ) is None
        total = f"/{self.total:,}" if self.total else ""
        found = [
            ("bold", f"step {self.done:,}{total}", 0),
            ("dim", f"epoch {epoch:.2f}" if epoch is not None else "", 5),
            (
                "bold red" if bad else "bold",
                f"loss {formatting.loss(step.get('loss'))}" if self.step else "",
                0,
            ),
            (
                "dim",
                f"eval {formatting.loss(self.eval_loss)}" if self.eval_loss is not None else "",
                7,
            ),
            (
                "dim",
                (
                    f"lr {formatting.rate(step['learning_rate'])}"
                    if step.get("learning_rate") is not None
                    else ""
                ),
                4,
            ),
            (
                "",
                f"{formatting.short_count(per_second)} {unit}" if per_second is not None else "",
                2,
            ),
            (
                "dim",
                (
                    f"mem {formatting.size(memory)}"
                    if (memory := formatting.fullest(step.get("memory_bytes")))
                    else ""
                ),
                3,
            ),
            (
                "dim",
                formatting.ranks(self.start["world_size"]) if self.start.get("world_size") else "",
                6,
            ),
            ("cyan", f"ETA {formatting.clock(self.eta_s)}" if self.eta_s is not None else "", 1),
        ]
        return [field for field in found if field[1]]


class Console:
    """Prints events for a person: a live line on a terminal, plain lines without control codes
    elsewhere.

    Args:
        stream: where to, standard error by default. With ``json_mode`` never standard output, which
            is the result's.
        json_mode: a program reads the result, so lines are plain even on a terminal.
    """

    def __init__(self, stream: TextIO | None = None, json_mode: bool = False) -> None:
        if stream is None or (json_mode and stream is sys.stdout):
            stream = sys.stderr
        self._stream = SafeStream(stream)
        self._live = self._stream.is_terminal() and not json_mode
        self._terminal = LiveTerminal(self._stream) if self._live else PlainTerminal(self._stream)
        self.progress = Progress()
        self._unprinted: StepEvent | None = None
        self._printed_at: float | None = None
        self._prints_all = False

    def catch_up(self, event: Event) -> None:
        """An event that another process has shown: it is known, and not printed again."""
        if event["type"] == "run_start":
            self.progress.begin(event)
            self._prints_all = _prints_all(event)
        elif event["type"] == "step":
            self.progress.add(event)
        elif event["type"] == "eval":
            self.progress.eval_loss = event.get("loss")

    @property
    def live(self) -> bool:
        """True where a line at the foot of a terminal is redrawn in place."""
        return self._live

    @property
    def broken(self) -> bool:
        """True once nobody can read what is printed (closed terminal, broken pipe)."""
        return self._stream.broken

    def __call__(self, event: Event) -> None:
        handler = getattr(self, f"_on_{event.get('type')}", None)
        if handler is None or self._stream.broken:
            return
        try:
            if is_shown() or is_shown(event_text(event)[0]):
                handler(event)
            else:
                self.catch_up(event)
        except Exception as error:  # the display is worth less than the training
            self._give_up(error, event)

    def close(self) -> None:
        """Leave the terminal as it was found: the live line stays as its last state. May be called
        twice."""
        try:
            self._flush_step()
            self._terminal.close()
        except Exception:
            self._stream.broken = True

    def say(self, text: str, style: str = "") -> None:
        """One line (or several) above the live line."""
        try:
            self._terminal.say(formatting.clean(text), style)
        except Exception:
            self._stream.broken = True

    def _give_up(self, error: Exception, event: Event) -> None:
        if isinstance(error, OSError):
            self._stream.broken = True
            return
        kind = formatting.clean(event.get("type"))
        self.say(
            f"warning: a {kind} event could not be shown ({type(error).__name__}: {error}); the run"
            " goes on.",
            "yellow",
        )

    # One method an event type.

    def _on_run_start(self, event: RunStartEvent) -> None:
        self._flush_step()
        self.progress.begin(event)
        self._printed_at = None
        self._prints_all = _prints_all(event)
        for label, text in start_lines(event):
            self._terminal.labelled(label, formatting.clean(text))

    def _on_resume(self, event: ResumeEvent) -> None:
        self.progress.resumed_from = event.get("step")
        self.say(event_text(event)[1], "green")

    def _on_notice(self, event: NoticeEvent) -> None:
        warning = event.get("level") == "warning"
        self.say(
            f"{'warning: ' if warning else ''}{event.get('text', '')}", "yellow" if warning else ""
        )

    def _on_hang(self, event: HangEvent) -> None:
        self.say(f"warning: {event.get('text', '')}", "bold red")

    def _on_hang_end(self, event: HangEndEvent | StragglerEndEvent | LinkEvent) -> None:
        self.say(str(event.get("text", "")), "yellow")

    def _on_straggler(self, event: StragglerEvent | LinkEvent) -> None:
        self.say(f"warning: {event.get('text', '')}", "yellow")

    _on_link = _on_straggler
    _on_straggler_end = _on_link_end = _on_hang_end

    def _on_balance(self, event: BalanceEvent) -> None:
        self.say(str(event.get("text", "")), "cyan")

    def _on_step(self, event: StepEvent) -> None:
        first = self.progress.step is None
        self.progress.add(event)
        if first and event.get("since_start_s") is not None:
            self.say(
                f"first step done after {formatting.duration(event['since_start_s'])}", "green"
            )
        if self._live:
            self._terminal.redraw(self.progress, force=first)
            return
        self._unprinted = event
        last = self.progress.total is not None and event["step"] >= self.progress.total
        now = formatting.finite(event.get("time")) or 0.0
        if (
            self._prints_all
            or first
            or last
            or self._printed_at is None
            or not 0 <= now - self._printed_at < _PLAIN_GAP_S
        ):
            self._flush_step()

    def _flush_step(self) -> None:
        if self._unprinted is None:
            return
        self._printed_at = formatting.finite(self._unprinted.get("time")) or 0.0
        self._unprinted = None
        self._terminal.say("  ".join(text for _, text, _ in self.progress.fields()), "")

    def _on_eval(self, event: EvalEvent) -> None:
        self.progress.eval_loss = event.get("loss")
        self.say(event_text(event)[1], "cyan")

    def _on_checkpoint(self, event: CheckpointEvent) -> None:
        level, text = event_text(event)
        self.say(
            f"warning: {text}" if level == "warning" else text,
            "yellow" if level == "warning" else "dim",
        )

    def _on_run_end(self, event: RunEndEvent) -> None:
        self._flush_step()
        self._terminal.redraw(self.progress, force=True)
        self._terminal.close()
        style = {"done": "bold green", "stopped": "bold yellow"}.get(
            event.get("status", ""), "bold red"
        )
        for index, (label, text) in enumerate(end_lines(self.progress, event)):
            self._terminal.labelled(label, formatting.clean(text), style if index == 0 else "")


def _prints_all(start: RunStartEvent) -> bool:
    """Whether each step that is logged gets a plain line: in a short run, and if `logging_steps`
    already makes them few."""
    total = formatting.finite((start.get("derived") or {}).get("steps"))
    train_args = (start.get("config") or {}).get("train_args")
    logging_steps = train_args.get("logging_steps") if isinstance(train_args, dict) else None
    every = formatting.finite(logging_steps) or 1
    return every > 1 or (total is not None and total <= _SHORT_RUN_STEPS)


def start_lines(event: RunStartEvent) -> list[tuple[str, str]]:
    """(label, text) of the block at the start of a run. Figures that the event does not give are
    left out."""
    derived, model = event.get("derived") or {}, event.get("model") or {}
    lines = []
    if event.get("output_dir"):
        lines.append(("run", str(event["output_dir"])))
    if model:
        lines.append(("model", f"{model.get('name')}: {_parameters(model)}"))
    lines.append(
        (
            "parallel",
            (
                f"{event.get('strategy')}, {formatting.ranks(event.get('world_size'))},"
                f" {event.get('device')}"
            ),
        )
    )
    if event.get("precision"):
        lines.append(("precision", str(event["precision"])))
    if event.get("data"):
        lines.append(("data", formatting.data_line(event["data"])))
    lines += derived_lines(derived)
    if event.get("output_dir"):
        lines.append(
            (
                "watch",
                f"paceline watch {shlex.quote(str(event['output_dir']))}   (from another terminal)",
            )
        )
    return lines


def _parameters(model: ModelFigures) -> str:
    total, trained = (
        formatting.finite(model.get("parameters")),
        formatting.finite(model.get("trainable_parameters")),
    )
    text = f"{formatting.count(total)} parameters"
    if trained is None or trained == total:
        return f"{text}, all trained" if trained is not None else text
    return f"{text}, {formatting.count(trained)} trained" + (
        f" ({100 * trained / total:.3g} %)" if total else ""
    )


def derived_lines(derived: DerivedFigures) -> list[tuple[str, str]]:
    """Return (label, text) for each value that follows from the config's numbers."""
    if not derived:
        return []
    get, count = derived.get, formatting.count
    tokens = (
        f", about {count(get('tokens_per_step'))} tokens a step"
        if get("tokens_per_step") is not None
        else ""
    )
    batch = f"{count(get('global_batch_size'))} samples = {_factors(derived)}{tokens}"
    epochs = formatting.finite(get("epochs"))
    steps = f"{count(get('steps'))} ({count(get('steps_per_epoch'))} an epoch"
    steps += f", {epochs:.3g} epochs)" if epochs is not None else ")"
    warmup = (
        f", after {count(get('warmup_steps'))} steps of warm-up"
        if get("warmup_steps")
        else ", no warm-up"
    )
    lines = [
        ("batch", batch),
        ("steps", steps),
        ("rate", f"{formatting.rate(get('learning_rate'))}{warmup}"),
    ]
    every = get("eval_every_steps")
    return [*lines, ("evaluation", f"every {count(every)} steps" if every else "none")]


def _factors(derived: DerivedFigures) -> str:
    count, ranks = formatting.count, formatting.ranks(derived.get("world_size"))
    if derived.get("replicas") not in (None, derived.get("world_size")):
        ranks = f"{formatting.counted(derived['replicas'], 'replica')} on {ranks}"
    micro = derived.get("micro_batch_size")
    accumulation = derived.get("gradient_accumulation_steps")
    batch, replicas = derived.get("global_batch_size"), derived.get("replicas")
    # of a run that went on with its global batch on other ranks
    if batch and accumulation and replicas:
        micro, rest = divmod(batch, accumulation * replicas)
        if rest:
            about = "" if derived.get("tokens_per_step") is None else "about "
            shared = f"{about}{shares_text(batch, replicas)} on {ranks}"
            return (
                f"{shared}: at most {micro + 1} a micro-batch × {count(accumulation)} accumulation"
            )
    return f"{count(micro)} a micro-batch × {count(accumulation)} accumulation × {ranks}"


def end_lines(progress: Progress, event: RunEndEvent) -> list[tuple[str, str]]:
    """(label, text) of the block at the end: how it went, where things are, what to type next."""
    start, status = progress.start, str(event.get("status"))
    root = str(start.get("output_dir") or "")
    config = start.get("config") or {}
    lines = [(status, _how_it_went(progress, event))]
    if event.get("reason") and status != "done":
        lines.append(("reason", str(event["reason"])))
    if event.get("network"):
        lines.append(("network", str(event["network"])))
    if not root:
        return lines
    quoted = shlex.quote(root)
    if status == "done":
        lines += [("report", f"{root}/report.html"), ("model", f"{root}/model/")]
        if config.get("task") in ("sft", "pretrain"):
            lines.append(("try it", f'paceline generate {quoted} "…"'))
        lines.append(("look again", f"paceline watch {quoted}"))
    else:
        lines.append(("go on", resume_hint(root, config)))
        if status == "stopped":
            lines.append(("report", f"{root}/report.html"))
    return lines


def resume_hint(output_dir: str, config: Mapping[str, JsonValue]) -> str:
    """What to type to go on with a run that ended early."""
    again = f"paceline train {shlex.quote(f'{output_dir}/config.yaml')}"
    if config.get("resume") == "never":
        return f"resume is `never` in its config; with the last checkpoint: {again} resume=auto"
    return f"the same command goes on from the last checkpoint; so does: {again}"


def _how_it_went(progress: Progress, event: RunEndEvent) -> str:
    step = event.get("step") if event.get("step") is not None else progress.done
    total = f" of {progress.total:,}" if progress.total and step != progress.total else ""
    parts = [f"{formatting.count(step)}{total} step{'' if step == 1 and not total else 's'}"]
    wall_s = formatting.finite(event.get("wall_s"))
    if wall_s is not None:
        parts[0] += f" in {formatting.duration(wall_s)}"
    if progress.step is not None:
        came_from = "" if progress.resumed_from else f"{formatting.loss(progress.first_loss)} → "
        parts.append(f"training loss {came_from}{formatting.loss(progress.step.get('loss'))}")
    if progress.eval_loss is not None:
        parts.append(f"evaluation loss {formatting.loss(progress.eval_loss)}")
    return ", ".join(parts)
