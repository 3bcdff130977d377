// Download a comparison as CSV or as a picture.

import { colour } from "../../lib/theme.js";

/** All raw curves in long form: a line for each run and point. */
export function curvesCsv(runs, names, answers) {
  const series = Object.keys(answers.values().next().value.series);
  const lines = [["run", "step", "tokens", "time_s", ...series].join(",")];
  runs.forEach((run, nth) => {
    const answer = answers.get(run.id);
    const started = run.started_at ?? answer.time[0] ?? 0;
    answer.step.forEach((step, at) =>
      lines.push(
        [
          cell(names[nth]),
          step,
          answer.tokens[at] ?? "",
          (answer.time[at] - started).toFixed(3),
          ...series.map((name) => answer.series[name].mean[at] ?? ""),
        ].join(","),
      ),
    );
  });
  return `${lines.join("\n")}\n`;
}

// A spreadsheet would interpret a cell that begins like this as a formula.
function cell(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** The chart with its title and legend, as a Blob. */
export function chartPng(chart, title, xName) {
  const from = chart.canvas();
  if (!from) return null;
  const unit = devicePixelRatio || 1;
  const series = chart.series().filter((one) => !one.quiet);
  const line = 20 * unit;
  const canvas = document.createElement("canvas");
  canvas.width = from.width + 24 * unit;
  canvas.height = from.height + (54 + 20 * series.length) * unit;
  const c = canvas.getContext("2d");
  const family = getComputedStyle(document.body).fontFamily;
  c.fillStyle = colour("--card");
  c.fillRect(0, 0, canvas.width, canvas.height);
  c.fillStyle = colour("--ink");
  c.font = `600 ${15 * unit}px ${family}`;
  c.fillText(title, 12 * unit, 24 * unit);
  c.font = `${12 * unit}px ${family}`;
  series.forEach((one, at) => {
    const y = 44 * unit + at * line;
    c.strokeStyle = colour(one.colour);
    c.lineWidth = 2 * unit;
    c.setLineDash((one.dash ?? []).map((part) => part * unit));
    c.beginPath();
    c.moveTo(12 * unit, y - 4 * unit);
    c.lineTo(40 * unit, y - 4 * unit);
    c.stroke();
    c.setLineDash([]);
    c.fillText(one.name, 48 * unit, y);
  });
  c.drawImage(from, 12 * unit, 40 * unit + series.length * line);
  c.fillStyle = colour("--ink-2");
  c.textAlign = "right";
  c.fillText(xName, canvas.width - 12 * unit, canvas.height - 4 * unit);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
