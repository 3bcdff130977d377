// The sources of a run's data and the fill rate of its packed rows, as of the newest logged step.

import { h } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { card, row, table, termOf } from "../../lib/ui.js";

/**
 * Return a card, or null for a run with one source and without packed rows.
 *
 * - `start`: the shares of the sources at the start.
 * - `newest`: the figures of the sources in the newest `step` event.
 * - `fill`: the share of the capacity of packed rows that has tokens.
 */
export function sourcesCard({ start, newest, fill }) {
  const sources = newest ?? start ?? [];
  const hasFill = Number.isFinite(fill);
  if (sources.length === 0 && !hasFill) return null;
  const columns = [
    { label: t("sources.name") },
    ...["share", "loss", "samples", "tokens"].map((name) => ({
      label: termOf(`sources.${name}`),
      number: true,
    })),
  ];
  const rows = sources.map((source, number) =>
    row(
      [
        source.name,
        format.percent(start?.[number]?.share),
        newest ? format.loss(source.loss) : format.NONE,
        format.count(source.samples),
        format.count(source.tokens),
      ],
      columns,
    ),
  );
  return card(
    termOf("sources"),
    hasFill
      ? h("span", { class: "muted small" }, t("sources.fill", { fill: format.percent(fill) }))
      : null,
    rows.length ? table(t("sources"), columns, rows, { id: "sources" }) : null,
  );
}
