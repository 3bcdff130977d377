// The memory of each rank, predicted and measured.

import { bars, difference, fillLegend } from "../../lib/bars.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { card, row, table, termOf } from "../../lib/ui.js";
import { notRecorded } from "./missing.js";

const PARTS = ["parameters", "gradients", "optimizer", "activations"];
const known = (value) => typeof value === "number";

export async function show(root, store) {
  function draw() {
    if (root.contains(document.activeElement)) return;
    const predicted = store.run.predicted?.memory_bytes ?? null;
    const measured = (store.run.memory ?? []).map((one, at) => ({ rank: at, ...one }));
    const state = store.run.report?.state_memory_bytes;
    if (!predicted && !measured.length && !state) return void put(root, notRecorded("missing.memory", store.run));
    const rows = [];
    if (predicted) rows.push(line(t("predicted"), predicted, ""));
    for (const one of measured) rows.push(line(t("memory.rank", { rank: one.rank }), one, compared(predicted, one)));
    put(
      root,
      rows.length
        ? card(termOf("memory.split"), null, fillLegend(PARTS.map((name, at) => [at + 1, t(`memory.${name}`)])), bars(rows))
        : null,
      rows.length ? details(predicted, measured) : null,
      predicted && !measured.length ? h("p", { class: "muted" }, t("memory.not_measured")) : null,
      state ? stateCard(state) : null,
      peakCard(store.run.report?.peak_memory_bytes),
    );
    return undefined;
  }
  draw();
  const offs = [store.on("change", draw)];
  return () => offs.forEach((off) => off());
}

const totalOf = (one) => one.total ?? PARTS.reduce((sum, name) => sum + (one[name] ?? 0), 0);

// Only measured parts are compared with the prediction: activations are not known on every device.
function compared(predicted, one) {
  const parts = PARTS.filter((part) => known(one[part]));
  if (!predicted || parts.length === 0) return "";
  const sum = (of) => parts.reduce((total, part) => total + (of[part] ?? 0), 0);
  const words = difference(sum(predicted), sum(one));
  const left = PARTS.filter((part) => !known(one[part])).map((part) => t(`memory.${part}`));
  return left.length ? t("memory.without", { words, parts: left.join(", ") }) : words;
}

const line = (name, one, beside) => ({
  name,
  parts: PARTS.map((part, at) => ({
    name: t(`memory.${part}`),
    value: one[part],
    kind: at + 1,
    text: format.bytes(one[part]),
  })),
  text: [format.bytes(totalOf(one)), beside ? h("span", { class: "muted small" }, ` ${beside}`) : null],
});

function details(predicted, measured) {
  const heads = [
    { head: t("memory.of") },
    ...PARTS.map((part) => ({ head: termOf(`memory.${part}`), number: true })),
    { head: termOf("memory.total"), number: true },
  ];
  const cells = (name, one) =>
    row(
      [name, ...PARTS.map((part) => (known(one[part]) ? format.bytes(one[part]) : format.NONE)), format.bytes(totalOf(one))],
      heads,
    );
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t("memory.table"))),
    table(t("memory.table"), heads, [
      ...(predicted ? [cells(t("predicted"), predicted)] : []),
      ...measured.map((one) => cells(t("memory.rank.measured", { rank: one.rank }), one)),
    ]),
  );
}

const stateCard = ({ predicted, measured }) =>
  card(
    termOf("memory.state"),
    h("span", { class: "muted small" }, difference(predicted, measured)),
    bars([
      { name: t("predicted"), parts: [{ name: t("predicted"), value: predicted, kind: 6 }], text: format.bytes(predicted) },
      { name: t("measured"), parts: [{ name: t("measured"), value: measured, kind: 1 }], text: format.bytes(measured) },
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
