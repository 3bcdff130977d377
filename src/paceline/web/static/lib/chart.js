// Line charts drawn with uPlot: theme colors, dashed lines, event marks, and zoom by mouse or
// keyboard.

import uPlot from "../vendor/uPlot.esm.js";
import { h, newId, put, svg } from "./dom.js";
import { color, onTheme } from "./theme.js";
import { t } from "./i18n.js";
import { bytes, digits, duration } from "./format.js";
import { BYTE_TICKS, TIME_TICKS, logRange, logTicks, paddedRange, positive } from "./scale.js";

export const COLORS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"];
export const DASHES = [
  [],
  [7, 4],
  [2, 3],
  [10, 3, 2, 3],
  [14, 4],
  [4, 2, 1, 2],
  [1, 4],
  [8, 2, 2, 2, 2, 2],
];
const MARK_LEVEL = { error: "--bad", warning: "--warn", info: "--line-strong" };

/**
 * Return a line chart: `{node, set(data, marks), series(), canvas(), end()}`. `data` is as in
 * uPlot: [x, y1, y2, …]; `marks`: [{x, level, type, text}].
 *
 * - `name`: the title.
 * - `height`: the height of the plot, in px.
 * - `x`: `{name, format(value)}`.
 * - `y`: `{format(value), min, log}`. On a logarithmic axis, values up to 0 are gaps.
 * - `series`: [{name, color: "--s1", dash: [..], width, faint, points, format}]. `band: [i, j]`
 *   fills the area between two series. A series with `isHidden` is in neither the legend nor the
 *   tooltip.
 * - `zoomed(min, max)`: called when the user selects a range of x; null, null for the full range.
 * - `sync`: charts with the same key share a cursor.
 * - `hasLegend`: false if the page has a legend for several charts.
 */
