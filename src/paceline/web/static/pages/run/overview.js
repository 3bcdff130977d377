// Overview of a run: its curves and its events.

import { axis, merged, stepOf, xOf, xsOf } from "../../lib/axis.js";
import { lineChart } from "../../lib/chart.js";
import { axisChoice, smoothField } from "../../lib/controls.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { numbers, smooth } from "../../lib/smooth.js";
import { emptyState, card, icon, row, table, termOf } from "../../lib/ui.js";
import { ask, lengthen } from "./series.js";

const SMALL = [
  { name: "learning_rate", colour: "--s3", format: format.digits, min: 0 },
  { name: "grad_norm", colour: "--s4", format: format.digits, min: 0 },
  { name: "tokens_per_second", colour: "--s1", format: format.short, min: 0 },
  {
    name: "step_time_s",
    colour: "--s2",
    format: format.duration,
    min: 0,
    beside: [
      ["data_wait_s", "--s3", [2, 3]],
      ["comm_wait_s", "--s4", [7, 4]],
    ],
  },
  { name: "memory_bytes", colour: "--s8", format: format.bytes, min: 0 },
  { name: "traffic_bytes", colour: "--s5", format: format.bytes, min: 0 },
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
  const early = [];
  let turn = 0;
  const offEarly = store.on("append", (events) => early.push(...events));
  state.answer = await ask(store.id, state);
  store.bytes ??= state.answer.bytes;
  lengthen(state.answer, early);
  offEarly();

  const tools = toolbar(state, { axisChanged, smoothChanged, zoom });
  const note = h("p", { class: "muted small", id: "thinned" });
  const marks = h("div", {});
  const place = h("div", { class: "stack" });
  put(root, tools.node, place, marks);

  function layOut() {
    charts.splice(0).forEach((one) => one.chart.end());
    if (state.answer.step.length === 0 && state.answer.evals.length === 0) {
      put(
        place,
        emptyState(
          t("overview.none"),
          t(store.run.status === "live" || store.run.status === "waiting" ? "overview.none.live" : "overview.none.ended"),
        ),
      );
      return;
    }
    const zoomed = (low, high) =>
      low === null
        ? zoom(null, null)
        : zoom(Math.max(0, stepOf(low, state.answer, state.x, started())), stepOf(high, state.answer, state.x, started()));
    const x = axis(state.x);
    const loss = lineChart({
      name: t("m.loss"),
      height: 300,
      x,
      y: { format: format.digits },
      zoomed,
      sync: store.id,
      series: [
        { name: t("line.raw"), colour: "--s1", width: 1, faint: true, format: format.loss },
        { name: t("line.smooth"), colour: "--s1", width: 2.25, format: format.loss },
        { name: t("line.eval"), colour: "--s2", dash: [6, 4], points: true, width: 1.5, format: format.loss },
        { name: "min", quiet: true, colour: "--s1", width: 0, band: [5, 4] },
        { name: "max", quiet: true, colour: "--s1", width: 0 },
      ],
    });
    charts.push({ chart: loss, fill: fillLoss });
    const small = SMALL.filter((one) => has(one.name)).map((one) => {
      const series = [
        { name: t(`m.${one.name}`), colour: one.colour, width: 1.5 },
        { name: "min", quiet: true, colour: one.colour, width: 0, band: [3, 2] },
        { name: "max", quiet: true, colour: one.colour, width: 0 },
        ...(one.beside ?? []).map(([name, colour, dash]) => ({ name: t(`m.${name}`), colour, dash, width: 1.5 })),
      ];
      const chart = lineChart({
        name: t(`m.${one.name}`),
        height: 150,
        x,
        y: { format: one.format, min: one.min },
        series,
        zoomed,
        sync: store.id,
      });
      charts.push({ chart, fill: (xs) => [xs, ...lines(one.name), ...(one.beside ?? []).map(([name]) => mean(name))] });
      return card(termOf(`m.${one.name}`), h("span", { class: "muted small" }, t(`m.${one.name}.unit`)), chart.node);
    });
    put(
      place,
      h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, termOf("m.loss")), note), loss.node),
      h("div", { class: "grid" }, small),
    );
    draw();
  }

  const has = (name) => state.answer.series[name]?.mean.some((one) => one !== null);
  const mean = (name) => numbers(state.answer.series[name]?.mean ?? state.answer.step.map(() => null));
  const lines = (name) => {
    const one = state.answer.series[name];
    const many = one.mean.some((value, at) => one.max[at] > value);
    return [
      numbers(one.mean),
      many ? numbers(one.min) : one.mean.map(() => null),
      many ? numbers(one.max) : one.mean.map(() => null),
    ];
  };

  function fillLoss(xs) {
    const [raw, low, high] = lines("loss");
    const evals = state.answer.evals.filter((one) => Number.isFinite(one.loss));
    const evalXs = evals.map((one) => xOf(one, state.answer, state.x, started()));
    const all = merged(xs, evalXs);
    return [
      all.xs,
      ...[raw, smooth(raw, state.weight)].map((one) => all.place(one, xs)),
      all.place(
        evals.map((one) => one.loss),
        evalXs,
      ),
      ...[low, high].map((one) => all.place(one, xs)),
    ];
  }

  function draw() {
    const xs = xsOf(state.answer, state.x, started());
    const happened = state.answer.marks
      .filter((one) => telling(one) && (one.step !== null || state.x === "time"))
      .map((one) => ({ ...one, x: xOf(one, state.answer, state.x, started()) }));
    for (const { chart, fill } of charts) chart.set(fill(xs), happened);
    const { num_steps, step, read } = state.answer;
    put(
      note,
      num_steps > 1.5 * step.length ? t("overview.thinned", { every: format.short(Math.round(num_steps / step.length)) }) : "",
      read < 1 ? ` ${t("overview.sampled", { read: format.percent(read) })}` : "",
    );
    tools.renew();
    put(marks, marksCard(state.answer.marks.filter(telling)));
  }

  async function load() {
    const mine = ++turn;
    const answer = await ask(store.id, state).catch((error) => (ctx.announce(error.what), null));
    if (!answer || mine !== turn) return;
    const fresh =
      charts.length === 0 ||
      SMALL.some((one) => has(one.name) !== answer.series[one.name]?.mean.some((value) => value !== null));
    state.answer = answer;
    if (fresh) layOut();
    else draw();
    if (answer.read < 1) setTimeout(() => mine === turn && load(), 2000);
  }

  function axisChanged(kind) {
    state.x = kind;
    ctx.setQuery({ x: kind === "step" ? null : kind });
    layOut();
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
    ctx.announce(start === null && end === null ? t("zoom.whole") : t("zoom.range", { start: start ?? 0, end: end ?? "" }));
  }

  layOut();
  if (state.answer.read < 1) setTimeout(load, 1500);
  const drawing = inFrames(draw);
  const offs = [
    store.on("append", (events) => {
      if (state.end !== null) return;
      const before = state.answer.step.length;
      if (!lengthen(state.answer, events)) load();
      else if (before === 0 && state.answer.step.length) layOut();
      else drawing();
    }),
    store.on("again", load),
  ];
  return () => {
    turn++;
    offs.forEach((off) => off());
    charts.forEach(({ chart }) => chart.end());
  };
}

