// A lane for each rank on one canvas: the time breakdown of each step as stacked bars, with a pattern for each phase.

import { colour, onTheme } from "./theme.js";
import { h, put } from "./dom.js";
import { t } from "./i18n.js";
import { count, duration, percent } from "./format.js";

export const PHASES = [
  { name: "data", colour: "--s3", pattern: "dots" },
  { name: "forward", colour: "--s1", pattern: "solid" },
  { name: "backward", colour: "--s4", pattern: "rising" },
  { name: "communication", colour: "--s2", pattern: "cross" },
  { name: "optimizer", colour: "--s8", pattern: "level" },
  { name: "other", colour: "--line-strong", pattern: "empty" },
];
const GUTTER = 52;
const FOOT = 24;

/** The fill of a phase: a pattern that is distinguishable without its color. `unit`: device pixels per CSS pixel. */
function patternOf(context, { colour: property, pattern }, unit, card) {
  const ink = colour(property);
  const size = 6 * unit;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const c = tile.getContext("2d");
  c.fillStyle = card;
  c.fillRect(0, 0, size, size);
  c.fillStyle = c.strokeStyle = ink;
  c.globalAlpha = { solid: 1, empty: 0.12 }[pattern] ?? 0.45;
  c.fillRect(0, 0, size, size);
  c.globalAlpha = 1;
  c.lineWidth = 1.4 * unit;
  const line = (...points) => {
    c.beginPath();
    points.forEach(([x, y], at) => c[at ? "lineTo" : "moveTo"](x * size, y * size));
    c.stroke();
  };
  if (pattern === "rising" || pattern === "cross") for (const by of [-1, 0, 1]) line([by, 1], [by + 1, 0]);
  if (pattern === "cross") for (const by of [-1, 0, 1]) line([by, 0], [by + 1, 1]);
  if (pattern === "level") line([0, 0.5], [1, 0.5]);
  if (pattern === "dots") {
    c.beginPath();
    c.arc(size / 2, size / 2, 1.3 * unit, 0, 7);
    c.fill();
  }
  return context.createPattern(tile, "repeat");
}

/** A legend swatch with the pattern of a phase. */
function swatch(phase) {
  const unit = devicePixelRatio || 1;
  const canvas = h("canvas", { class: "swatch", width: 22 * unit, height: 12 * unit, "aria-hidden": "true" });
  const draw = () => {
    const c = canvas.getContext("2d");
    c.fillStyle = patternOf(c, phase, unit, colour("--card"));
    c.fillRect(0, 0, canvas.width, canvas.height);
  };
  draw();
  return { canvas, draw };
}

/**
 * The lanes. `set(answer, share)`: the response of `api/runs/ID/ranks`; `share`: show each step as 100 % instead of in seconds.
 * Return `{node, set, end}`. Arrow keys move between steps and ranks.
 */
