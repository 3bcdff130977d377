// A table of the results of several runs, sortable by each column.

import { key } from "../../lib/chart.js";
import { h } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { badge, icon, table } from "../../lib/ui.js";

// A run that is in progress, or was not made to its end, is not marked as the best.
const isDone = (run) => run.status === "done";
const isKnown = (value) => value !== null && value !== undefined;
const largest = (values) =>
  Array.isArray(values) && values.some(Number.isFinite)
    ? Math.max(...values.filter(Number.isFinite))
    : null;

// The columns: the value of a run, its format, and whether a higher (1), a lower (-1) or no (0)
// value is better.
const FIGURES = [
  {
    name: "strategy",
    getValue: (run) => run.strategy,
    show: (value) => value ?? format.NONE,
    better: 0,
    text: true,
  },
  { name: "world_size", getValue: (run) => run.world_size, show: format.count, better: 0 },
  {
    name: "steps",
    getValue: (run) => run.report?.steps ?? run.step,
    show: format.count,
    better: 0,
  },
  {
    name: "train_tokens",
    getValue: (run) => run.report?.train_tokens,
    show: format.short,
    better: 0,
  },
  {
    name: "final_train_loss",
    getValue: (run) => run.report?.final_train_loss ?? run.loss,
    show: format.loss,
    better: -1,
  },
  {
    name: "final_eval_loss",
    getValue: (run) => run.report?.final_eval_loss ?? run.eval_loss,
    show: format.loss,
    better: -1,
  },
  {
    name: "tokens_per_second",
    getValue: (run) => run.report?.tokens_per_second ?? run.tokens_per_second,
    show: format.short,
    better: 1,
  },
  {
    name: "mfu",
    getValue: (run) => run.report?.mfu ?? run.mfu,
    show: format.percent,
    better: 1,
  },
  {
    name: "wall_s",
    getValue: (run) => run.wall_s,
    show: format.duration,
    better: -1,
  },
  {
    name: "time_to_first_step_s",
    getValue: (run) => (run.restarts ? null : run.report?.time_to_first_step_s),
    show: format.duration,
    better: -1,
  },
  {
    name: "peak_memory_bytes",
    getValue: (run) => largest(run.report?.peak_memory_bytes),
    show: format.bytes,
    better: -1,
  },
  {
    name: "traffic_bytes_per_step",
    getValue: (run) => run.report?.traffic_bytes_per_step?.measured,
    show: format.bytes,
    better: -1,
  },
  {
    name: "restarts",
    getValue: (run) => run.report?.restarts ?? run.restarts,
    show: format.count,
    better: 0,
  },
];

/**
 * Return the table. `sort`: the name of a column, prefixed with "-" for descending order, or empty.
 * `onSort(sort)` is called on a click.
 */
export function figureTable(runs, names, sort, lineStyle, onSort) {
  const isDescending = sort.startsWith("-");
  const shownFigures = FIGURES.filter((figure) => runs.some((run) => isKnown(figure.getValue(run))));
  const sortFigure = FIGURES.find((figure) => figure.name === sort.replace("-", ""));
  const order = runs.map((_, index) => index);
  if (sortFigure)
    order.sort((a, b) =>
      compare(sortFigure.getValue(runs[a]), sortFigure.getValue(runs[b]), isDescending),
    );
  const columns = [
    { label: t("runs.name") },
    { label: t("c.status") },
    ...shownFigures.map((figure) => {
      const isSorted = sortFigure === figure;
      return {
        number: !figure.text,
        sort: isSorted ? (isDescending ? "descending" : "ascending") : null,
        label: h(
          "button",
          {
            type: "button",
            class: "sort",
            "data-sort": figure.name,
            "aria-label": t("compare.sort", { name: t(`c.${figure.name}`) }),
            title: t(`c.${figure.name}.is`).replace(/^c\..*/, ""),
            on: {
              click: () => onSort(isSorted && !isDescending ? `-${figure.name}` : figure.name),
            },
          },
          t(`c.${figure.name}`),
          isSorted ? icon(isDescending ? "down" : "up") : null,
        ),
      };
    }),
  ];
  const isComparable = new Set(runs.map(trainingOf)).size === 1;
  const best = new Map(
    FIGURES.filter((figure) => figure.better && isComparable).map((figure) => [
      figure.name,
      bestOf(figure, runs),
    ]),
  );
  const rows = order.map((index) =>
    h(
      "tr",
      {},
      h(
        "th",
        { scope: "row" },
        key(lineStyle(index)),
        " ",
        h("a", { href: `#/run/${runs[index].id}` }, names[index]),
      ),
      h("td", {}, badge(runs[index].status)),
      shownFigures.map((figure) => {
        const value = figure.getValue(runs[index]);
        const isBest =
          best.get(figure.name) === value &&
          isDone(runs[index]) &&
          isKnown(value);
        return h(
          "td",
          {
            class:
              [figure.text ? null : "number", isBest ? "best" : null].filter(Boolean).join(" ") ||
              null,
          },
          figure.show(value),
          isBest ? h("span", { class: "muted small" }, ` ${t("compare.best")}`) : null,
        );
      }),
    ),
  );
  return h(
    "section",
    { class: "card flush" },
    h(
      "div",
      { class: "card-head" },
      h("h2", {}, t("compare.figures")),
      h(
        "span",
        { class: "muted small" },
        t("compare.figures.what"),
        isComparable ? null : ` · ${t("compare.best.none")}`,
      ),
    ),
    table(t("compare.figures"), columns, rows, { class: "compare-figures" }),
  );
}

// The values of runs with another model or other data do not say which run is better.
const trainingOf = ({ model, dataset, val_dataset }) =>
  JSON.stringify([model, dataset ?? null, val_dataset ?? null]);

function bestOf({ getValue, better }, runs) {
  const values = runs.filter(isDone).map(getValue).filter(Number.isFinite);
  if (values.length < 2 || values.every((value) => value === values[0])) return null;
  return better > 0 ? Math.max(...values) : Math.min(...values);
}

// Unknown values are sorted last in both directions.
function compare(a, b, isDescending) {
  const [aUnknown, bUnknown] = [!isKnown(a), !isKnown(b)];
  if (aUnknown || bUnknown) return aUnknown - bUnknown;
  const order = typeof a === "string" ? a.localeCompare(b) : a - b;
  return isDescending ? -order : order;
}
