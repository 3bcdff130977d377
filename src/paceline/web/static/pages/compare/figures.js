// The results of the reports side by side, sorted by any of them.

import { key } from "../../lib/chart.js";
import { h } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { badge, icon, table } from "../../lib/ui.js";

const ended = (run) => !["live", "waiting"].includes(run.status); // what has not ended yet is not the best of anything
const largest = (values) =>
  Array.isArray(values) && values.some(Number.isFinite) ? Math.max(...values.filter(Number.isFinite)) : null;

// The results: where each comes from, its format, and whether more (1), less (-1) or neither (0) is better.
const FIGURES = [
  { name: "strategy", of: (run) => run.strategy, show: (value) => value ?? format.NONE, better: 0, text: true },
  { name: "world_size", of: (run) => run.world_size, show: format.count, better: 0 },
  { name: "steps", of: (run) => run.report?.steps ?? run.step, show: format.count, better: 0 },
  { name: "train_tokens", of: (run) => run.report?.train_tokens, show: format.short, better: 0 },
  { name: "final_train_loss", of: (run) => run.report?.final_train_loss ?? run.loss, show: format.loss, better: -1 },
  { name: "final_eval_loss", of: (run) => run.report?.final_eval_loss ?? run.eval_loss, show: format.loss, better: -1 },
  {
    name: "tokens_per_second",
    of: (run) => run.report?.tokens_per_second ?? run.tokens_per_second,
    show: format.short,
    better: 1,
  },
  { name: "wall_s", of: (run) => run.report?.wall_s ?? run.wall_s, show: format.duration, better: -1 },
  { name: "time_to_first_step_s", of: (run) => (run.restarts ? null : run.report?.time_to_first_step_s), show: format.duration, better: -1 },
  { name: "peak_memory_bytes", of: (run) => largest(run.report?.peak_memory_bytes), show: format.bytes, better: -1 },
  { name: "traffic_bytes_per_step", of: (run) => run.report?.traffic_bytes_per_step?.measured, show: format.bytes, better: -1 },
  { name: "restarts", of: (run) => run.report?.restarts ?? run.restarts, show: format.count, better: 0 },
];

/** `sort`: the name of a result, with "-" before it for descending order, or empty. `sorted(sort)` is called with a new one. */
export function figureTable(runs, names, sort, look, sorted) {
  const down = sort.startsWith("-");
  const by = FIGURES.find((one) => one.name === sort.replace("-", ""));
  const order = runs.map((_, at) => at);
  if (by) order.sort((one, two) => compare(by.of(runs[one]), by.of(runs[two]), down));
  const heads = [
    { head: t("runs.name") },
    { head: t("c.status") },
    ...FIGURES.map((figure) => {
      const mine = by === figure;
      return {
        number: !figure.text,
        sort: mine ? (down ? "descending" : "ascending") : null,
        head: h(
          "button",
          {
            type: "button",
            class: "sort",
            "data-sort": figure.name,
            "aria-label": t("compare.sort", { name: t(`c.${figure.name}`) }),
            title: t(`c.${figure.name}.is`).replace(/^c\..*/, ""),
            on: { click: () => sorted(mine && !down ? `-${figure.name}` : figure.name) },
          },
          t(`c.${figure.name}`),
          mine ? icon(down ? "down" : "up") : null,
        ),
      };
    }),
  ];
  const best = new Map(FIGURES.filter((one) => one.better && runs.length > 1).map((one) => [one.name, bestOf(one, runs)]));
  const rows = order.map((at) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, key(look(at)), " ", h("a", { href: `#/run/${runs[at].id}` }, names[at])),
      h("td", {}, badge(runs[at].status)),
      FIGURES.map((figure) => {
        const value = figure.of(runs[at]);
        const top = best.get(figure.name) === value && ended(runs[at]) && value !== null && value !== undefined;
        return h(
          "td",
          { class: [figure.text ? null : "number", top ? "best" : null].filter(Boolean).join(" ") || null },
          figure.show(value),
          top ? h("span", { class: "muted small" }, ` ${t("compare.best")}`) : null,
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
      h("span", { class: "muted small" }, t("compare.figures.what")),
    ),
    table(t("compare.figures"), heads, rows, { class: "compare-figures" }),
  );
}

function bestOf({ of, better }, runs) {
  const known = runs.filter(ended).map(of).filter(Number.isFinite);
  if (known.length < 2 || known.every((one) => one === known[0])) return null;
  return better > 0 ? Math.max(...known) : Math.min(...known);
}

// Unknown values come last in both directions.
function compare(one, two, down) {
  const [first, second] = [one, two].map((value) => value === null || value === undefined);
  if (first || second) return first - second;
  const order = typeof one === "string" ? one.localeCompare(two) : one - two;
  return down ? -order : order;
}
