// Export of a comparison as CSV or PNG.

import { color } from "../../lib/theme.js";

/** Return all curves, without smoothing, as CSV with one line per run and point. */
export function curvesCsv(runs, names, answers) {
  const series = Object.keys(answers.values().next().value.series);
  const lines = [["run", "step", "tokens", "time_s", ...series].join(",")];
  runs.forEach((run, runIndex) => {
    const runSeries = answers.get(run.id);
    const started = run.started_at ?? runSeries.time[0] ?? 0;
    runSeries.step.forEach((step, index) =>
      lines.push(
        [
          cell(names[runIndex]),
          step,
          runSeries.tokens[index] ?? "",
          (runSeries.time[index] - started).toFixed(3),
          ...series.map((name) => runSeries.series[name].mean[index] ?? ""),
        ].join(","),
      ),
    );
  });
  return `${lines.join("\n")}\n`;
}

// A spreadsheet would interpret a cell that begins with one of these characters as a formula.
function cell(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Return the chart with its title and legend as a PNG Blob, or null if it is not drawn. */
export function chartPng(chart, title, xName) {
  const source = chart.canvas();
  if (!source) return null;
  const unit = devicePixelRatio || 1;
  const series = chart.series().filter((line) => !line.isHidden);
  const lineHeight = 20 * unit;
  const canvas = document.createElement("canvas");
  canvas.width = source.width + 24 * unit;
  canvas.height = source.height + (54 + 20 * series.length) * unit;
  const ctx = canvas.getContext("2d");
  const family = getComputedStyle(document.body).fontFamily;
  ctx.fillStyle = color("--card");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = color("--ink");
  ctx.font = `600 ${15 * unit}px ${family}`;
  ctx.fillText(title, 12 * unit, 24 * unit);
  ctx.font = `${12 * unit}px ${family}`;
  series.forEach((line, index) => {
    const y = 44 * unit + index * lineHeight;
    ctx.strokeStyle = color(line.color);
    ctx.lineWidth = 2 * unit;
    ctx.setLineDash((line.dash ?? []).map((part) => part * unit));
    ctx.beginPath();
    ctx.moveTo(12 * unit, y - 4 * unit);
    ctx.lineTo(40 * unit, y - 4 * unit);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.fillText(line.name, 48 * unit, y);
  });
  ctx.drawImage(source, 12 * unit, 40 * unit + series.length * lineHeight);
  ctx.fillStyle = color("--ink-2");
  ctx.textAlign = "right";
  ctx.fillText(xName, canvas.width - 12 * unit, canvas.height - 4 * unit);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
