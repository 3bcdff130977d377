// The dialog that converts a config of another tool.

import { post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { errorState, icon } from "../lib/ui.js";
import { openModal } from "./start_choose.js";
import { renderCode } from "./start_field.js";

/** Return the button that opens the dialog. */
export function pasteButton(state) {
  const button = h(
    "button",
    { type: "button", id: "paste", class: "quiet", on: { click: () => open(state, button) } },
    icon("copy"),
    t("paste.open"),
  );
  return button;
}

function open(state, button) {
  const text = h("textarea", {
    id: "pasted",
    class: "mono",
    rows: 12,
    spellcheck: "false",
    "aria-label": t("paste.text"),
  });
  const feedback = h("div", { class: "paste-feedback", "aria-live": "polite" });
  const convert = h(
    "button",
    { type: "button", class: "main", id: "convert", on: { click: () => run() } },
    t("paste.convert"),
  );
  openModal(
    button,
    t("paste.title"),
    [h("p", { class: "muted small" }, renderCode(t("paste.is"))), text, convert, feedback],
    t("paste.close"),
  );
  text.focus();

  async function run() {
    convert.disabled = true;
    try {
      const { yaml, notices } = await post("api/convert", { yaml: text.value });
      state.setYaml(yaml, "preset");
      put(
        feedback,
        h("p", { class: "good" }, icon("done"), t("paste.done")),
        noticeList(notices),
      );
    } catch (error) {
      put(feedback, errorState(error));
    } finally {
      convert.disabled = false;
    }
  }
}

/** Return the list of the notices of a config; null if there are none. */
export function noticeList(notices) {
  if (!notices.length) return null;
  return h(
    "ul",
    { class: "notices" },
    notices.map(({ level, text }) =>
      h(
        "li",
        { class: level === "warning" ? "warn" : null },
        icon(level === "warning" ? "warning" : "notice"),
        h("span", {}, renderCode(text)),
      ),
    ),
  );
}
