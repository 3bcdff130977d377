// The comparison of several runs: curves, results, config differences and notes.

import { get } from "../lib/api.js";
import { AXES, axis, mergeX, eventX, seriesX } from "../lib/axis.js";
import { COLORS, DASHES, key, lineChart } from "../lib/chart.js";
import { axisChoice, smoothField } from "../lib/controls.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { addTexts, t } from "../lib/i18n.js";
import { numbers, smooth } from "../lib/smooth.js";
import { badge, card, copy, download, emptyState, icon, termOf } from "../lib/ui.js";
import { texts } from "../i18n/watch.js";
import { configCard } from "./compare/config.js";
import { figureTable } from "./compare/figures.js";
import { notesCard } from "./compare/notes.js";
import { chartPng, curvesCsv } from "./compare/save.js";
import { fetchSeries } from "./run/series.js";

addTexts(texts);

const METRICS = {
  loss: format.loss,
  eval_loss: format.loss,
  learning_rate: format.digits,
  grad_norm: format.digits,
  tokens_per_second: format.short,
  step_time_s: format.duration,
  memory_bytes: format.bytes,
  traffic_bytes: format.bytes,
};
const SERIES = Object.keys(METRICS).filter((name) => name !== "eval_loss");
const RENEW_MS = 3000;
const MAX_RUNS = 50; // of a request

export async function show(root, params, ctx) {
  ctx.title(t("compare.title"));
  const { ids, total } = await requestedIds(params.ids);
  const query = ctx.query();
  const state = {
    x: AXES.includes(query.get("x")) ? query.get("x") : "step",
    metric: query.get("y") in METRICS ? query.get("y") : "loss",
    weight: Number(query.get("smooth") ?? 0.6),
    sort: query.get("sort") ?? "",
    runs: [],
    answers: new Map(),
    differences: [],
  };
  const { runs, missing, config_differences } = await runsOf(ids);
  if (runs.length === 0) {
    put(
      root,
      emptyState(
        t("compare.few"),
        missing.length ? t("compare.missing", { ids: missing.join(", ") }) : t("compare.few.text"),
        h("a", { class: "button", href: "#/" }, t("nav.runs")),
      ),
    );
    return () => {};
  }
  state.runs = runs;
  const answers = await Promise.all(
    runs.map((run) => fetchSeries(run.id, { names: SERIES, points: 800 })),
  );
  runs.forEach((run, index) => state.answers.set(run.id, answers[index]));

  const lineStyle = (index) => ({
    color: COLORS[index % COLORS.length],
    dash: DASHES[index % DASHES.length],
  });
  const names = namesOf(runs);
  const chartNode = h("div", {});
  const figures = h("div", {});
  let chart = null;

  function lines() {
    return runs.map((run, index) => {
      const series = state.answers.get(run.id);
      const started = run.started_at ?? series.time[0] ?? 0;
      if (state.metric === "eval_loss") {
        const evals = series.evals.filter((evaluation) => Number.isFinite(evaluation.loss));
        return {
          name: names[index],
          ...lineStyle(index),
          points: true,
          xs: evals.map((evaluation) => eventX(evaluation, series, state.x, started)),
          values: evals.map((evaluation) => evaluation.loss),
        };
      }
      const values = numbers(series.series[state.metric].mean);
      return {
        name: names[index],
        ...lineStyle(index),
        xs: seriesX(series, state.x, started),
        values: state.metric === "learning_rate" ? values : smooth(values, state.weight),
      };
    });
  }

  function drawChart(renewed = false) {
    const curves = lines();
    const hasValues = curves.some((curve) => curve.values.some((value) => value !== null));
    if (!hasValues) {
      chart?.end();
      chart = null;
      return void put(chartNode, h("p", { class: "muted" }, t("compare.none")));
    }
    const mergedX = mergeX(
      curves.flatMap((curve) => curve.xs),
      [],
    );
    if (!chart || !renewed) {
      chart?.end();
      chart = lineChart({
        name: t(`m.${state.metric}`),
        height: 360,
        x: axis(state.x),
        y: {
          format: METRICS[state.metric] === format.loss ? format.digits : METRICS[state.metric],
        },
        series: curves.map(({ name, color, dash, points }) => ({
          name,
          color,
          dash,
          points,
          alwaysInLegend: true,
          format: METRICS[state.metric],
        })),
      });
      put(chartNode, chart.node);
    }
    chart.set([mergedX.xs, ...curves.map((curve) => mergedX.place(curve.values, curve.xs))]);
    return undefined;
  }

  function redraw() {
    ctx.setQuery({
      x: state.x === "step" ? null : state.x,
      y: state.metric === "loss" ? null : state.metric,
      smooth: state.weight === 0.6 ? null : state.weight,
      sort: state.sort,
    });
    drawChart();
  }

  const drawFigures = () =>
    put(
      figures,
      figureTable(runs, names, state.sort, lineStyle, (sort) => {
        state.sort = sort;
        redraw();
        drawFigures();
        figures.querySelector(`[data-sort="${sort.replace("-", "")}"]`)?.focus();
      }),
    );
  put(
    root,
    header(runs, names, missing, lineStyle, ids),
    total > ids.length
      ? h("p", { class: "muted" }, t("compare.latest", { n: ids.length, total }))
      : null,
    controls(state, redraw, ctx, {
      png: () => chart && chartPng(chart, t(`m.${state.metric}`), axis(state.x).name),
      csv: () => curvesCsv(runs, names, state.answers),
    }),
    card(
      termOf("compare.curves"),
      h("span", { class: "muted small" }, t(`m.${state.metric}.unit`)),
      chartNode,
    ),
    figures,
    notesCard(runs, names, ctx),
    configCard(config_differences, runs, names),
  );
  drawChart();
  drawFigures();

  const timer = setInterval(() => renew().catch(() => {}), RENEW_MS);
  async function renew() {
    const live = runs.filter((run) => ["live", "waiting"].includes(run.status));
    if (!live.length || document.hidden) return;
    const updated = await get(`api/compare?ids=${live.map((run) => run.id).join(",")}`);
    for (const updatedRun of updated.runs)
      Object.assign(
        runs.find((run) => run.id === updatedRun.id),
        updatedRun,
      );
    for (const run of live)
      state.answers.set(run.id, await fetchSeries(run.id, { names: SERIES, points: 800 }));
    drawChart(true);
    if (!figures.contains(document.activeElement)) drawFigures();
  }
  return () => {
    clearInterval(timer);
    chart?.end();
  };
}

