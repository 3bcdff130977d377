// The header of a run: its name, its state, what can be done with it, and its figures.

import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { badge, figure, figures, icon } from "../../lib/ui.js";
import { describeAxes, describeStrategy } from "./strategy.js";

const RUNNING = ["live", "waiting"];

/** Draw the header. `actions`: from `runActions`. */
export function drawHeader(header, store, actions) {
  const { run } = store;
  const focusedId = header.contains(document.activeElement) ? document.activeElement.id : null;
  // Do not remove an explanation that is being read.
  if (header.contains(document.activeElement) && !focusedId) return;
  const isRunning = RUNNING.includes(run.status);
  put(
    header,
    h(
      "div",
      { class: "page-head" },
      h(
        "a",
        { href: "#/", class: "button quiet", id: "back", "aria-label": t("run.back") },
        "‹ ",
        t("nav.runs"),
      ),
      h("h1", {}, run.name || run.path),
      badge(run.status),
      run.restarts
        ? h(
            "span",
            { class: "badge badge-stopped" },
            icon("restart"),
            t("runs.restarts", { n: run.restarts }),
          )
        : null,
      (run.tags ?? []).map((tag) => h("span", { class: "tag" }, tag)),
      h("div", { class: "end" }, actions.buttons(isRunning)),
    ),
    actions.feedback,
    run.note ? h("p", { class: "muted run-note" }, run.note) : null,
    run.problem
      ? h(
          "div",
          {
            class: `callout ${run.status === "failed" || run.status === "lost" ? "callout-bad" : "callout-warn"}`,
          },
          icon("warning"),
          h("div", {}, run.problem),
        )
      : null,
    figures(...runFigures(run, isRunning)),
  );
  if (focusedId) document.getElementById(focusedId)?.focus();
}

/** Return the figures of a run. A run that has ended has no figure that it did not record. */
/** Return the figures that say how good the model is: rewards if it learns from them, or losses. */
function qualityFigures(run, optional) {
  const isRewarded = (run.reward ?? null) !== null;
  const [name, write] = isRewarded ? ["reward", format.digits] : ["loss", format.loss];
  const [latest, evaluated] = [run[name], run[`eval_${name}`]];
  return [
    optional(
      latest,
      `f.${name}`,
      write(latest),
      t("run.at_step", { step: format.count(run.step) }),
    ),
    optional(
      evaluated,
      `f.eval_${name}`,
      write(evaluated),
      describeEvaluation(run.evals?.at(-1)),
    ),
  ];
}

function runFigures(run, isRunning) {
  const optional = (value, ...parts) =>
    isRunning || (value !== null && value !== undefined) ? figure(...parts) : null;
  return [
    figure(
      "f.progress",
      run.steps ? format.percent((run.step ?? 0) / run.steps) : format.count(run.step),
      run.steps ? bar(run) : null,
    ),
    optional(
      run.epoch,
      "f.epoch",
      format.epoch(run.epoch),
      run.epochs ? t("run.of_epochs", { epochs: format.epoch(run.epochs) }) : null,
    ),
    timeFigure(run, isRunning),
    ...qualityFigures(run, optional),
    optional(
      run.tokens_per_second,
      "f.rate",
      format.short(run.tokens_per_second),
      [t("unit.tokens_s"), run.mfu && `MFU ${format.percent(run.mfu)}`].filter(Boolean).join(" · "),
    ),
    optional(
      run.world_size,
      "f.world",
      run.world_size ? t("runs.ranks", { n: run.world_size }) : format.NONE,
      [run.device, run.host, describeAxes(run.mesh?.axes ?? run.axes)]
        .filter(Boolean)
        .join(" · ") || null,
    ),
    figure(
      "f.last_event",
      h("span", { class: staleness(run) }, format.ago(run.updated_at)),
      isRunning ? t("run.last_event") : format.time(run.updated_at, "short"),
    ),
    run.strategy
      ? h(
          "div",
          { class: "figure-wide" },
          figure("f.strategy", run.strategy, describeStrategy(run.strategy)),
        )
      : null,
  ].filter(Boolean);
}

function timeFigure(run, isRunning) {
  if (!isRunning)
    return figure(
      "f.wall",
      format.duration(run.wall_s),
      run.started_at ? format.time(run.started_at, "short") : null,
    );
  const isKnown = run.wall_s !== null && run.wall_s !== undefined;
  return figure(
    "f.eta",
    format.duration(run.eta_s),
    isKnown ? t("run.running", { wall: format.duration(run.wall_s) }) : null,
  );
}

const staleness = (run) =>
  run.status === "live" && Date.now() / 1000 - run.updated_at > 120 ? "stale" : null;

function bar(run) {
  const share = Math.min(1, (run.step ?? 0) / run.steps);
  return [
    h(
      "div",
      { class: "progress", "aria-hidden": "true" },
      h("span", { style: { width: `${share * 100}%` } }),
    ),
    h("div", {}, t("runs.step", { step: format.count(run.step), steps: format.count(run.steps) })),
  ];
}

/** The step of the latest evaluation, and the step of the best one if the run selects it. */
function describeEvaluation(evaluation) {
  if (!evaluation) return t("run.no_eval");
  const step = format.count(evaluation.step);
  if (evaluation.best_step === undefined) return t("run.at_step", { step });
  return t("run.at_step_best", { step, best: format.count(evaluation.best_step) });
}
