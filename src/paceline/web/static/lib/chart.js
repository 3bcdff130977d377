// Line charts with uPlot: colors of the theme, legends with dashes, marks on the axis, zoom by dragging or by keyboard.

import uPlot from "../vendor/uPlot.esm.js";
import { h, newId, put, svg } from "./dom.js";
import { colour, onTheme } from "./theme.js";
import { t } from "./i18n.js";
import { bytes, digits, duration } from "./format.js";

export const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"];
export const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 4], [4, 2, 1, 2], [1, 4], [8, 2, 2, 2, 2, 2]];
// Distances between the ticks of an axis: integers, times in units of a clock, bytes in binary units.
export const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
export const TIMES = [
  ...[-6, -5, -4, -3, -2, -1].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power)),
  1,
  2,
  5,
  10,
  15,
  30,
  60,
  120,
  300,
  600,
  900,
  1800,
  3600,
  7200,
  10800,
  21600,
  43200,
  ...[1, 2, 5, 10, 20, 50, 100].map((one) => one * 86400),
];
const BYTES = [0, 1, 2, 3, 4].flatMap((power) => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map((one) => one * 1024 ** power));
const MARK_LEVEL = { error: "--bad", warning: "--warn", info: "--line-strong" };

/**
 * A line chart.
 *
 * `name`: its title. `height`: of the plot, in px. `x`: `{name, format(value)}`. `y`: `{format(value), min, log}`.
 * `series`: [{name, colour: "--s1", dash: [..], width, faint, points, format}]; `band: [i, j]` on one fills between two of them.
 * `zoomed(min, max)`: the user selected this range of x (null, null: everything). `sync`: charts with the same key share a cursor.
 * Return `{node, set(data, marks), series(), canvas(), end()}`; `data` as in uPlot: [x, y1, y2, …];
 * `marks`: [{x, level, type, text}].
 */