export function lanes() {
  const canvas = h("canvas", { class: "lanes", tabindex: 0, role: "application", "aria-roledescription": t("lanes.role") });
  const tip = h("div", { class: "chart-tip", hidden: true, "aria-hidden": "true" });
  const mark = h("div", { class: "lane-mark", hidden: true }); // over the canvas, which is not drawn anew for it
  const feedback = h("div", { class: "sr", role: "status", "aria-live": "polite" });
  const swatches = PHASES.map((phase) => ({ phase, ...swatch(phase) }));
  const legend = h(
    "ul",
    { class: "legend" },
    swatches.map(({ phase, canvas: one }) => h("li", {}, one, t(`phase.${phase.name}`))),
  );
  const node = h("div", { class: "chart-wrap" }, legend, h("div", { class: "chart" }, canvas, mark, tip), feedback);
  let answer = null;
  let share = true;
  let at = null; // {step: index, rank: index}

  const laneHeight = () => {
    const n = answer.ranks.length;
    return n <= 4 ? 56 : n <= 8 ? 40 : n <= 16 ? 26 : n <= 32 ? 18 : n <= 64 ? 13 : 8;
  };
  const phasesOf = (rank, index) => PHASES.map(({ name }) => Math.max(0, rank[`${name}_s`]?.[index] ?? 0));
  const total = (values) => values.reduce((one, two) => one + two, 0);

  function draw() {
    if (!answer || !canvas.isConnected) return;
    const unit = devicePixelRatio || 1;
    const height = laneHeight();
    const width = canvas.parentNode.clientWidth;
    canvas.style.height = `${height * answer.ranks.length + FOOT}px`;
    canvas.width = width * unit;
    canvas.height = (height * answer.ranks.length + FOOT) * unit;
    const c = canvas.getContext("2d");
    const card = colour("--card");
    const fills = PHASES.map((phase) => patternOf(c, phase, unit, card));
    const paths = PHASES.map(() => new Path2D());
    const ink = colour("--ink-2");
    const n = answer.step.length;
    const each = ((width - GUTTER) * unit) / Math.max(1, n);
    const gap = each > 8 * unit ? unit : 0;
    const room = Math.max(2, height - (height > 20 ? 6 : 2)) * unit;
    const longest = share
      ? null
      : Math.max(...answer.ranks.flatMap((rank) => answer.step.map((_, index) => total(phasesOf(rank, index)))), 1e-9);
    c.font = `${Math.min(12, Math.max(9, height - 2)) * unit}px ${getComputedStyle(document.body).fontFamily}`;
    c.textBaseline = "middle";
    answer.ranks.forEach((rank, lane) => {
      const foot = (lane + 1) * height * unit - unit;
      if (height >= 12 || lane % 4 === 0) {
        const slow = answer.slowest?.rank === rank.rank;
        c.fillStyle = slow ? colour("--warn") : ink;
        if (slow) c.fillRect(GUTTER * unit - 6 * unit, foot - room, 3 * unit, room);
        c.fillText(`${height > 20 ? t("lanes.rank") + " " : ""}${rank.rank}`, 0, foot - room / 2);
      }
      for (let index = 0; index < n; index++) {
        const values = phasesOf(rank, index);
        const scale = room / (longest ?? (total(values) || 1));
        const left = Math.round(GUTTER * unit + index * each);
        const wide = Math.max(1, Math.round(GUTTER * unit + (index + 1) * each) - left - gap);
        let top = foot;
        values.forEach((value, phase) => {
          const tall = value * scale;
          if (tall <= 0) return;
          top -= tall;
          paths[phase].rect(left, top, wide, tall);
        });
      }
    });
    paths.forEach((path, phase) => {
      c.fillStyle = fills[phase];
      c.fill(path);
    });
    drawFoot(c, unit, n, each, height, ink);
  }

  function drawFoot(c, unit, n, each, height, ink) {
    c.fillStyle = ink;
    c.font = `${12 * unit}px ${getComputedStyle(document.body).fontFamily}`;
    const every = Math.max(1, Math.ceil((80 * unit) / each));
    const y = (height * answer.ranks.length + FOOT / 2 + 2) * unit;
    for (let index = 0; index < n; index += every) {
      const x = GUTTER * unit + index * each;
      if (x + 50 * unit < canvas.width) c.fillText(count(answer.step[index]), x, y);
    }
    c.textAlign = "right";
    c.fillText(t("x.step"), canvas.width, y);
    c.textAlign = "left";
  }

  function describe() {
    const rank = answer.ranks[at.rank];
    const values = phasesOf(rank, at.step);
    const all = total(values) || 1;
    const head = t("lanes.at", { rank: rank.rank, step: count(answer.step[at.step]), all: duration(total(values)) });
    return { head, parts: PHASES.map((phase, index) => [phase, duration(values[index]), percent(values[index] / all)]) };
  }

  function showTip(aloud) {
    tip.hidden = mark.hidden = !at;
    if (!at) return;
    const { head, parts } = describe();
    put(
      tip,
      h("div", { class: "chart-tip-x" }, head),
      parts.map(([phase, value, part]) =>
        h("div", {}, h("span", { class: "chart-tip-name" }, t(`phase.${phase.name}`)), h("b", {}, value), ` ${part}`),
      ),
    );
    const width = canvas.clientWidth;
    const left = GUTTER + ((at.step + 0.5) * (width - GUTTER)) / answer.step.length;
    const top = (at.rank + 1) * laneHeight() + 4;
    const each = (width - GUTTER) / answer.step.length;
    mark.style.left = `${GUTTER + at.step * each - 1}px`;
    mark.style.top = `${at.rank * laneHeight()}px`;
    mark.style.width = `${Math.max(3, each)}px`;
    mark.style.height = `${laneHeight()}px`;
    tip.style.left = left > width / 2 ? "auto" : `${left + 12}px`;
    tip.style.right = left > width / 2 ? `${width - left + 12}px` : "auto";
    tip.style.top = `${top}px`;
    if (aloud) put(feedback, `${head} ${parts.map(([phase, value]) => `${t(`phase.${phase.name}`)} ${value}`).join(", ")}`);
  }

  canvas.addEventListener("mousemove", (event) => {
    if (!answer) return;
    const { left, top, width } = canvas.getBoundingClientRect();
    const step = Math.floor(((event.clientX - left - GUTTER) / (width - GUTTER)) * answer.step.length);
    const rank = Math.floor((event.clientY - top) / laneHeight());
    at = step >= 0 && step < answer.step.length && rank >= 0 && rank < answer.ranks.length ? { step, rank } : null;
    showTip(false);
  });
  const leave = () => {
    at = null;
    tip.hidden = mark.hidden = true;
  };
  canvas.addEventListener("mouseleave", () => document.activeElement !== canvas && leave());
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move || !answer?.step.length || event.altKey || event.ctrlKey) return;
    event.preventDefault();
    const last = { step: answer.step.length - 1, rank: answer.ranks.length - 1 };
    at ??= { step: last.step - move[0], rank: -move[1] };
    at = {
      step: Math.max(0, Math.min(last.step, at.step + move[0])),
      rank: Math.max(0, Math.min(last.rank, at.rank + move[1])),
    };
    showTip(true);
  });

  const offTheme = onTheme(() => {
    swatches.forEach((one) => one.draw());
    draw();
  });
  const sizing = new ResizeObserver(draw);
  sizing.observe(node);
  return {
    node,
    set(next, inShares) {
      answer = next;
      share = inShares;
      if (at && (at.step >= answer.step.length || at.rank >= answer.ranks.length)) leave();
      canvas.setAttribute("aria-label", t("lanes.label", { n: answer.ranks.length, steps: answer.step.length }));
      draw();
    },
    end() {
      offTheme();
      sizing.disconnect();
    },
  };
}
