// The x axis of the charts: steps, tokens or time since the start.

import { count, duration, short } from "./format.js";
import { t } from "./i18n.js";
import { TIME_TICKS, INTEGER_TICKS } from "./scale.js";

export const AXES = ["step", "tokens", "time"];

/** Return the x axis of a chart. */
export function axis(kind) {
  return {
    name: t(`x.${kind}`),
    format: { step: count, tokens: short, time: duration }[kind],
    incrs: { step: INTEGER_TICKS, tokens: INTEGER_TICKS, time: TIME_TICKS }[kind],
  };
}

/** Return the x value of each point of a series. `started_at`: the zero of the time axis. */
export function seriesX(series, kind, started_at) {
  if (kind === "step") return series.step;
  if (kind === "tokens") return series.tokens.map((tokens) => tokens ?? null);
  return series.time.map((time) => time - started_at);
}

/** Return the x value of an event at `{step, time}`, such as an evaluation. */
export function eventX({ step, time }, series, kind, started_at) {
  if (kind === "step") return step;
  if (kind === "time") return time - started_at;
  return interpolate(step, series.step, series.tokens);
}

/** Return the step at an x value, for requesting a range from the server. */
export function stepAt(x, series, kind, started_at) {
  return Math.round(
    kind === "step" ? x : interpolate(x, seriesX(series, kind, started_at), series.step),
  );
}

/** Interpolate linearly: return the value of `ys` at `x`. `xs` is ascending. */
function interpolate(x, xs, ys) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0 || x === null || x === undefined) return null;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const share = xs[high] === xs[low] ? 0 : (x - xs[low]) / (xs[high] - xs[low]);
  return ys[low] + share * (ys[high] - ys[low]);
}

/**
 * Merge the x values of lines with the x values of other points, such as evaluations. Return
 * `{xs, place}`; `place(values, valueXs)` aligns values with the merged `xs`, with null in gaps.
 */
export function mergeX(xs, otherXs) {
  const mergeX = [...new Set([...xs, ...otherXs].filter(Number.isFinite))].sort((a, b) => a - b);
  const indexOf = new Map(mergeX.map((x, index) => [x, index]));
  return {
    xs: mergeX,
    place: (values, valueXs) => {
      const row = new Array(mergeX.length).fill(null);
      valueXs.forEach((x, index) => {
        if (indexOf.has(x)) row[indexOf.get(x)] = values[index] ?? null;
      });
      return row;
    },
  };
}
