// Horizontal bars for comparison, such as predicted and measured values.

import { h } from "./dom.js";
import { t } from "./i18n.js";

/**
 * Rows of bars on a common scale. `rows`: [{name, parts: [{name, value, kind}], text}]; `kind` 1 to 6 is a color with its own
 * pattern. `text` has the value of a row, which the bars only illustrate.
 */
export function bars(rows) {
  const longest = Math.max(...rows.map(({ parts }) => parts.reduce((sum, one) => sum + (one.value ?? 0), 0)), 1e-12);
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
            (one) =>
              one.value > 0 &&
              h("span", {
                class: `fill fill-${one.kind}`,
                title: `${one.name}: ${one.text ?? ""}`,
                style: { width: `${(100 * one.value) / longest}%` },
              }),
          ),
        ),
        h("div", { class: "bars-text" }, text),
      ),
    ),
  );
}

/** The legend of the fills. `kinds`: [[kind, node or text]]. */
export const fillLegend = (kinds) =>
  h(
    "ul",
    { class: "legend" },
    kinds.map(([kind, text]) => h("li", {}, h("span", { class: `swatch fill fill-${kind}`, "aria-hidden": "true" }), text)),
  );

/** Return by how much the prediction differs from the measurement; empty if one of them is unknown. */
export function difference(predicted, measured) {
  if (!(predicted > 0) || !(measured > 0)) return "";
  const share = (predicted - measured) / measured;
  if (Math.abs(share) < 0.0005) return t("bars.same");
  return t(share > 0 ? "bars.more" : "bars.less", { share: `${(Math.abs(share) * 100).toFixed(1)} %` });
}
