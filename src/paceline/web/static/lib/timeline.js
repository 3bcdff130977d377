// A timeline with one row per rank: the phases of each step as stacked bars, each phase with its
// own pattern.

import { color, onTheme } from "./theme.js";
import { h, put } from "./dom.js";
import { t } from "./i18n.js";
import { count, duration, percent } from "./format.js";

export const PHASES = [
  { name: "data", color: "--s3", pattern: "dots" },
  { name: "forward", color: "--s1", pattern: "solid" },
  { name: "backward", color: "--s4", pattern: "rising" },
  { name: "communication", color: "--s2", pattern: "cross" },
  { name: "optimizer", color: "--s8", pattern: "level" },
  { name: "other", color: "--line-strong", pattern: "empty" },
];
const GUTTER = 52;
const FOOT = 24;

/**
 * Return the fill of a phase: a pattern that is distinguishable without its color. `unit`: device
 * pixels per CSS pixel.
 */
function patternOf(context, { color: property, pattern }, unit, card) {
  const ink = color(property);
  const size = 6 * unit;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const ctx = tile.getContext("2d");
  ctx.fillStyle = card;
  ctx.fillRect(0, 0, size, size);
  ctx.fillStyle = ctx.strokeStyle = ink;
  ctx.globalAlpha = { solid: 1, empty: 0.12 }[pattern] ?? 0.45;
  ctx.fillRect(0, 0, size, size);
  ctx.globalAlpha = 1;
  ctx.lineWidth = 1.4 * unit;
  const line = (...points) => {
    ctx.beginPath();
    points.forEach(([x, y], index) => ctx[index ? "lineTo" : "moveTo"](x * size, y * size));
    ctx.stroke();
  };
  if (pattern === "rising" || pattern === "cross")
    for (const offset of [-1, 0, 1]) line([offset, 1], [offset + 1, 0]);
  if (pattern === "cross") for (const offset of [-1, 0, 1]) line([offset, 0], [offset + 1, 1]);
  if (pattern === "level") line([0, 0.5], [1, 0.5]);
  if (pattern === "dots") {
    ctx.beginPath();
    ctx.arc(size / 2, size / 2, 1.3 * unit, 0, 7);
    ctx.fill();
  }
  return context.createPattern(tile, "repeat");
}

/** Return a legend swatch with the pattern of a phase. */
function swatch(phase) {
  const unit = devicePixelRatio || 1;
  const canvas = h("canvas", {
    class: "swatch",
    width: 22 * unit,
    height: 12 * unit,
    "aria-hidden": "true",
  });
  const draw = () => {
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = patternOf(ctx, phase, unit, color("--card"));
    ctx.fillRect(0, 0, canvas.width, canvas.height);
  };
  draw();
  return { canvas, draw };
}

/**
 * Return a timeline: `{node, set, end}`. `set(times, asShares)` draws the response of
 * `api/runs/ID/ranks`, with each step as 100 % (`asShares`) or in seconds. Arrow keys move between
 * steps and ranks.
 */
