// The rows of the list of runs.

import { h } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { badge, icon } from "../../lib/ui.js";

/**
 * The ids of the runs selected for comparison. The selection persists while other pages are shown.
 */
export const selectedIds = new Set();

/**
 * Return the cells of a run. `onSelect()` is called when the run is selected or deselected;
 * `curveOf(id)` returns the curve of its loss.
 */
export function rowCells(run, onSelect, curveOf) {
  const checkbox = h("input", {
    type: "checkbox",
    "aria-label": t("runs.choose", { name: run.name }),
    prop: { checked: selectedIds.has(run.id) },
    on: {
      change: (event) => {
        selectedIds[event.target.checked ? "add" : "delete"](run.id);
        onSelect();
      },
    },
  });
  const label = (key) => ({ "data-label": t(key) });
  return [
    h("td", { class: "pick" }, checkbox),
    h(
      "th",
      { scope: "row", class: "run-name" },
      h(
        "div",
        { class: "run-line" },
        h("a", { href: `#/run/${run.id}` }, run.name || run.path),
        " ",
        badge(run.status),
        run.archived ? h("span", { class: "tag" }, t("runs.archived")) : null,
      ),
      runDetails(run),
    ),
    h("td", { class: "run-steps", ...label("runs.progress") }, progressBar(run)),
    h("td", { class: "number", ...label("runs.epoch") }, format.epoch(run.epoch, run.epochs)),
    h("td", { class: "run-curve", ...label("runs.curve") }, curveOf(run.id)),
    h("td", { class: "number", ...label("runs.loss") }, format.loss(run.loss)),
    h("td", { class: "number", ...label("runs.eval_loss") }, format.loss(run.eval_loss)),
    h("td", { class: "number", ...label("runs.rate") }, format.short(run.tokens_per_second)),
    h("td", { class: "number", ...label("runs.duration") }, format.duration(run.wall_s)),
    h(
      "td",
      label("runs.strategy"),
      run.strategy ?? format.NONE,
      " ",
      run.world_size
        ? h("span", { class: "muted nowrap" }, `× ${run.world_size} ${run.device ?? ""}`)
        : null,
    ),
    h(
      "td",
      { ...label("runs.model"), class: "wrap" },
      run.model ?? format.NONE,
      run.task ? h("div", { class: "muted small" }, run.task) : null,
    ),
    h("td", label("runs.started"), timeElement(run.started_at)),
  ];
}

function runDetails(run) {
  const parts = [];
  if (run.path && run.path !== run.name) parts.push(h("span", { class: "mono" }, run.path));
  if (run.restarts) parts.push(t("runs.restarts", { n: run.restarts }));
  const lines = [
    parts.length
      ? h(
          "div",
          { class: "muted small" },
          parts.flatMap((part, index) => (index ? [" · ", part] : [part])),
        )
      : null,
  ];
  if (run.problem)
    lines.push(
      h(
        "div",
        { class: "run-problem small one-line", title: run.problem },
        icon("warning"),
        " ",
        run.problem,
      ),
    );
  if (run.note)
    lines.push(h("div", { class: "muted small run-note one-line", title: run.note }, run.note));
  if (run.tags?.length)
    lines.push(
      h(
        "div",
        { class: "run-tags" },
        run.tags.map((tag) => h("span", { class: "tag" }, tag)),
      ),
    );
  return h("div", { class: "run-more" }, lines);
}

/** Return the progress of a run as a bar with a text. */
export function progressBar(run) {
  const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : null;
  const text =
    run.step === null || run.step === undefined
      ? format.NONE
      : run.steps
        ? t("runs.step", { step: format.count(run.step), steps: format.count(run.steps) })
        : t("runs.step.open", { step: format.count(run.step) });
  return h(
    "div",
    { class: "run-progress" },
    share === null
      ? null
      : h(
          "div",
          { class: "progress", "aria-hidden": "true" },
          h("span", {
            class: run.status === "live" ? null : "is-done",
            style: { width: `${share * 100}%` },
          }),
        ),
    h(
      "div",
      { class: "small muted" },
      text,
      run.status === "live" && run.eta_s !== null && run.eta_s !== undefined
        ? ` · ${t("runs.left", { left: format.duration(run.eta_s) })}`
        : null,
    ),
  );
}

export function timeElement(time_s) {
  if (!time_s) return format.NONE;
  return h(
    "time",
    {
      datetime: new Date(time_s * 1000).toISOString(),
      title: format.time(time_s),
      class: "nowrap",
      "data-at": time_s,
    },
    format.ago(time_s),
  );
}

/** Replace the cell `old` by `next`. A link that has the focus is kept. */
export function replaceCell(old, next) {
  if (old.contains(document.activeElement) && old.querySelector("a")) {
    // Replacing the link would remove the focus, so only its text is replaced.
    old.querySelector("a").textContent = next.querySelector("a").textContent;
    for (const kind of [".badge", ".run-more"])
      old.querySelector(kind)?.replaceWith(next.querySelector(kind) ?? "");
  } else old.replaceWith(next);
}
