// The tab Memory of a run: the memory of each rank, predicted and measured.

import { bars, difference, fillLegend } from "../../lib/bars.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { card, row, table, termOf } from "../../lib/ui.js";
import { notRecorded } from "./missing.js";

const PARTS = ["parameters", "gradients", "optimizer", "activations"];
const isKnown = (value) => typeof value === "number";

export async function show(root, store) {
  function draw() {
    if (root.contains(document.activeElement)) return;
    const predicted = store.run.predicted?.memory_bytes ?? null;
    const measured = (store.run.memory ?? []).map((memory, rank) => ({ rank: rank, ...memory }));
    const state = store.run.report?.state_memory_bytes;
    if (!predicted && !measured.length && !state)
      return void put(root, notRecorded("missing.memory", store.run));
    const rows = [];
    if (predicted) rows.push(memoryRow(t("predicted"), predicted, ""));
    for (const memory of measured)
      rows.push(
        memoryRow(t("memory.rank", { rank: memory.rank }), memory, compare(predicted, memory)),
      );
    put(
      root,
      rows.length
        ? card(
            termOf("memory.split"),
            null,
            fillLegend(PARTS.map((name, index) => [index + 1, t(`memory.${name}`)])),
            bars(rows),
          )
        : null,
      rows.length ? details(predicted, measured) : null,
      predicted && !measured.length ? h("p", { class: "muted" }, t("memory.not_measured")) : null,
      state ? stateCard(state) : null,
      peakCard(store.run.report?.peak_memory_bytes),
    );
    return undefined;
  }
  draw();
  const unsubscribers = [store.on("change", draw)];
  return () => unsubscribers.forEach((unsubscribe) => unsubscribe());
}

const totalOf = (memory) =>
  memory.total ?? PARTS.reduce((sum, name) => sum + (memory[name] ?? 0), 0);

// Only measured parts are compared, because activations cannot be measured on every device.
function compare(predicted, measured) {
  const measuredParts = PARTS.filter((part) => isKnown(measured[part]));
  if (!predicted || measuredParts.length === 0) return "";
  const sum = (memory) => measuredParts.reduce((total, part) => total + (memory[part] ?? 0), 0);
  const text = difference(sum(predicted), sum(measured));
  const missingParts = PARTS.filter((part) => !isKnown(measured[part])).map((part) =>
    t(`memory.${part}`),
  );
  return missingParts.length ? t("memory.without", { text, parts: missingParts.join(", ") }) : text;
}

const memoryRow = (name, memory, note) => ({
  name,
  parts: PARTS.map((part, index) => ({
    name: t(`memory.${part}`),
    value: memory[part],
    kind: index + 1,
    text: format.bytes(memory[part]),
  })),
  text: [
    format.bytes(totalOf(memory)),
    note ? h("span", { class: "muted small" }, ` ${note}`) : null,
  ],
});

function details(predicted, measured) {
  const columns = [
    { label: t("memory.part") },
    ...PARTS.map((part) => ({ label: termOf(`memory.${part}`), number: true })),
    { label: termOf("memory.total"), number: true },
  ];
  const cells = (name, memory) =>
    row(
      [
        name,
        ...PARTS.map((part) => (isKnown(memory[part]) ? format.bytes(memory[part]) : format.NONE)),
        format.bytes(totalOf(memory)),
      ],
      columns,
    );
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t("memory.table"))),
    table(t("memory.table"), columns, [
      ...(predicted ? [cells(t("predicted"), predicted)] : []),
      ...measured.map((memory) => cells(t("memory.rank.measured", { rank: memory.rank }), memory)),
    ]),
  );
}

const stateCard = ({ predicted, measured }) =>
  card(
    termOf("memory.state"),
    h("span", { class: "muted small" }, difference(predicted, measured)),
    bars([
      {
        name: t("predicted"),
        parts: [{ name: t("predicted"), value: predicted, kind: 6 }],
        text: format.bytes(predicted),
      },
      {
        name: t("measured"),
        parts: [{ name: t("measured"), value: measured, kind: 1 }],
        text: format.bytes(measured),
      },
    ]),
  );

function peakCard(peaks) {
  if (!peaks?.length) return null;
  return card(
    termOf("memory.peak"),
    null,
    bars(
      peaks.map((value, rank) => ({
        name: t("memory.rank", { rank }),
        parts: [{ name: "", value, kind: 1, text: format.bytes(value) }],
        text: format.bytes(value),
      })),
    ),
  );
}
