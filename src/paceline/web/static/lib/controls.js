// Controls that all pages with curves share: the x axis and the smoothing.

import { AXES } from "./axis.js";
import { h } from "./dom.js";
import { t } from "./i18n.js";
import { choice, termOf } from "./ui.js";

/** Return the control that selects the x axis: step, tokens or time. */
export const axisChoice = (value, changed) =>
  choice(
    t("x"),
    AXES.map((kind) => [kind, t(`x.${kind}`)]),
    value,
    changed,
  );

/** Return the control that selects the smoothing weight, from 0 to 0.99. */
export function smoothField(value, changed) {
  const output = h("output", { class: "number" }, value.toFixed(2));
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
        output.textContent = weight.toFixed(2);
        changed(weight);
      },
    },
  });
  return h(
    "div",
    { class: "field" },
    termOf("smooth"),
    h("label", { class: "sr", for: "smooth" }, t("smooth")),
    slider,
    output,
  );
}
