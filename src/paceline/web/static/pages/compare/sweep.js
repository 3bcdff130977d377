// The plots of a sweep: the metric over each parameter, parallel coordinates, and the importance of
// the parameters. The server places the runs on the axes.

import { h, svg } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { card, termOf } from "../../lib/ui.js";

const WIDTH = 1000;
const HEIGHT = 400;
const percent = (share) => `${(share * 100).toFixed(2)}%`;
/** A position in a scatter plot, whose outermost dots are not on its frame. */
const inset = (share) => percent(0.05 + 0.9 * share);

/** Return the cards of a sweep, which is from the response of `api/compare`. */
export function sweepCards({ metric, plots, importance, ids }) {
  if (!plots)
    return card(t("sweep.title"), null, h("p", { class: "muted" }, t("sweep.few", { metric })));
  const columns = [...plots.axes, plots.metric];
  return h(
    "div",
    { class: "stack", id: "sweep" },
    h(
      "div",
      { class: "grid charts" },
      plots.axes.map((axis, index) => scatterCard(axis, index, metric, plots, ids)),
    ),
    card(
      termOf("sweep.parallel"),
      h("span", { class: "muted small" }, t("sweep.best", { name: plots.trials[0].text })),
      parallel(columns, plots.trials, ids),
    ),
    importance ? importanceCard(importance) : null,
  );
}

function scatterCard(axis, index, metric, plots, ids) {
  const dots = plots.trials
    .map((trial, rank) => ({ trial, rank }))
    .filter(({ trial }) => trial.at[index] !== null)
    .reverse(); // the best one is on top
  return card(
    t("sweep.over", { metric, name: axis.name }),
    axis.is_log ? h("span", { class: "muted small" }, t("compare.log")) : null,
    h(
      "div",
      { class: "scatter", role: "group", "aria-label": t("sweep.over", { metric, name: axis.key }) },
      plots.metric.ticks.map(({ at, text }) =>
        h("span", { class: "scatter-y", style: { bottom: inset(at) } }, text),
      ),
      axis.ticks.map(({ at, text }) =>
        h("span", { class: "scatter-x", style: { left: inset(at) } }, text),
      ),
      dots.map(({ trial, rank }) =>
        h(ids[trial.name] ? "a" : "span", {
          class: `dot ${rank === 0 ? "dot-best" : `dot-${trial.status}`}`,
          href: ids[trial.name] ? `#/run/${ids[trial.name]}` : null,
          title: trial.text,
          "aria-label": ids[trial.name] ? trial.text : null,
          style: { left: inset(trial.at[index]), bottom: inset(trial.metric_at) },
        }),
      ),
    ),
  );
}

function parallel(columns, trials, ids) {
  const x = (index) => index / (columns.length - 1);
  const complete = trials.filter((trial) => !trial.at.includes(null)).reverse();
  return h(
    "div",
    { class: "parallel" },
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": t("sweep.parallel.label", {
          names: columns.map((column) => column.key).join(", "),
          n: trials.length,
        }),
      },
      complete.map((trial) =>
        svg(
          "path",
          {
            class: trial.share === 0 ? "parallel-best" : null,
            style: { opacity: 1 - 0.75 * trial.share },
            d: `M${[...trial.at, trial.metric_at]
              .map((at, index) => `${x(index) * WIDTH} ${((1 - at) * HEIGHT).toFixed(1)}`)
              .join("L")}`,
            on: {
              click: () => ids[trial.name] && (location.hash = `#/run/${ids[trial.name]}`),
            },
          },
          svg("title", {}, trial.text),
        ),
      ),
    ),
    columns.map((column, index) =>
      h(
        "div",
        { class: "parallel-axis", style: { left: percent(x(index)) }, "aria-hidden": "true" },
        h("b", { title: column.key }, column.name),
        column.ticks.map(({ at, text }) =>
          h("span", { style: { bottom: percent(at) } }, text),
        ),
      ),
    ),
  );
}

function importanceCard(importance) {
  return card(
    termOf("sweep.importance"),
    null,
    h(
      "div",
      { class: "importance", id: "importance" },
      Object.entries(importance).map(([key, share]) => [
        h("code", {}, key),
        h(
          "div",
          { class: "bars-bar" },
          h("span", { class: "fill fill-1", style: { width: percent(share) } }),
        ),
        h("span", { class: "number" }, format.percent(share)),
      ]),
    ),
  );
}
