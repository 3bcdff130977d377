// The tab Overview of a run: its curves and events.

import { axis, mergeX, stepAt, eventX, seriesX } from "../../lib/axis.js";
import { lineChart } from "../../lib/chart.js";
import { axisChoice, smoothField } from "../../lib/controls.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { numbers, smooth } from "../../lib/smooth.js";
import { emptyState, card, icon, row, table, termOf } from "../../lib/ui.js";
import { fetchSeries, appendEvents } from "./series.js";
import { sourcesCard } from "./sources.js";

const METRICS = [
  { name: "loss", color: "--s2", format: format.digits },
  { name: "learning_rate", color: "--s3", format: format.digits, min: 0 },
  { name: "grad_norm", color: "--s4", format: format.digits, min: 0 },
  { name: "tokens_per_second", color: "--s1", format: format.short, min: 0 },
  { name: "flops_per_device_s", color: "--s6", format: format.flops, min: 0 },
  { name: "mfu", color: "--s7", format: format.percent, min: 0 },
  {
    name: "step_time_s",
    color: "--s2",
    format: format.duration,
    min: 0,
    extraLines: [
      ["data_wait_s", "--s3", [2, 3]],
      ["comm_wait_s", "--s4", [7, 4]],
    ],
  },
  { name: "memory_bytes", color: "--s8", format: format.bytes, min: 0 },
  { name: "traffic_bytes", color: "--s5", format: format.bytes, min: 0 },
  { name: "expert_load", color: "--s6", format: format.digits, min: 1 },
  { name: "aux_loss", color: "--s7", format: format.digits },
  { name: "reward", color: "--s1", format: format.digits },
  { name: "completion_length", color: "--s3", format: format.short, min: 0 },
  { name: "entropy", color: "--s6", format: format.digits, min: 0 },
  { name: "kl", color: "--s7", format: format.digits },
  { name: "clip_ratio", color: "--s5", format: format.percent, min: 0 },
  { name: "logprob_diff", color: "--s2", format: format.digits, min: 0 },
  { name: "importance_ratio", color: "--s4", format: format.digits, min: 0 },
];
const MARKS_SHOWN = 100;

