// Dialogs that ask before something changes.

import { h, newId } from "./dom.js";
import { t } from "./i18n.js";
import { errorState } from "./ui.js";

/**
 * Show a dialog, and return whether the user chose its action.
 *
 * - `title`: the question.
 * - `content`: nodes below it, such as fields.
 * - `action`: the text of the button; `isDanger` if it deletes something.
 * - `name`: the id of the button is NAME-yes.
 * - `confirm()`: carries out the action. If it throws, the dialog stays open and shows the error.
 */
export async function ask({ title, content, action, isDanger = false, name = "dialog", confirm }) {
  const titleId = newId("dialog");
  const previousFocus = document.activeElement;
  const feedback = h("div", { "aria-live": "polite" });
  const yes = h(
    "button",
    { value: "yes", class: isDanger ? "danger" : "main", id: `${name}-yes` },
    action,
  );
  const form = h(
    "form",
    { method: "dialog" },
    content,
    feedback,
    h(
      "div",
      { class: "toolbar dialog-buttons" },
      h("button", { type: "button", on: { click: () => dialog.close("no") } }, t("cancel")),
      yes,
    ),
  );
  const dialog = h(
    "dialog",
    { class: "dialog", "aria-labelledby": titleId },
    h("h2", { id: titleId }, title),
    form,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (yes.disabled) return;
    yes.disabled = true;
    try {
      await confirm?.();
      dialog.close("yes");
    } catch (error) {
      feedback.replaceChildren(errorState(error));
    }
    yes.disabled = false;
  });
  document.body.append(dialog);
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  dialog.remove();
  if (previousFocus?.isConnected) previousFocus.focus();
  return dialog.returnValue === "yes";
}
