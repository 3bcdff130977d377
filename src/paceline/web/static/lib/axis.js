// The x axis of the charts: steps, tokens or time since the start.

import { count, duration, short } from "./format.js";
import { t } from "./i18n.js";
import { TIMES, WHOLE } from "./chart.js";

export const AXES = ["step", "tokens", "time"];

/** Return the axis for a chart. */
export function axis(kind) {
  return {
    name: t(`x.${kind}`),
    format: { step: count, tokens: short, time: duration }[kind],
    incrs: { step: WHOLE, tokens: WHOLE, time: TIMES }[kind],
  };
}

/** Return the x of each point of a series response. `started_at`: the zero of the time axis. */
export function xsOf(answer, kind, started_at) {
  if (kind === "step") return answer.step;
  if (kind === "tokens") return answer.tokens.map((one) => one ?? null);
  return answer.time.map((one) => one - started_at);
}

/** Return the x of an event at `{step, time}`, such as an evaluation. */
export function xOf({ step, time }, answer, kind, started_at) {
  if (kind === "step") return step;
  if (kind === "time") return time - started_at;
  return between(step, answer.step, answer.tokens);
}

/** Return the step at an x, to request a range from the server. */
export function stepOf(x, answer, kind, started_at) {
  return Math.round(kind === "step" ? x : between(x, xsOf(answer, kind, started_at), answer.step));
}

/** Linear interpolation: the value of `to` at `value` of the ascending `from`. */
function between(value, from, to) {
  let low = 0;
  let high = from.length - 1;
  if (high < 0 || value === null || value === undefined) return null;
  if (value <= from[0]) return to[0];
  if (value >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle;
    else high = middle;
  }
  const share = from[high] === from[low] ? 0 : (value - from[low]) / (from[high] - from[low]);
  return to[low] + share * (to[high] - to[low]);
}

/** Merge the x of other points (evaluations) into that of the lines: `[xs, index of each old x, index of each new x]`. */
export function merged(xs, others) {
  const all = [...new Set([...xs, ...others].filter(Number.isFinite))].sort((one, two) => one - two);
  const at = new Map(all.map((x, index) => [x, index]));
  return {
    xs: all,
    place: (values, from) => {
      const row = new Array(all.length).fill(null);
      from.forEach((x, index) => {
        if (at.has(x)) row[at.get(x)] = values[index] ?? null;
      });
      return row;
    },
  };
}