export function lineChart({ name, height = 190, x, y = {}, series, zoomed, sync }) {
  const plot = h("div", { class: "plot" });
  const legend = h("ul", { class: "legend", "aria-hidden": "true" });
  const tip = h("div", { class: "chart-tip", hidden: true, "aria-hidden": "true" });
  const hintId = newId("hint");
  const feedback = h("div", { class: "sr", role: "status", "aria-live": "polite" });
  const frame = h(
    "div",
    { class: "chart", role: "application", tabindex: 0, "aria-roledescription": t("chart.role"), "aria-describedby": hintId },
    plot,
    tip,
  );
  const node = h(
    "div",
    { class: "chart-wrap" },
    legend,
    frame,
    h("span", { id: hintId, class: "sr" }, t(zoomed ? "chart.keys.zoom" : "chart.keys")),
    feedback,
  );
  let chart = null;
  let data = [[]];
  let marks = [];
  let from = null;

  function build() {
    const width = plot.clientWidth || 320;
    chart?.destroy();
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = {
      stroke: colour("--ink-2"),
      font,
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      gap: 6,
    };
    chart = new uPlot(
      {
        width,
        height,
        legend: { show: false },
        padding: [10, 18, 0, 0],
        cursor: {
          sync: sync ? { key: sync, setSeries: false } : undefined,
          drag: { x: Boolean(zoomed), y: false, setScale: false },
          points: { size: 5 },
          focus: { prox: -1 },
        },
        scales: {
          x: { time: false },
          y: { distr: y.log ? 3 : 1, range: y.log ? undefined : (_, low, high) => span(low, high, y.min) },
        },
        axes: [
          { ...axis, size: 24, space: 70, incrs: x.incrs, values: (_, ticks) => ticks.map((one) => (x.format ?? digits)(one)) },
          {
            ...axis,
            size: (_, labels) => 16 + 7 * Math.max(3, ...(labels ?? []).map((one) => String(one ?? "").length)),
            space: 34,
            incrs: y.format === bytes ? BYTES : y.format === duration ? TIMES : undefined,
            values: (_, ticks) => ticks.map((one) => (one === null ? null : (y.format ?? digits)(one))),
          },
        ],
        series: [
          {},
          ...series.map((one) => ({
            stroke: colour(one.colour),
            width: one.width ?? 1.75,
            dash: one.dash?.length ? one.dash : undefined,
            alpha: one.faint ? 0.38 : 1,
            points: one.points
              ? { show: true, size: 7, fill: colour("--card"), width: 2 }
              : { show: (_, at) => data[at].length < 3 },
            spanGaps: true,
          })),
        ],
        bands: series.flatMap((one) => (one.band ? [{ series: one.band, fill: translucent(colour(one.colour), 0.14) }] : [])),
        hooks: {
          setSelect: [
            (plotted) => {
              const { left, width: wide } = plotted.select;
              if (wide > 4) zoomed?.(plotted.posToVal(left, "x"), plotted.posToVal(left + wide, "x"));
              plotted.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            },
          ],
          setCursor: [showTip],
          draw: [drawMarks],
        },
      },
      data,
      plot,
    );
    chart.over.addEventListener("dblclick", () => zoomed?.(null, null));
  }

  function showTip(plotted) {
    const at = plotted.cursor.idx;
    const mine = document.activeElement === frame || plot.matches(":hover");
    tip.hidden = at === null || at === undefined || !mine;
    if (tip.hidden) return;
    const near = nearMarks(plotted);
    put(
      tip,
      h("div", { class: "chart-tip-x" }, `${x.name} ${(x.format ?? digits)(data[0][at])}`),
      series.map((one, index) =>
        one.quiet || data[index + 1][at] === null || data[index + 1][at] === undefined
          ? null
          : h(
              "div",
              {},
              key(one),
              h("span", { class: "chart-tip-name" }, one.name),
              h("b", {}, (one.format ?? y.format ?? digits)(data[index + 1][at])),
            ),
      ),
      near.map((one) => h("div", { class: `chart-tip-mark mark-${one.level}` }, one.text)),
    );
    const left = plotted.cursor.left + plotted.over.offsetLeft;
    const right = left > frame.clientWidth / 2;
    tip.style.left = right ? "auto" : `${left + 14}px`;
    tip.style.right = right ? `${frame.clientWidth - left + 14}px` : "auto";
  }

  const nearMarks = (plotted) =>
    marks.filter((one) => Math.abs(plotted.valToPos(one.x, "x") - plotted.cursor.left) < 6).slice(0, 3);

  // A mark is a thin vertical line with a shape on the axis: a triangle for a problem, a square for a restart, otherwise a dot.
  function drawMarks(plotted) {
    const { ctx, bbox } = plotted;
    const unit = devicePixelRatio || 1;
    ctx.save();
    for (const one of marks) {
      const at = Math.round(plotted.valToPos(one.x, "x", true));
      if (!(at >= bbox.left && at <= bbox.left + bbox.width)) continue;
      const foot = bbox.top + bbox.height;
      ctx.strokeStyle = ctx.fillStyle = colourOf(one);
      if (one.level !== "info" || one.type === "resume") {
        ctx.globalAlpha = 0.55;
        ctx.setLineDash(one.type === "resume" ? [4 * unit, 3 * unit] : []);
        ctx.lineWidth = unit;
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, foot);
        ctx.stroke();
        ctx.globalAlpha = 1;
      }
      const size = 4 * unit;
      ctx.beginPath();
      if (one.level === "error" || one.level === "warning") {
        ctx.moveTo(at, foot - 2 * size);
        ctx.lineTo(at + size, foot);
        ctx.lineTo(at - size, foot);
      } else if (one.type === "resume") ctx.rect(at - size * 0.8, foot - size * 1.6, size * 1.6, size * 1.6);
      else ctx.rect(at - unit, foot - size * 1.5, 2 * unit, size * 1.5);
      ctx.fill();
    }
    ctx.restore();
  }

  const cache = new Map();
  const colourOf = ({ level }) => {
    const property = MARK_LEVEL[level] ?? MARK_LEVEL.info;
    if (!cache.has(property)) cache.set(property, colour(property));
    return cache.get(property);
  };

  function keys(event) {
    const last = data[0].length - 1;
    if (!chart || last < 0) return;
    let at = chart.cursor.idx ?? last;
    const far = event.ctrlKey || event.altKey || event.metaKey;
    if (event.key === "ArrowLeft" && !far) at = Math.max(0, at - (event.shiftKey ? Math.ceil(last / 20) : 1));
    else if (event.key === "ArrowRight" && !far) at = Math.min(last, at + (event.shiftKey ? Math.ceil(last / 20) : 1));
    else if (event.key === "Home") at = 0;
    else if (event.key === "End") at = last;
    else if (event.key === "Enter" && zoomed) return void chooseRange(event, at);
    else if (event.key === "Escape") {
      from = null;
      chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      zoomed?.(null, null);
      return;
    } else return;
    event.preventDefault();
    const first = series.findIndex((one, index) => !one.quiet && Number.isFinite(data[index + 1][at]));
    chart.setCursor({ left: chart.valToPos(data[0][at], "x"), top: chart.valToPos(data[first + 1]?.[at] ?? 0, "y") });
    if (from !== null) markRange(at);
    put(
      feedback,
      `${x.name} ${(x.format ?? digits)(data[0][at])}: ` +
        series
          .map((one, index) =>
            one.quiet || !Number.isFinite(data[index + 1][at])
              ? null
              : `${one.name} ${(one.format ?? y.format ?? digits)(data[index + 1][at])}`,
          )
          .filter(Boolean)
          .join(", "),
    );
  }

  function chooseRange(event, at) {
    event.preventDefault();
    if (from === null) {
      from = at;
      put(feedback, t("chart.from", { at: (x.format ?? digits)(data[0][at]) }));
      return;
    }
    const [low, high] = [Math.min(from, at), Math.max(from, at)];
    from = null;
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (high > low) zoomed(data[0][low], data[0][high]);
  }

  function markRange(at) {
    const [one, two] = [chart.valToPos(data[0][from], "x"), chart.valToPos(data[0][at], "x")];
    chart.setSelect({ left: Math.min(one, two), width: Math.abs(two - one), top: 0, height: chart.over.clientHeight }, false);
  }

  function drawLegend() {
    const shown = series.filter((one) => !one.quiet);
    put(legend, shown.length > 1 || shown[0]?.always ? shown.map((one) => h("li", {}, key(one), one.name)) : []);
  }

  frame.addEventListener("keydown", keys);
  frame.addEventListener("blur", () => (tip.hidden = true));
  const offTheme = onTheme(() => {
    cache.clear();
    if (chart) build();
  });
  const sizing = new ResizeObserver(
    () =>
      chart &&
      plot.clientWidth &&
      Math.abs(chart.width - plot.clientWidth) > 1 &&
      chart.setSize({ width: plot.clientWidth, height }),
  );
  sizing.observe(plot);
  drawLegend();

  return {
    node,
    set(next, nextMarks = []) {
      data = next;
      marks = nextMarks;
      frame.setAttribute("aria-label", summary(name, x, y, series, data));
      if (chart) chart.setData(data);
      else if (plot.isConnected) build();
    },
    canvas: () => chart?.ctx.canvas ?? null,
    series: () => series,
    end() {
      offTheme();
      sizing.disconnect();
      chart?.destroy();
      chart = null;
    },
  };
}