export function timeline() {
  const canvas = h("canvas", {
    class: "timeline",
    tabindex: 0,
    role: "application",
    "aria-roledescription": t("timeline.role"),
  });
  const tip = h("div", { class: "chart-tip", hidden: true, "aria-hidden": "true" });
  // An element above the canvas, so that the canvas is not redrawn.
  const mark = h("div", { class: "timeline-mark", hidden: true });
  const feedback = h("div", { class: "sr", role: "status", "aria-live": "polite" });
  const swatches = PHASES.map((phase) => ({ phase, ...swatch(phase) }));
  const legend = h(
    "ul",
    { class: "legend" },
    swatches.map(({ phase, canvas: swatchCanvas }) =>
      h("li", {}, swatchCanvas, t(`phase.${phase.name}`)),
    ),
  );
  const node = h(
    "div",
    { class: "chart-wrap" },
    legend,
    h("div", { class: "chart" }, canvas, mark, tip),
    feedback,
  );
  let times = null;
  let asShares = true;
  let selected = null; // {step: index, rank: index}

  const rowHeight = () => {
    const n = times.ranks.length;
    return n <= 4 ? 56 : n <= 8 ? 40 : n <= 16 ? 26 : n <= 32 ? 18 : n <= 64 ? 13 : 8;
  };
  const phasesOf = (rank, index) =>
    PHASES.map(({ name }) => Math.max(0, rank[`${name}_s`]?.[index] ?? 0));
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  function draw() {
    if (!times || !canvas.isConnected) return;
    const unit = devicePixelRatio || 1;
    const height = rowHeight();
    const width = canvas.parentNode.clientWidth;
    canvas.style.height = `${height * times.ranks.length + FOOT}px`;
    canvas.width = width * unit;
    canvas.height = (height * times.ranks.length + FOOT) * unit;
    const ctx = canvas.getContext("2d");
    const card = color("--card");
    const fills = PHASES.map((phase) => patternOf(ctx, phase, unit, card));
    const paths = PHASES.map(() => new Path2D());
    const ink = color("--ink-2");
    const n = times.step.length;
    const columnWidth = ((width - GUTTER) * unit) / Math.max(1, n);
    const gap = columnWidth > 8 * unit ? unit : 0;
    const maxBarHeight = Math.max(2, height - (height > 20 ? 6 : 2)) * unit;
    const longest_s = asShares
      ? null
      : Math.max(
          ...times.ranks.flatMap((rank) =>
            times.step.map((_, index) => sum(phasesOf(rank, index))),
          ),
          1e-9,
        );
    ctx.font = `${Math.min(12, Math.max(9, height - 2)) * unit}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textBaseline = "middle";
    times.ranks.forEach((rank, row) => {
      const bottom = (row + 1) * height * unit - unit;
      if (height >= 12 || row % 4 === 0) {
        const isSlowest = times.slowest?.rank === rank.rank;
        ctx.fillStyle = isSlowest ? color("--warn") : ink;
        if (isSlowest)
          ctx.fillRect(GUTTER * unit - 6 * unit, bottom - maxBarHeight, 3 * unit, maxBarHeight);
        ctx.fillText(
          `${height > 20 ? t("timeline.rank") + " " : ""}${rank.rank}`,
          0,
          bottom - maxBarHeight / 2,
        );
      }
      for (let index = 0; index < n; index++) {
        const values = phasesOf(rank, index);
        const scale = maxBarHeight / (longest_s ?? (sum(values) || 1));
        const left = Math.round(GUTTER * unit + index * columnWidth);
        const barWidth = Math.max(
          1,
          Math.round(GUTTER * unit + (index + 1) * columnWidth) - left - gap,
        );
        let top = bottom;
        values.forEach((value, phase) => {
          const barHeight = value * scale;
          if (barHeight <= 0) return;
          top -= barHeight;
          paths[phase].rect(left, top, barWidth, barHeight);
        });
      }
    });
    paths.forEach((path, phase) => {
      ctx.fillStyle = fills[phase];
      ctx.fill(path);
    });
    drawAxis(ctx, unit, n, columnWidth, height, ink);
  }

  function drawAxis(ctx, unit, n, columnWidth, height, ink) {
    ctx.fillStyle = ink;
    ctx.font = `${12 * unit}px ${getComputedStyle(document.body).fontFamily}`;
    const labelInterval = Math.max(1, Math.ceil((80 * unit) / columnWidth));
    const y = (height * times.ranks.length + FOOT / 2 + 2) * unit;
    for (let index = 0; index < n; index += labelInterval) {
      const x = GUTTER * unit + index * columnWidth;
      if (x + 50 * unit < canvas.width) ctx.fillText(count(times.step[index]), x, y);
    }
    ctx.textAlign = "right";
    ctx.fillText(t("x.step"), canvas.width, y);
    ctx.textAlign = "left";
  }

  function describe() {
    const rank = times.ranks[selected.rank];
    const values = phasesOf(rank, selected.step);
    const step_s = sum(values) || 1;
    const title = t("timeline.at", {
      rank: rank.rank,
      step: count(times.step[selected.step]),
      all: duration(sum(values)),
    });
    return {
      title,
      parts: PHASES.map((phase, index) => [
        phase,
        duration(values[index]),
        percent(values[index] / step_s),
      ]),
    };
  }

  function showTooltip(announces) {
    tip.hidden = mark.hidden = !selected;
    if (!selected) return;
    const { title, parts } = describe();
    put(
      tip,
      h("div", { class: "chart-tip-x" }, title),
      parts.map(([phase, value, part]) =>
        h(
          "div",
          {},
          h("span", { class: "chart-tip-name" }, t(`phase.${phase.name}`)),
          h("b", {}, value),
          ` ${part}`,
        ),
      ),
    );
    const width = canvas.clientWidth;
    const left = GUTTER + ((selected.step + 0.5) * (width - GUTTER)) / times.step.length;
    const top = (selected.rank + 1) * rowHeight() + 4;
    const columnWidth = (width - GUTTER) / times.step.length;
    mark.style.left = `${GUTTER + selected.step * columnWidth - 1}px`;
    mark.style.top = `${selected.rank * rowHeight()}px`;
    mark.style.width = `${Math.max(3, columnWidth)}px`;
    mark.style.height = `${rowHeight()}px`;
    tip.style.left = left > width / 2 ? "auto" : `${left + 12}px`;
    tip.style.right = left > width / 2 ? `${width - left + 12}px` : "auto";
    tip.style.top = `${top}px`;
    if (announces)
      put(
        feedback,
        `${title} ${parts.map(([phase, value]) => `${t(`phase.${phase.name}`)} ${value}`).join(", ")}`,
      );
  }

  canvas.addEventListener("mousemove", (event) => {
    if (!times) return;
    const { left, top, width } = canvas.getBoundingClientRect();
    const step = Math.floor(
      ((event.clientX - left - GUTTER) / (width - GUTTER)) * times.step.length,
    );
    const rank = Math.floor((event.clientY - top) / rowHeight());
    selected =
      step >= 0 && step < times.step.length && rank >= 0 && rank < times.ranks.length
        ? { step, rank }
        : null;
    showTooltip(false);
  });
  const clearSelection = () => {
    selected = null;
    tip.hidden = mark.hidden = true;
  };
  canvas.addEventListener(
    "mouseleave",
    () => document.activeElement !== canvas && clearSelection(),
  );
  canvas.addEventListener("blur", clearSelection);
  canvas.addEventListener("keydown", (event) => {
    const move =
      { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move || !times?.step.length || event.altKey || event.ctrlKey) return;
    event.preventDefault();
    const last = { step: times.step.length - 1, rank: times.ranks.length - 1 };
    selected ??= { step: last.step - move[0], rank: -move[1] };
    selected = {
      step: Math.max(0, Math.min(last.step, selected.step + move[0])),
      rank: Math.max(0, Math.min(last.rank, selected.rank + move[1])),
    };
    showTooltip(true);
  });

  const offTheme = onTheme(() => {
    swatches.forEach((swatch) => swatch.draw());
    draw();
  });
  const sizing = new ResizeObserver(draw);
  sizing.observe(node);
  return {
    node,
    set(newTimes, newAsShares) {
      times = newTimes;
      asShares = newAsShares;
      if (selected && (selected.step >= times.step.length || selected.rank >= times.ranks.length))
        clearSelection();
      canvas.setAttribute(
        "aria-label",
        t("timeline.label", { n: times.ranks.length, steps: times.step.length }),
      );
      draw();
    },
    end() {
      offTheme();
      sizing.disconnect();
    },
  };
}