export async function show(root, store, ctx) {
  const query = ctx.query();
  const state = {
    x: ["step", "tokens", "time"].includes(query.get("x")) ? query.get("x") : "step",
    weight: Number(query.get("smooth") ?? 0.6),
    start: numberOf(query.get("start")),
    end: numberOf(query.get("end")),
    answer: null,
  };
  const started = () => store.run.started_at ?? state.answer.time[0] ?? 0;
  const charts = [];
  const earlyEvents = [];
  let loadCount = 0;
  const stopEarly = store.on("append", (events) => earlyEvents.push(...events));
  state.answer = await fetchSeries(store.id, state);
  store.bytes ??= state.answer.bytes;
  appendEvents(state.answer, earlyEvents);
  stopEarly();

  const tools = toolbar(state, { axisChanged, smoothChanged, zoom });
  const note = h("p", { class: "muted small", id: "thinned" });
  const marks = h("div", {});
  const sources = { node: h("div", {}), ...store.run.sources };
  const chartsNode = h("div", { class: "stack" });
  put(root, tools.node, chartsNode, sources.node, marks);

  function buildCharts() {
    charts.splice(0).forEach((built) => built.chart.end());
    if (state.answer.step.length === 0 && state.answer.evals.length === 0) {
      put(
        chartsNode,
        emptyState(
          t("overview.none"),
          t(
            store.run.status === "live" || store.run.status === "waiting"
              ? "overview.none.live"
              : "overview.none.ended",
          ),
        ),
      );
      return;
    }
    const zoomed = (low, high) =>
      low === null
        ? zoom(null, null)
        : zoom(
            Math.max(0, stepAt(low, state.answer, state.x, started())),
            stepAt(high, state.answer, state.x, started()),
          );
    const x = axis(state.x);
    const main = mainName();
    const mainChart = lineChart({
      name: t(`m.${main}`),
      height: 300,
      x,
      y: { format: format.digits },
      zoomed,
      sync: store.id,
      series: [
        { name: t("line.raw"), color: "--s1", width: 1, faint: true, format: format.loss },
        { name: t("line.smooth"), color: "--s1", width: 2.25, format: format.loss },
        {
          name: t("line.eval"),
          color: "--s2",
          dash: [6, 4],
          points: true,
          width: 1.5,
          format: format.loss,
        },
        { name: "min", isHidden: true, color: "--s1", width: 0, band: [5, 4] },
        { name: "max", isHidden: true, color: "--s1", width: 0 },
      ],
    });
    charts.push({ chart: mainChart, fill: (xs) => fillMain(main, xs) });
    const shown = METRICS.filter(({ name }) => name !== main && hasSeries(name));
    const metricCards = shown.map((metric) => {
      const series = [
        { name: t(`m.${metric.name}`), color: metric.color, width: 1.5 },
        { name: "min", isHidden: true, color: metric.color, width: 0, band: [3, 2] },
        { name: "max", isHidden: true, color: metric.color, width: 0 },
        ...(metric.extraLines ?? []).map(([name, color, dash]) => ({
          name: t(`m.${name}`),
          color,
          dash,
          width: 1.5,
        })),
      ];
      const chart = lineChart({
        name: t(`m.${metric.name}`),
        height: 150,
        x,
        y: { format: metric.format, min: metric.min },
        series,
        zoomed,
        sync: store.id,
      });
      charts.push({
        chart,
        fill: (xs) => [
          xs,
          ...lines(metric.name),
          ...(metric.extraLines ?? []).map(([name]) => mean(name)),
        ],
      });
      return card(
        termOf(`m.${metric.name}`),
        h("span", { class: "muted small" }, t(`m.${metric.name}.unit`)),
        chart.node,
      );
    });
    const evalCards = (state.evalNames = evalNames()).map((name) => evalCard(name, x, zoomed));
    put(
      chartsNode,
      h(
        "section",
        { class: "card" },
        h("div", { class: "card-head" }, h("h2", {}, termOf(`m.${main}`)), note),
        mainChart.node,
      ),
      h("div", { class: "grid charts" }, evalCards, metricCards),
    );
    draw();
  }

  /** Build the chart of a metric of the evaluations. */
  function evalCard(name, x, zoomed) {
    const chart = lineChart({
      name,
      height: 150,
      x,
      y: { format: format.digits },
      series: [{ name, color: "--s2", dash: [6, 4], points: true, width: 1.5 }],
      zoomed,
      sync: store.id,
    });
    charts.push({
      chart,
      fill: () => {
        const evals = state.answer.evals.filter(({ metrics }) => Number.isFinite(metrics?.[name]));
        return [
          evals.map((evaluation) => eventX(evaluation, state.answer, state.x, started())),
          evals.map((evaluation) => evaluation.metrics[name]),
        ];
      },
    });
    return card(name, h("span", { class: "muted small" }, t("line.eval")), chart.node);
  }

  /** The curve that says how well a run goes: rewards are raised, and their loss stays near 0. */
  const mainName = () => (hasSeries("reward") ? "reward" : "loss");
  const evalNames = () =>
    [...new Set(state.answer.evals.flatMap(({ metrics }) => Object.keys(metrics ?? {})))].filter(
      (name) => name !== mainName(),
    );
  const hasNewMetrics = () => evalNames().some((name) => !state.evalNames?.includes(name));

  const hasSeries = (name) => state.answer.series[name]?.mean.some((value) => value !== null);
  const mean = (name) =>
    numbers(state.answer.series[name]?.mean ?? state.answer.step.map(() => null));
  const lines = (name) => {
    const series = state.answer.series[name];
    const isAggregated = series.mean.some((value, index) => series.max[index] > value);
    return [
      numbers(series.mean),
      isAggregated ? numbers(series.min) : series.mean.map(() => null),
      isAggregated ? numbers(series.max) : series.mean.map(() => null),
    ];
  };

  function fillMain(name, xs) {
    const [raw, low, high] = lines(name);
    const valueOf = (evaluation) => evaluation[name] ?? evaluation.metrics?.[name];
    const evals = state.answer.evals.filter((evaluation) => Number.isFinite(valueOf(evaluation)));
    const evalXs = evals.map((evaluation) => eventX(evaluation, state.answer, state.x, started()));
    const mergedX = mergeX(xs, evalXs);
    return [
      mergedX.xs,
      ...[raw, smooth(raw, state.weight)].map((values) => mergedX.place(values, xs)),
      mergedX.place(evals.map(valueOf), evalXs),
      ...[low, high].map((values) => mergedX.place(values, xs)),
    ];
  }

  function draw() {
    const xs = seriesX(state.answer, state.x, started());
    const shownMarks = state.answer.marks
      .filter((mark) => isShown(mark) && (mark.step !== null || state.x === "time"))
      .map((mark) => ({ ...mark, x: eventX(mark, state.answer, state.x, started()) }));
    for (const { chart, fill } of charts) chart.set(fill(xs), shownMarks);
    const { num_steps, step, read } = state.answer;
    put(
      note,
      num_steps > 1.5 * step.length
        ? t("overview.thinned", { every: format.short(Math.round(num_steps / step.length)) })
        : "",
      read < 1 ? ` ${t("overview.sampled", { read: format.percent(read) })}` : "",
    );
    tools.renew();
    put(sources.node, sourcesCard(sources));
    put(marks, marksCard(state.answer.marks.filter(isShown)));
  }

  async function load() {
    const thisLoad = ++loadCount;
    const response = await fetchSeries(store.id, state).catch((error) =>
      (ctx.announce(error.what), null),
    );
    if (!response || thisLoad !== loadCount) return;
    const seriesChanged =
      charts.length === 0 ||
      METRICS.some(
        (metric) =>
          hasSeries(metric.name) !==
          response.series[metric.name]?.mean.some((value) => value !== null),
      );
    state.answer = response;
    if (seriesChanged || hasNewMetrics()) buildCharts();
    else draw();
    if (response.read < 1) setTimeout(() => thisLoad === loadCount && load(), 2000);
  }

  function axisChanged(kind) {
    state.x = kind;
    ctx.setQuery({ x: kind === "step" ? null : kind });
    buildCharts();
  }

  function smoothChanged(weight) {
    state.weight = weight;
    ctx.setQuery({ smooth: weight === 0.6 ? null : weight });
    draw();
  }

  async function zoom(start, end) {
    Object.assign(state, { start, end });
    ctx.setQuery({ start, end });
    await load();
    ctx.announce(
      start === null && end === null
        ? t("zoom.full")
        : t("zoom.range", { start: start ?? 0, end: end ?? "" }),
    );
  }

  buildCharts();
  if (state.answer.read < 1) setTimeout(load, 1500);
  const drawSoon = inFrames(draw);
  const unsubscribers = [
    store.on("append", (events) => {
      if (state.end !== null) return;
      const previousCount = state.answer.step.length;
      for (const event of events)
        if (event.type === "step")
          Object.assign(sources, { newest: event.sources ?? null, fill: event.fill ?? null });
      if (!appendEvents(state.answer, events)) load();
      else if ((previousCount === 0 && state.answer.step.length) || hasNewMetrics()) buildCharts();
      else drawSoon();
    }),
    store.on("reload", load),
  ];
  return () => {
    loadCount++;
    unsubscribers.forEach((unsubscribe) => unsubscribe());
    charts.forEach(({ chart }) => chart.end());
  };
}

