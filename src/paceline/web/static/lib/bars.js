// Horizontal bars for comparison, such as predicted and measured values.

import { h } from "./dom.js";
import { t } from "./i18n.js";

/**
 * Return rows of bars on a common scale. `rows`: [{name, parts: [{name, value, kind}], text}].
 * `kind`, from 1 to 6, selects a color and pattern. `text` contains the value of the row, because
 * screen readers skip the bars. `limit`: {name, value, text} of a vertical line through all bars.
 */
export function bars(rows, limit = null) {
  const longest = Math.max(
    ...rows.map(({ parts }) => parts.reduce((sum, part) => sum + (part.value ?? 0), 0)),
    limit?.value ?? 0,
    1e-12,
  );
  const share = (value) => `${(100 * value) / longest}%`;
  const line = () =>
    h("span", {
      class: "bars-limit",
      title: `${limit.name}: ${limit.text}`,
      style: { left: share(limit.value) },
    });
  return h(
    "div",
    { class: "bars", role: "list" },
    limit && limitRow(limit, share(limit.value)),
    rows.map(({ name, parts, text }) =>
      h(
        "div",
        { class: "bars-row", role: "listitem" },
        h("div", { class: "bars-name" }, name),
        h(
          "div",
          { class: "bars-track", "aria-hidden": "true" },
          h(
            "div",
            { class: "bars-bar" },
            parts.map(
              (part) =>
                part.value > 0 &&
                h("span", {
                  class: `fill fill-${part.kind}`,
                  title: `${part.name}: ${part.text ?? ""}`,
                  style: { width: share(part.value) },
                }),
            ),
          ),
          limit && line(),
        ),
        h("div", { class: "bars-text" }, text),
      ),
    ),
  );
}

/** Return the row above the bars that names the line of the limit. */
const limitRow = ({ name, text }, left) =>
  h(
    "div",
    { class: "bars-row", role: "listitem" },
    h("div", { class: "bars-name" }, name),
    h(
      "div",
      { class: "bars-track bars-scale", "aria-hidden": "true" },
      h("span", { class: "bars-limit", style: { left } }),
    ),
    h("div", { class: "bars-text" }, text),
  );

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
