// The export of the trained model.

import { post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { command, errorState, icon } from "../lib/ui.js";

/**
 * Return `{button, feedback}`: a button that exports the model, and a node that shows the result.
 * `text`: of the button.
 */
export function exportModel(id, text = t("export.start")) {
  const feedback = h("div", { "aria-live": "polite" });
  const button = h(
    "button",
    { type: "button", id: "export", on: { click } },
    icon("save"),
    text,
  );
  async function click() {
    button.disabled = true;
    put(feedback, h("p", { class: "muted" }, t("export.running")));
    try {
      const { path, merged } = await post(`api/runs/${id}/export`, {});
      put(
        feedback,
        h("p", { class: "good" }, icon("done"), t(merged ? "export.done" : "export.no_adapters")),
        command(path),
      );
    } catch (error) {
      put(feedback, errorState(error));
    }
    button.disabled = false;
    button.focus();
  }
  return { button, feedback };
}