const numberOf = (text) =>
  text === null || text === "" || !Number.isFinite(Number(text)) ? null : Number(text);

/** Return a function that calls `draw` at most once per frame. */
export function inFrames(draw) {
  let isRequested = false;
  return () => {
    if (isRequested) return;
    isRequested = true;
    requestAnimationFrame(() => {
      isRequested = false;
      draw();
    });
  };
}

function toolbar(state, { axisChanged, smoothChanged, zoom }) {
  const numberInput = (id, label) =>
    h("input", {
      type: "number",
      id,
      min: 0,
      step: 1,
      "aria-label": t(label),
      placeholder: t(`${label}.none`),
      on: { change: apply },
    });
  const fromInput = numberInput("from-step", "zoom.from");
  const toInput = numberInput("to-step", "zoom.to");
  const fullRunButton = h(
    "button",
    {
      type: "button",
      class: "quiet",
      id: "full-run",
      on: {
        click: () => {
          fromInput.value = toInput.value = "";
          zoom(null, null);
          fromInput.focus();
        },
      },
    },
    t("zoom.full_run"),
  );
  function apply() {
    zoom(numberOf(fromInput.value), numberOf(toInput.value));
  }
  const node = h(
    "div",
    { class: "toolbar" },
    axisChoice(state.x, axisChanged),
    smoothField(state.weight, smoothChanged),
    h("div", { class: "field end" }, t("zoom.steps"), fromInput, "–", toInput, fullRunButton),
  );
  return {
    node,
    renew() {
      for (const [input, value] of [
        [fromInput, state.start],
        [toInput, state.end],
      ])
        if (document.activeElement !== input) input.value = value ?? "";
      fullRunButton.hidden = state.start === null && state.end === null;
    },
  };
}

function marksCard(marks) {
  if (!marks.length)
    return card(t("marks.title"), null, h("p", { class: "muted" }, t("marks.none")));
  const columns = [
    { label: t("marks.time") },
    { label: t("marks.step"), number: true },
    { label: t("marks.what") },
    { label: t("marks.text") },
  ];
  const order = (mark) => ({ error: 0, warning: 0, info: 1 })[mark.level] ?? 1;
  const rows = [...marks]
    .reverse()
    .sort((a, b) => (marks.length > MARKS_SHOWN ? order(a) - order(b) : 0))
    .slice(0, MARKS_SHOWN)
    .map((mark) =>
      row(
        [
          h("span", { title: format.time(mark.time) }, format.clock(mark.time)),
          format.count(mark.step),
          h(
            "span",
            { class: `mark-${mark.level} nowrap` },
            icon(markIcon(mark)),
            " ",
            t(`mark.${mark.type}`),
          ),
          h("span", { class: "wrap" }, mark.text),
        ],
        [{}, columns[1], {}, {}],
      ),
    );
  return h(
    "section",
    { class: "card flush" },
    h(
      "div",
      { class: "card-head" },
      h("h2", {}, t("marks.title")),
      marks.length > MARKS_SHOWN
        ? h(
            "span",
            { class: "muted small" },
            t("marks.shown", { shown: MARKS_SHOWN, n: marks.length }),
          )
        : null,
    ),
    table(t("marks.title"), columns, rows),
  );
}

// Events of the start, and events that other tabs show, have no mark.
const isShown = ({ type, level }) =>
  !["run_start", "memory", "sample", "eval", "data"].includes(type) &&
  !(type === "notice" && level === "info");

const markIcon = ({ type, level }) =>
  type === "resume"
    ? "restart"
    : type === "checkpoint" && level === "info"
      ? "checkpoint"
      : level === "error" || level === "warning"
        ? "fault"
        : "notice";
