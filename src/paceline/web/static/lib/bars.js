// Horizontal bars for comparison, such as predicted and measured values.

import { h } from "./dom.js";
import { t } from "./i18n.js";

/**
 * Return rows of bars on a common scale. `rows`: [{name, parts: [{name, value, kind}], text}].
 * `kind`, from 1 to 6, selects a color and pattern. `text` contains the value of the row, because
 * screen readers skip the bars.
 */
export function bars(rows) {
  const longest = Math.max(
    ...rows.map(({ parts }) => parts.reduce((sum, part) => sum + (part.value ?? 0), 0)),
    1e-12,
  );
  return h(
    "div",
    { class: "bars", role: "list" },
    rows.map(({ name, parts, text }) =>
      h(
        "div",
        { class: "bars-row", role: "listitem" },
        h("div", { class: "bars-name" }, name),
        h(
          "div",
          { class: "bars-bar", "aria-hidden": "true" },
          parts.map(
            (part) =>
              part.value > 0 &&
              h("span", {
                class: `fill fill-${part.kind}`,
                title: `${part.name}: ${part.text ?? ""}`,
                style: { width: `${(100 * part.value) / longest}%` },
              }),
          ),
        ),
        h("div", { class: "bars-text" }, text),
      ),
    ),
  );
}

/** Return the legend of the fills. `kinds`: [[kind, node or text]]. */
export const fillLegend = (kinds) =>
  h(
    "ul",
    { class: "legend" },
    kinds.map(([kind, text]) =>
      h("li", {}, h("span", { class: `swatch fill fill-${kind}`, "aria-hidden": "true" }), text),
    ),
  );

/**
 * Describe by how much the prediction differs from the measurement. Empty if one of them is
 * unknown.
 */
export function difference(predicted, measured) {
  if (!(predicted > 0) || !(measured > 0)) return "";
  const share = (predicted - measured) / measured;
  if (Math.abs(share) < 0.0005) return t("bars.equal");
  return t(share > 0 ? "bars.higher" : "bars.lower", {
    share: `${(Math.abs(share) * 100).toFixed(1)} %`,
  });
}
