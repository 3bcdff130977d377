// The series of a run: fetched from the server and extended by new events.

import { get } from "../../lib/api.js";

export const SERIES_NAMES = [
  "loss",
  "learning_rate",
  "grad_norm",
  "tokens_per_second",
  "flops_per_device_s",
  "mfu",
  "step_time_s",
  "memory_bytes",
  "data_wait_s",
  "comm_wait_s",
  "traffic_bytes",
  "expert_load",
  "aux_loss",
  "reward",
  "completion_length",
  "entropy",
  "kl",
  "clip_ratio",
  "logprob_diff",
  "importance_ratio",
];
const POINTS = 1200;

/** Fetch `api/runs/ID/series` for a range of steps. null: no limit. */
export function fetchSeries(
  id,
  { start = null, end = null, names = SERIES_NAMES, points = POINTS } = {},
) {
  const query = new URLSearchParams({ names: names.join(","), points });
  if (start !== null) query.set("start", start);
  if (end !== null) query.set("end", end);
  return get(`api/runs/${id}/series?${query}`);
}

/**
 * Append new events to a series. Return false if it has to be fetched again, for example because a
 * step was repeated.
 */
export function appendEvents(series, events) {
  for (const event of events) {
    const last = series.step.at(-1) ?? 0;
    if (event.type === "step") {
      if (event.step < last) return false;
      if (event.step > last) addStep(series, event, last);
    } else if (event.type === "eval" && event.step > (series.evals.at(-1)?.step ?? -1))
      series.evals.push(event);
    else if (MARK_LEVELS[event.type] && event.time > (series.marks.at(-1)?.time ?? 0))
      series.marks.push(markOf(event));
  }
  return series.step.length < 2 * POINTS;
}

function addStep(series, event, last) {
  series.step.push(event.step);
  series.time.push(event.time);
  series.tokens.push((series.tokens.at(-1) ?? 0) + (event.tokens ?? 0) * (event.step - last));
  for (const [name, { mean, min, max }] of Object.entries(series.series)) {
    const value = valueOf(name, event);
    mean.push(value);
    min.push(value);
    max.push(value);
  }
}

function valueOf(name, event) {
  if (name === "tokens_per_second")
    return event.tokens && event.step_time_s ? event.tokens / event.step_time_s : null;
  if (name === "traffic_bytes")
    return event.traffic ? Object.values(event.traffic).reduce((a, b) => a + b, 0) : null;
  if (name === "expert_load") return event.experts?.max_over_mean ?? null;
  if (name === "aux_loss") return event.experts?.aux_loss ?? null;
  const value = event[name];
  return Array.isArray(value)
    ? value.reduce((max, rankValue) => Math.max(max, rankValue ?? 0), 0) || null
    : (value ?? null);
}

const MARK_LEVELS = {
  checkpoint: "info",
  resume: "info",
  fault: "error",
  memory_fallback: "warning",
  skipped: "warning",
  drift: "error",
  rollback: "warning",
  worker_lost: "error",
  hang: "error",
  hang_end: "info",
  straggler: "warning",
  straggler_end: "info",
  link: "warning",
  link_end: "info",
  balance: "info",
  run_end: "info",
};

// The server formats the texts of marks. A mark from the event stream has a preliminary text until
// the next request.
function markOf(event) {
  const text =
    event.text ??
    event.reason ??
    event.error ??
    (event.path ? String(event.path).split("/").at(-1) : event.status) ??
    event.type;
  const level = event.error || event.status === "failed" ? "error" : MARK_LEVELS[event.type];
  return { time: event.time, step: event.step ?? null, type: event.type, level, text };
}
