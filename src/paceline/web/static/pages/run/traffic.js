// The tab Traffic of a run: bytes per step, predicted and measured, by collective.

import { get } from "../../lib/api.js";
import { bars, difference } from "../../lib/bars.js";
import { COLORS, DASHES, lineChart } from "../../lib/chart.js";
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
    const traffic = await get(`api/runs/${store.id}/traffic`);
    const names = Object.keys(traffic.by_collective ?? {}).filter((name) =>
      traffic.by_collective[name].some((bytes) => bytes > 0),
    );
    if (!names.length && traffic.predicted_bytes === null && traffic.measured_bytes === null)
      return void put(root, notRecorded("missing.traffic", store.run));
    const totals = card(
      termOf("traffic.step"),
      h(
        "span",
        { class: "muted small" },
        difference(traffic.predicted_bytes, traffic.measured_bytes),
      ),
      comparison(traffic),
      traffic.bound ? h("p", { class: "muted small" }, t("traffic.bound")) : null,
    );
    const series = names.map((name, index) => ({
      name,
      color: COLORS[index % COLORS.length],
      dash: DASHES[index % DASHES.length],
      alwaysInLegend: true,
    }));
    if (names.join() !== shownNames) {
      chart?.end();
      shownNames = names.join();
      chart = names.length
        ? lineChart({
            name: t("traffic.by_collective"),
            height: 240,
            x: axis("step"),
            y: { format: format.bytes, min: 0 },
            series,
          })
        : null;
    }
    put(
      root,
      summary(traffic),
      totals,
      chart
        ? card(
            termOf("traffic.by_collective"),
            h("span", { class: "muted small" }, t("traffic.unit")),
            chart.node,
          )
        : card(
            t("traffic.by_collective"),
            null,
            h("p", { class: "muted" }, t("traffic.no_collectives")),
          ),
      names.length ? collectives(traffic, names) : null,
    );
    chart?.set([traffic.step, ...names.map((name) => numbers(traffic.by_collective[name]))]);
    return undefined;
  }
  await draw();
  const timer = setInterval(
    () => store.run.status === "live" && !document.hidden && draw().catch(() => {}),
    5000,
  );
  const unsubscribe = store.on("reload", () => draw().catch(() => {}));
  return () => {
    clearInterval(timer);
    unsubscribe();
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
      compression?.method && compression.method !== "none"
        ? compression.method
        : t("traffic.plain"),
    ),
  );
}

const comparison = ({ predicted_bytes, measured_bytes }) =>
  bars([
    {
      name: t("predicted"),
      parts: [
        {
          name: t("predicted"),
          value: predicted_bytes,
          kind: 6,
          text: format.bytes(predicted_bytes),
        },
      ],
      text: format.bytes(predicted_bytes),
    },
    {
      name: t("measured"),
      parts: [
        { name: t("measured"), value: measured_bytes, kind: 1, text: format.bytes(measured_bytes) },
      ],
      text: format.bytes(measured_bytes),
    },
  ]);

function collectives(traffic, names) {
  const columns = [
    { label: t("traffic.collective") },
    { label: t("traffic.mean"), number: true },
    { label: t("traffic.share"), number: true },
    { label: t("traffic.what") },
  ];
  const means = names.map((name) => {
    const finite = traffic.by_collective[name].filter(Number.isFinite);
    return finite.reduce((a, b) => a + b, 0) / Math.max(1, finite.length);
  });
  const total = means.reduce((a, b) => a + b, 0) || 1;
  const describe = (name) => {
    const text = t(`collective.${name.replaceAll("-", "_")}`);
    return text.startsWith("collective.") ? "" : text;
  };
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t("traffic.table"))),
    table(
      t("traffic.table"),
      columns,
      names.map((name, index) =>
        row(
          [
            h("code", {}, name),
            format.bytes(means[index]),
            format.percent(means[index] / total),
            describe(name),
          ],
          columns,
        ),
      ),
    ),
  );
}
