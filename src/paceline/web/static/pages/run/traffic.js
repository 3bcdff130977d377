// Traffic: bytes of each collective per step, predicted and measured.

import { get } from "../../lib/api.js";
import { bars, difference } from "../../lib/bars.js";
import { COLOURS, DASHES, lineChart } from "../../lib/chart.js";
import { axis } from "../../lib/axis.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { numbers } from "../../lib/smooth.js";
import { card, figure, figures, row, table, termOf } from "../../lib/ui.js";
import { notRecorded } from "./missing.js";

export async function show(root, store) {
  let chart = null;
  let shownNames = "";
  async function draw() {
    const answer = await get(`api/runs/${store.id}/traffic`);
    const names = Object.keys(answer.by_collective ?? {}).filter((name) => answer.by_collective[name].some((one) => one > 0));
    if (!names.length && answer.predicted_bytes === null && answer.measured_bytes === null)
      return void put(root, notRecorded("missing.traffic", store.run));
    const totals = card(
      termOf("traffic.step"),
      h("span", { class: "muted small" }, difference(answer.predicted_bytes, answer.measured_bytes)),
      comparison(answer),
      answer.bound ? h("p", { class: "muted small" }, t("traffic.bound")) : null,
    );
    const series = names.map((name, at) => ({
      name,
      colour: COLOURS[at % COLOURS.length],
      dash: DASHES[at % DASHES.length],
      always: true,
    }));
    if (names.join() !== shownNames) {
      chart?.end();
      shownNames = names.join();
      chart = names.length
        ? lineChart({ name: t("traffic.over"), height: 240, x: axis("step"), y: { format: format.bytes, min: 0 }, series })
        : null;
    }
    put(
      root,
      summary(answer),
      totals,
      chart
        ? card(termOf("traffic.over"), h("span", { class: "muted small" }, t("traffic.unit")), chart.node)
        : card(t("traffic.over"), null, h("p", { class: "muted" }, t("traffic.no_collectives"))),
      names.length ? collectives(answer, names) : null,
    );
    chart?.set([answer.step, ...names.map((name) => numbers(answer.by_collective[name]))]);
    return undefined;
  }
  await draw();
  const timer = setInterval(() => store.run.status === "live" && !document.hidden && draw().catch(() => {}), 5000);
  const off = store.on("again", () => draw().catch(() => {}));
  return () => {
    clearInterval(timer);
    off();
    chart?.end();
  };
}

function summary({ predicted_bytes, measured_bytes, compression }) {
  return figures(
    figure("traffic.measured", format.bytes(measured_bytes), t("traffic.unit")),
    figure("traffic.predicted", format.bytes(predicted_bytes), t("traffic.unit")),
    figure(
      "traffic.compression",
      compression?.ratio ? `${format.digits(compression.ratio)} ×` : t("none"),
      compression?.method && compression.method !== "none" ? compression.method : t("traffic.plain"),
    ),
  );
}

const comparison = ({ predicted_bytes, measured_bytes }) =>
  bars([
    {
      name: t("predicted"),
      parts: [{ name: t("predicted"), value: predicted_bytes, kind: 6, text: format.bytes(predicted_bytes) }],
      text: format.bytes(predicted_bytes),
    },
    {
      name: t("measured"),
      parts: [{ name: t("measured"), value: measured_bytes, kind: 1, text: format.bytes(measured_bytes) }],
      text: format.bytes(measured_bytes),
    },
  ]);

function collectives(answer, names) {
  const heads = [
    { head: t("traffic.collective") },
    { head: t("traffic.mean"), number: true },
    { head: t("traffic.share"), number: true },
    { head: t("traffic.what") },
  ];
  const means = names.map((name) => {
    const known = answer.by_collective[name].filter(Number.isFinite);
    return known.reduce((one, two) => one + two, 0) / Math.max(1, known.length);
  });
  const all = means.reduce((one, two) => one + two, 0) || 1;
  const what = (name) => {
    const text = t(`collective.${name.replaceAll("-", "_")}`);
    return text.startsWith("collective.") ? "" : text;
  };
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t("traffic.table"))),
    table(
      t("traffic.table"),
      heads,
      names.map((name, at) =>
        row([h("code", {}, name), format.bytes(means[at]), format.percent(means[at] / all), what(name)], heads),
      ),
    ),
  );
}
