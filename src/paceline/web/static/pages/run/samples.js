// Samples that the model generated at each evaluation.

import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { emptyState } from "../../lib/ui.js";

export async function show(root, store) {
  let at = null; // the evaluation that is shown: null is the newest
  function draw() {
    const all = store.run.samples ?? [];
    if (!all.length) return void put(root, emptyState(t("missing", { what: t("missing.samples") }), t("samples.none")));
    const focused = document.activeElement?.id;
    const index = at ?? all.length - 1;
    const one = all[index];
    const select = h(
      "select",
      {
        id: "sample-step",
        on: {
          change: (event) => {
            at = Number(event.target.value) === all.length - 1 ? null : Number(event.target.value);
            draw();
          },
        },
      },
      all.map((sample, nth) =>
        h("option", { value: nth, prop: { selected: nth === index } }, t("run.at_step", { step: format.count(sample.step) })),
      ),
    );
    const button = (id, to, text) =>
      h(
        "button",
        {
          type: "button",
          id,
          prop: { disabled: to < 0 || to >= all.length },
          on: {
            click: () => {
              at = to === all.length - 1 ? null : to;
              draw();
            },
          },
        },
        text,
      );
    put(
      root,
      h(
        "div",
        { class: "toolbar" },
        h("label", { class: "field" }, t("samples.of"), select),
        button("sample-before", index - 1, t("samples.before")),
        button("sample-after", index + 1, t("samples.after")),
      ),
      h(
        "div",
        { class: "stack" },
        (one.samples ?? []).map((sample, nth) =>
          h(
            "section",
            { class: "card sample", "aria-label": t("samples.nth", { nth: nth + 1 }) },
            part("samples.prompt", sample.prompt),
            part("samples.text", sample.text, "sample-text"),
            sample.reference ? part("samples.reference", sample.reference) : null,
          ),
        ),
      ),
    );
    if (focused && focused.startsWith("sample-")) document.getElementById(focused)?.focus();
    return undefined;
  }
  draw();
  return store.on("change", () => (at === null ? draw() : null));
}

const part = (key, text, more = "") => [
  h("h3", { class: "muted" }, t(key)),
  h("p", { class: `sample-part ${more}` }, text || t("samples.empty")),
];