/** The legend sample of a line. */
export function key({ colour: property, dash = [], points, faint, width = 1.75 }) {
  return svg(
    "svg",
    { class: "key", viewBox: "0 0 22 8", "aria-hidden": "true" },
    svg("line", {
      x1: 0,
      x2: 22,
      y1: 4,
      y2: 4,
      "stroke-width": Math.max(1.5, width),
      "stroke-dasharray": dash.join(" ") || null,
      style: { stroke: `var(${property})`, opacity: faint ? 0.45 : 1 },
    }),
    points
      ? svg("circle", { cx: 11, cy: 4, r: 3, style: { fill: "var(--card)", stroke: `var(${property})`, "stroke-width": 2 } })
      : null,
  );
}

function summary(name, x, y, series, data) {
  const one = series.findIndex((line, index) => !line.quiet && data[index + 1]?.some(Number.isFinite));
  if (one < 0) return t("chart.empty", { name });
  const values = data[one + 1].filter(Number.isFinite);
  const show = series[one].format ?? y.format ?? digits;
  return t("chart.summary", {
    name,
    line: series[one].name,
    last: show(values.at(-1)),
    low: show(values.reduce((a, b) => Math.min(a, b))),
    high: show(values.reduce((a, b) => Math.max(a, b))),
    x: x.name,
  });
}

function span(low, high, min) {
  if (low === null || high === null || low === undefined || high === undefined || !Number.isFinite(low)) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  const from = min === undefined ? low - room : Math.min(low, min);
  return [from, high + room];
}

function translucent(rgb, alpha) {
  return rgb.startsWith("rgb(") ? rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`) : rgb;
}
