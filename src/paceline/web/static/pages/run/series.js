// The series of a run: requested from the server, and extended by new events.

import { get } from "../../lib/api.js";

export const NAMES = [
  "loss",
  "learning_rate",
  "grad_norm",
  "tokens_per_second",
  "step_time_s",
  "memory_bytes",
  "data_wait_s",
  "comm_wait_s",
  "traffic_bytes",
];
const POINTS = 1200;

/** The response of `api/runs/ID/series` for a range of steps (null: open). */
export function ask(id, { start = null, end = null, names = NAMES, points = POINTS } = {}) {
  const query = new URLSearchParams({ names: names.join(","), points });
  if (start !== null) query.set("start", start);
  if (end !== null) query.set("end", end);
  return get(`api/runs/${id}/series?${query}`);
}

/** Append new events to a response. Return false if they do not belong at its end (a repeated step): request it again. */
export function lengthen(answer, events) {
  for (const event of events) {
    const last = answer.step.at(-1) ?? 0;
    if (event.type === "step") {
      if (event.step < last) return false;
      if (event.step > last) addStep(answer, event, last);
    } else if (event.type === "eval" && event.step > (answer.evals.at(-1)?.step ?? -1)) answer.evals.push(event);
    else if (MARKS[event.type] && event.time > (answer.marks.at(-1)?.time ?? 0)) answer.marks.push(markOf(event));
  }
  return answer.step.length < 2 * POINTS;
}

function addStep(answer, event, last) {
  answer.step.push(event.step);
  answer.time.push(event.time);
  answer.tokens.push((answer.tokens.at(-1) ?? 0) + (event.tokens ?? 0) * (event.step - last));
  for (const [name, { mean, min, max }] of Object.entries(answer.series)) {
    const value = valueOf(name, event);
    mean.push(value);
    min.push(value);
    max.push(value);
  }
}

function valueOf(name, event) {
  if (name === "tokens_per_second") return event.tokens && event.step_time_s ? event.tokens / event.step_time_s : null;
  if (name === "traffic_bytes") return event.traffic ? Object.values(event.traffic).reduce((one, two) => one + two, 0) : null;
  const value = event[name];
  return Array.isArray(value) ? value.reduce((one, two) => Math.max(one, two ?? 0), 0) || null : (value ?? null);
}

const MARKS = {
  checkpoint: "info",
  resume: "info",
  fault: "error",
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

// The server formats the text of a mark. A mark that arrives live has the text of its event until the next request.
function markOf(event) {
  const text =
    event.text ??
    event.reason ??
    event.error ??
    (event.path ? String(event.path).split("/").at(-1) : event.status) ??
    event.type;
  const level = event.error || event.status === "failed" ? "error" : MARKS[event.type];
  return { time: event.time, step: event.step ?? null, type: event.type, level, text };
}