/** Return the ids in the address, or of `all` runs the latest ones, and how many there are. */
async function requestedIds(text) {
  let ids = [...new Set(text.split(","))].filter(Boolean);
  if (text === "all") ids = (await get("api/runs")).runs.map((run) => run.id);
  return { ids: text === "all" ? ids.slice(0, MAX_RUNS) : ids, total: ids.length };
}

// If one of the runs no longer exists, the request fails; then only the others are compared.
async function runsOf(ids) {
  try {
    return {
      ...(await get(`api/compare?ids=${ids.map(encodeURIComponent).join(",")}`)),
      missing: [],
    };
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  const { runs } = await get("api/runs");
  const available = ids.filter((id) => runs.some((run) => run.id === id));
  const missing = ids.filter((id) => !available.includes(id));
  if (!available.length) return { runs: [], missing, config_differences: [] };
  return { ...(await get(`api/compare?ids=${available.join(",")}`)), missing };
}

/** Return unique names: for runs with the same name, their paths. */
function namesOf(runs) {
  return runs.map((run) =>
    runs.filter((other) => other.name === run.name).length > 1 ? run.path : run.name,
  );
}

function header(runs, names, missing, lineStyle, ids) {
  const idsWithout = (id) => ids.filter((otherId) => otherId !== id && !missing.includes(otherId));
  return h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "page-head" },
      h("h1", {}, t("compare.title")),
      h("span", { class: "muted" }, t("runs.count", { n: runs.length })),
    ),
    missing.length
      ? h(
          "div",
          { class: "callout callout-warn" },
          icon("warning"),
          h("div", {}, t("compare.missing", { ids: missing.join(", ") })),
        )
      : null,
    h(
      "ul",
      { class: "compare-runs" },
      runs.map((run, index) =>
        h(
          "li",
          {},
          key(lineStyle(index)),
          h("a", { href: `#/run/${run.id}` }, names[index]),
          badge(run.status),
          runs.length > 1
            ? h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": t("compare.remove", { name: names[index] }),
                  on: {
                    click: () => (location.hash = `#/compare/${idsWithout(run.id).join(",")}`),
                  },
                },
                icon("close"),
              )
            : null,
        ),
      ),
    ),
  );
}

function controls(state, redraw, ctx, { png, csv }) {
  const metric = h(
    "select",
    {
      id: "metric",
      on: {
        change: (event) => {
          state.metric = event.target.value;
          redraw();
        },
      },
    },
    Object.keys(METRICS).map((name) =>
      h("option", { value: name, prop: { selected: name === state.metric } }, t(`m.${name}`)),
    ),
  );
  const link = h(
    "button",
    {
      type: "button",
      id: "copy-link",
      on: {
        click: async () => {
          link.lastChild.textContent = t((await copy(location.href)) ? "copied" : "copy.failed");
          ctx.announce(link.textContent);
        },
      },
    },
    icon("link"),
    h("span", {}, t("compare.link")),
  );
  return h(
    "div",
    { class: "toolbar" },
    h("label", { class: "field" }, t("compare.metric"), metric),
    axisChoice(state.x, (kind) => {
      state.x = kind;
      redraw();
    }),
    smoothField(state.weight, (weight) => {
      state.weight = weight;
      redraw();
    }),
    h(
      "div",
      { class: "end toolbar" },
      h(
        "button",
        {
          type: "button",
          id: "save-csv",
          on: { click: () => download("compare.csv", csv(), "text/csv") },
        },
        icon("save"),
        t("compare.csv"),
      ),
      h(
        "button",
        {
          type: "button",
          id: "save-png",
          on: {
            click: async () => {
              const blob = await png();
              if (blob) download(`compare-${state.metric}.png`, blob);
            },
          },
        },
        icon("save"),
        t("compare.png"),
      ),
      link,
    ),
  );
}