export function lineChart({
  name,
  height = 190,
  x,
  y = {},
  series,
  zoomed,
  sync,
  hasLegend = true,
}) {
  const plot = h("div", { class: "plot" });
  const legend = h("ul", { class: "legend", "aria-hidden": "true" });
  const tip = h("div", { class: "chart-tip", hidden: true, "aria-hidden": "true" });
  const hintId = newId("hint");
  const feedback = h("div", { class: "sr", role: "status", "aria-live": "polite" });
  const frame = h(
    "div",
    {
      class: "chart",
      role: "application",
      tabindex: 0,
      "aria-roledescription": t("chart.role"),
      "aria-describedby": hintId,
    },
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
  // Values of x, not indices: points can be added or replaced while the user selects a range.
  let keyboardCursor = null;
  let rangeStart = null;

  function build() {
    const width = plot.clientWidth || 320;
    chart?.destroy();
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = {
      stroke: color("--ink-2"),
      font,
      grid: { stroke: color("--line"), width: 1 },
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
          y: {
            distr: y.log ? 3 : 1,
            range: (_, low, high) =>
              y.log ? logRange(low, high) : paddedRange(low, high, y.min),
          },
        },
        axes: [
          {
            ...axis,
            size: 24,
            space: 70,
            incrs: x.incrs,
            values: (_, ticks) => ticks.map((tick) => (x.format ?? digits)(tick)),
          },
          {
            ...axis,
            size: (_, labels) =>
              16 + 7 * Math.max(3, ...(labels ?? []).map((label) => String(label ?? "").length)),
            space: 34,
            ...(y.log
              ? {
                  splits: (_, axisIndex, low, high) => logTicks(low, high, y.format === bytes),
                  filter: (_, all) => all,
                }
              : {}),
            incrs: y.format === bytes ? BYTE_TICKS : y.format === duration ? TIME_TICKS : undefined,
            values: (_, ticks) =>
              ticks.map((tick) => (tick === null ? null : (y.format ?? digits)(tick))),
          },
        ],
        series: [
          {},
          ...series.map((line) => ({
            stroke: color(line.color),
            width: line.width ?? 1.75,
            dash: line.dash?.length ? line.dash : undefined,
            alpha: line.faint ? 0.38 : 1,
            points: line.points
              ? { show: true, size: 7, fill: color("--card"), width: 2 }
              : { show: (_, lineIndex) => data[lineIndex].length < 3 },
            spanGaps: true,
          })),
        ],
        bands: series.flatMap((line) =>
          line.band ? [{ series: line.band, fill: translucent(color(line.color), 0.14) }] : [],
        ),
        hooks: {
          setSelect: [
            (plotted) => {
              const { left, width: selectedWidth } = plotted.select;
              if (selectedWidth > 4)
                zoomed?.(plotted.posToVal(left, "x"), plotted.posToVal(left + selectedWidth, "x"));
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
    chart.over.addEventListener("mousemove", () => (keyboardCursor = null));
  }

  function showTip(plotted) {
    const index = plotted.cursor.idx;
    const isActive = document.activeElement === frame || plot.matches(":hover");
    tip.hidden = index === null || index === undefined || !isActive;
    if (tip.hidden) return;
    const marksAtCursor = nearMarks(plotted);
    put(
      tip,
      h("div", { class: "chart-tip-x" }, `${x.name} ${(x.format ?? digits)(data[0][index])}`),
      series.map((line, lineIndex) =>
        line.isHidden ||
        data[lineIndex + 1][index] === null ||
        data[lineIndex + 1][index] === undefined
          ? null
          : h(
              "div",
              {},
              key(line),
              h("span", { class: "chart-tip-name" }, line.name),
              h("b", {}, (line.format ?? y.format ?? digits)(data[lineIndex + 1][index])),
            ),
      ),
      marksAtCursor.map((mark) =>
        h("div", { class: `chart-tip-mark mark-${mark.level}` }, mark.text),
      ),
    );
    const left = plotted.cursor.left + plotted.over.offsetLeft;
    const isInRightHalf = left > frame.clientWidth / 2;
    tip.style.left = isInRightHalf ? "auto" : `${left + 14}px`;
    tip.style.right = isInRightHalf ? `${frame.clientWidth - left + 14}px` : "auto";
  }

  const nearMarks = (plotted) =>
    marks
      .filter((mark) => Math.abs(plotted.valToPos(mark.x, "x") - plotted.cursor.left) < 6)
      .slice(0, 3);

  // A mark is a vertical line with a shape on the axis: a triangle for a problem, a square for a
  // restart, otherwise a dash.
  function drawMarks(plotted) {
    const { ctx, bbox } = plotted;
    const unit = devicePixelRatio || 1;
    ctx.save();
    for (const mark of marks) {
      const x = Math.round(plotted.valToPos(mark.x, "x", true));
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      const bottom = bbox.top + bbox.height;
      ctx.strokeStyle = ctx.fillStyle = colorOf(mark);
      if (mark.level !== "info" || mark.type === "resume") {
        ctx.globalAlpha = 0.55;
        ctx.setLineDash(mark.type === "resume" ? [4 * unit, 3 * unit] : []);
        ctx.lineWidth = unit;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bottom);
        ctx.stroke();
        ctx.globalAlpha = 1;
      }
      const size = 4 * unit;
      ctx.beginPath();
      if (mark.level === "error" || mark.level === "warning") {
        ctx.moveTo(x, bottom - 2 * size);
        ctx.lineTo(x + size, bottom);
        ctx.lineTo(x - size, bottom);
      } else if (mark.type === "resume")
        ctx.rect(x - size * 0.8, bottom - size * 1.6, size * 1.6, size * 1.6);
      else ctx.rect(x - unit, bottom - size * 1.5, 2 * unit, size * 1.5);
      ctx.fill();
    }
    ctx.restore();
  }

  const cache = new Map();
  const colorOf = ({ level }) => {
    const property = MARK_LEVEL[level] ?? MARK_LEVEL.info;
    if (!cache.has(property)) cache.set(property, color(property));
    return cache.get(property);
  };

  function onKey(event) {
    const last = data[0].length - 1;
    if (!chart || last < 0) return;
    let index = keyboardCursor === null ? (chart.cursor.idx ?? last) : indexOf(keyboardCursor);
    const hasModifier = event.ctrlKey || event.altKey || event.metaKey;
    if (event.key === "ArrowLeft" && !hasModifier)
      index = Math.max(0, index - (event.shiftKey ? Math.ceil(last / 20) : 1));
    else if (event.key === "ArrowRight" && !hasModifier)
      index = Math.min(last, index + (event.shiftKey ? Math.ceil(last / 20) : 1));
    else if (event.key === "Home") index = 0;
    else if (event.key === "End") index = last;
    else if (event.key === "Enter" && zoomed) return void chooseRange(event, index);
    else if (event.key === "Escape") {
      keyboardCursor = rangeStart = null;
      chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      zoomed?.(null, null);
      return;
    } else return;
    event.preventDefault();
    keyboardCursor = data[0][index];
    showKeyboardCursor();
    put(
      feedback,
      `${x.name} ${(x.format ?? digits)(data[0][index])}: ` +
      series
        .map((line, lineIndex) =>
          line.isHidden || !Number.isFinite(data[lineIndex + 1][index])
            ? null
            : `${line.name} ${(line.format ?? y.format ?? digits)(data[lineIndex + 1][index])}`,
        )
        .filter(Boolean)
        .join(", "),
    );
  }

  /** The index of the point that is nearest to `value`. */
  const indexOf = (value) =>
    data[0].reduce(
      (best, at, index) => (Math.abs(at - value) < Math.abs(data[0][best] - value) ? index : best),
      0,
    );

  function showKeyboardCursor() {
    const index = indexOf(keyboardCursor);
    const first = series.findIndex(
      (line, lineIndex) => !line.isHidden && Number.isFinite(data[lineIndex + 1][index]),
    );
    chart.setCursor({
      left: chart.valToPos(data[0][index], "x"),
      top: chart.valToPos(data[first + 1]?.[index] ?? 0, "y"),
    });
    if (rangeStart !== null) markRange(data[0][index]);
  }

  function chooseRange(event, index) {
    event.preventDefault();
    const at = data[0][index];
    if (rangeStart === null) {
      rangeStart = at;
      put(feedback, t("chart.from", { at: (x.format ?? digits)(at) }));
      return;
    }
    const [low, high] = [Math.min(rangeStart, at), Math.max(rangeStart, at)];
    keyboardCursor = rangeStart = null;
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (high > low) zoomed(low, high);
  }

  function markRange(end) {
    const [startX, endX] = [chart.valToPos(rangeStart, "x"), chart.valToPos(end, "x")];
    chart.setSelect(
      {
        left: Math.min(startX, endX),
        width: Math.abs(endX - startX),
        top: 0,
        height: chart.over.clientHeight,
      },
      false,
    );
  }

  function drawLegend() {
    const visibleSeries = hasLegend ? series.filter((line) => !line.isHidden) : [];
    put(
      legend,
      visibleSeries.length > 1 || visibleSeries[0]?.alwaysInLegend
        ? visibleSeries.map((line) => h("li", {}, key(line), line.name))
        : [],
    );
  }

  frame.addEventListener("keydown", onKey);
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
      data = y.log ? [next[0], ...next.slice(1).map(positive)] : next;
      marks = nextMarks;
      frame.setAttribute("aria-label", summary(name, x, y, series, data));
      if (chart) chart.setData(data);
      else if (plot.isConnected) build();
      if (chart && keyboardCursor !== null && data[0].length) showKeyboardCursor();
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

/** Return the legend sample of a line. */
export function key({ color: property, dash = [], points, faint, width = 1.75 }) {
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
      ? svg("circle", {
          cx: 11,
          cy: 4,
          r: 3,
          style: { fill: "var(--card)", stroke: `var(${property})`, "stroke-width": 2 },
        })
      : null,
  );
}

function summary(name, x, y, series, data) {
  const shownIndex = series.findIndex(
    (line, lineIndex) => !line.isHidden && data[lineIndex + 1]?.some(Number.isFinite),
  );
  if (shownIndex < 0) return t("chart.empty", { name });
  const values = data[shownIndex + 1].filter(Number.isFinite);
  const format = series[shownIndex].format ?? y.format ?? digits;
  return t("chart.summary", {
    name,
    line: series[shownIndex].name,
    last: format(values.at(-1)),
    low: format(values.reduce((a, b) => Math.min(a, b))),
    high: format(values.reduce((a, b) => Math.max(a, b))),
    x: x.name,
  });
}

function translucent(rgb, alpha) {
  return rgb.startsWith("rgb(") ? rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`) : rgb;
}
