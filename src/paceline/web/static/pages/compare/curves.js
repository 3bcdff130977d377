// The curves of several runs: a small chart for each metric, and one of them on the full screen.

import { axis, mergeX, eventX, seriesX } from "../../lib/axis.js";
import { lineChart } from "../../lib/chart.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { has, t } from "../../lib/i18n.js";
import { numbers, smooth } from "../../lib/smooth.js";
import { card, download, icon, termOf } from "../../lib/ui.js";
import { chartPng } from "./save.js";

const FORMATS = {
  loss: format.loss,
  eval_loss: format.loss,
  learning_rate: format.digits,
  grad_norm: format.digits,
  tokens_per_second: format.short,
  samples_per_second: format.short,
  flops_per_device_s: format.flops,
  mfu: format.percent,
  step_time_s: format.duration,
  data_wait_s: format.duration,
  comm_wait_s: format.duration,
  memory_bytes: format.bytes,
  traffic_bytes: format.bytes,
};
const SMALL_PX = 170;
/** The series of a run that are compared; the others are from evaluations. */
export const SERIES = Object.keys(FORMATS).filter((name) => name !== "eval_loss");
const UNSMOOTHED = ["learning_rate", "memory_bytes"];

const formatOf = (name) => FORMATS[name] ?? format.digits;
const titleOf = (name) => (has(`m.${name}`) ? t(`m.${name}`) : name);
const fileName = (name) => `compare-${name.replace(/[^\w.-]/g, "_")}.png`;

/**
 * Return `{node, build(), renew(), openRequested(), end()}`. `build` creates the charts of all
 * metrics that a run has recorded; `renew` only draws new values. `state`: `{x, isLog, weight,
 * answers}`.
 */
export function curveGrid(runs, names, lineStyle, state, ctx) {
  const node = h("div", { class: "grid charts", id: "curves" });
  const charts = new Map();
  let full = null;
  let ended = false;

  /** Return the curve of each run. */
  function curvesOf(metric) {
    return runs.map((run, index) => {
      const series = state.answers.get(run.id);
      const started = run.started_at ?? series.time[0] ?? 0;
      const style = { name: names[index], ...lineStyle(index) };
      if (!SERIES.includes(metric)) {
        const value = ({ loss, metrics }) => (metric === "eval_loss" ? loss : metrics?.[metric]);
        const evals = series.evals.filter((evaluation) => Number.isFinite(value(evaluation)));
        const xs = evals.map((evaluation) => eventX(evaluation, series, state.x, started));
        return { ...style, points: true, xs, values: evals.map(value) };
      }
      const values = numbers(series.series[metric].mean);
      return {
        ...style,
        xs: seriesX(series, state.x, started),
        values: UNSMOOTHED.includes(metric) ? values : smooth(values, state.weight),
      };
    });
  }

  function metrics() {
    const ofEvaluations = [...state.answers.values()].flatMap(({ evals }) =>
      evals.flatMap((evaluation) => Object.keys(evaluation.metrics ?? {})),
    );
    return [...new Set([...Object.keys(FORMATS), ...ofEvaluations])].filter((metric) =>
      curvesOf(metric).some((curve) => curve.values.some(Number.isFinite)),
    );
  }

  const chartOf = (metric, height, hasLegend) =>
    lineChart({
      name: titleOf(metric),
      height,
      x: axis(state.x),
      y: {
        format: formatOf(metric) === format.loss ? format.digits : formatOf(metric),
        log: state.isLog,
      },
      hasLegend,
      series: curvesOf(metric).map(({ name, color, dash, points }) => ({
        name,
        color,
        dash,
        points,
        alwaysInLegend: true,
        format: formatOf(metric),
      })),
    });

  function fill(chart, metric) {
    const curves = curvesOf(metric);
    const merged = mergeX(
      curves.flatMap((curve) => curve.xs),
      [],
    );
    chart.set([merged.xs, ...curves.map((curve) => merged.place(curve.values, curve.xs))]);
  }

  function build() {
    for (const chart of charts.values()) chart.end();
    charts.clear();
    const shown = metrics();
    for (const metric of shown) charts.set(metric, chartOf(metric, SMALL_PX, false));
    put(
      node,
      shown.length
        ? shown.map((metric) => chartCard(metric, charts.get(metric).node))
        : h("p", { class: "muted" }, t("compare.none")),
    );
    renew();
  }

  const chartCard = (metric, chartNode) =>
    card(
      has(`m.${metric}`) ? termOf(`m.${metric}`) : metric,
      [
        has(`m.${metric}.unit`)
          ? h("span", { class: "muted small chart-unit" }, t(`m.${metric}.unit`))
          : null,
        h(
          "button",
          {
            type: "button",
            class: "quiet chart-full",
            data: { metric },
            title: t("compare.full"),
            "aria-label": t("compare.full.of", { name: titleOf(metric) }),
            on: { click: () => open(metric) },
          },
          icon("expand"),
        ),
      ],
      chartNode,
    );

  function renew() {
    for (const [metric, chart] of charts) fill(chart, metric);
    if (full) fill(full.chart, full.metric);
  }

  /** Show one chart on the full screen until the user closes it. */
  function open(metric) {
    const chart = chartOf(metric, Math.max(200, innerHeight - 220), true);
    const save = async () => {
      const blob = await chartPng(chart, titleOf(metric), axis(state.x).name);
      if (blob) download(fileName(metric), blob);
    };
    const dialog = h(
      "dialog",
      { class: "full-screen", "aria-label": titleOf(metric) },
      h(
        "div",
        { class: "page-head" },
        h("h2", {}, titleOf(metric)),
        h(
          "div",
          { class: "end" },
          h(
            "button",
            { type: "button", id: "save-png", on: { click: save } },
            icon("save"),
            t("compare.png"),
          ),
          h(
            "button",
            { type: "button", id: "close-full", on: { click: () => dialog.close() } },
            icon("close"),
            t("close"),
          ),
        ),
      ),
      chart.node,
    );
    full = { metric, chart, dialog };
    ctx.setQuery({ y: metric });
    node.after(dialog);
    dialog.showModal();
    fill(chart, metric);
    dialog.addEventListener("close", () => {
      full = null;
      chart.end();
      dialog.remove();
      if (ended) return;
      ctx.setQuery({ y: null });
      node.querySelector(`[data-metric="${CSS.escape(metric)}"]`)?.focus();
    });
  }

  return {
    node,
    build,
    renew,
    /** Open the chart that the address names. */
    openRequested() {
      const metric = ctx.query().get("y");
      if (charts.has(metric)) open(metric);
    },
    end() {
      ended = true;
      for (const chart of charts.values()) chart.end();
      full?.dialog.close();
    },
  };
}