const numberOf = (text) => (text === null || text === "" || !Number.isFinite(Number(text)) ? null : Number(text));

/** Call `draw` at most once per frame. */
export function inFrames(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

function toolbar(state, { axisChanged, smoothChanged, zoom }) {
  const number = (id, label) =>
    h("input", {
      type: "number",
      id,
      min: 0,
      step: 1,
      "aria-label": t(label),
      placeholder: t(`${label}.none`),
      on: { change: apply },
    });
  const from = number("from-step", "zoom.from");
  const to = number("to-step", "zoom.to");
  const whole = h(
    "button",
    {
      type: "button",
      class: "quiet",
      id: "whole",
      on: {
        click: () => {
          from.value = to.value = "";
          zoom(null, null);
          from.focus();
        },
      },
    },
    t("zoom.whole.do"),
  );
  function apply() {
    zoom(numberOf(from.value), numberOf(to.value));
  }
  const node = h(
    "div",
    { class: "toolbar" },
    axisChoice(state.x, axisChanged),
    smoothField(state.weight, smoothChanged),
    h("div", { class: "field end" }, t("zoom.steps"), from, "–", to, whole),
  );
  return {
    node,
    renew() {
      for (const [input, value] of [
        [from, state.start],
        [to, state.end],
      ])
        if (document.activeElement !== input) input.value = value ?? "";
      whole.hidden = state.start === null && state.end === null;
    },
  };
}

function marksCard(marks) {
  if (!marks.length) return card(t("marks.title"), null, h("p", { class: "muted" }, t("marks.none")));
  const heads = [
    { head: t("marks.time") },
    { head: t("marks.step"), number: true },
    { head: t("marks.what") },
    { head: t("marks.text") },
  ];
  const order = (one) => ({ error: 0, warning: 0, info: 1 })[one.level] ?? 1;
  const rows = [...marks]
    .reverse()
    .sort((one, two) => (marks.length > MARKS_SHOWN ? order(one) - order(two) : 0))
    .slice(0, MARKS_SHOWN)
    .map((one) =>
      row(
        [
          h("span", { title: format.time(one.time) }, format.clock(one.time)),
          format.count(one.step),
          h("span", { class: `mark-${one.level} nowrap` }, icon(markIcon(one)), " ", t(`mark.${one.type}`)),
          h("span", { class: "wrap" }, one.text),
        ],
        [{}, heads[1], {}, {}],
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
        ? h("span", { class: "muted small" }, t("marks.some", { shown: MARKS_SHOWN, n: marks.length }))
        : null,
    ),
    table(t("marks.title"), heads, rows),
  );
}

// The events that get a mark: not those of the start, nor those shown elsewhere.
const telling = ({ type, level }) =>
  !["run_start", "memory", "sample", "eval"].includes(type) && !(type === "notice" && level === "info");

const markIcon = ({ type, level }) =>
  type === "resume"
    ? "restart"
    : type === "checkpoint" && level === "info"
      ? "checkpoint"
      : level === "error" || level === "warning"
        ? "fault"
        : "notice";
