// Controls of all pages with curves: the horizontal axis and the smoothing.

import { AXES } from "./axis.js";
import { h } from "./dom.js";
import { t } from "./i18n.js";
import { choice, termOf } from "./ui.js";

/** Select step, tokens or time. */
export const axisChoice = (value, changed) =>
  choice(
    t("x"),
    AXES.map((one) => [one, t(`x.${one}`)]),
    value,
    changed,
  );

/** Select the weight of earlier steps in the smoothed line: 0 to 0.99. */
export function smoothField(value, changed) {
  const shown = h("output", { class: "number" }, value.toFixed(2));
  const slider = h("input", {
    type: "range",
    id: "smooth",
    min: 0,
    max: 0.99,
    step: 0.01,
    prop: { value },
    on: {
      input: (event) => {
        const weight = Number(event.target.value);
        shown.textContent = weight.toFixed(2);
        changed(weight);
      },
    },
  });
  return h("div", { class: "field" }, termOf("smooth"), h("label", { class: "sr", for: "smooth" }, t("smooth")), slider, shown);
}
