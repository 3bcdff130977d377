// Notes and tags of runs. The server stores them in FOLDER/.paceline-ui.json, outside of the run
// folders.

import { hasToken, put as send } from "../../lib/api.js";
import { h, put } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { icon } from "../../lib/ui.js";

const FORMS_OPEN = 6;

/** Return the card with a form for the note and the tags of each run. */
export function notesCard(runs, names, ctx) {
  const canEdit = hasToken();
  // Of many runs, the forms are closed at first, because they would be most of the page.
  return h(
    "details",
    { class: "card", open: runs.length <= FORMS_OPEN },
    h("summary", { class: "card-head" }, h("h2", {}, t("compare.notes"))),
    canEdit ? null : h("p", { class: "muted" }, t("compare.token")),
    h(
      "div",
      { class: "notes" },
      runs.map((run, index) => noteForm(run, names[index], canEdit, ctx)),
    ),
  );
}

function noteForm(run, name, canEdit, ctx) {
  const note = h("textarea", {
    rows: 1,
    "aria-label": t("compare.note", { name }),
    placeholder: t("runs.note"),
    disabled: !canEdit,
    prop: { value: run.note ?? "" },
  });
  const tags = h("input", {
    type: "text",
    "aria-label": t("compare.tags", { name }),
    placeholder: t("compare.tags.hint"),
    disabled: !canEdit,
    prop: { value: (run.tags ?? []).join(", ") },
  });
  const button = h("button", { disabled: !canEdit }, t("save"));
  const feedback = h("span", { class: "small", role: "status" });
  const form = h(
    "form",
    {},
    h("div", { class: "name" }, name),
    note,
    tags,
    h("div", {}, button, " ", feedback),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const saved = await send(`api/runs/${run.id}/note`, {
        note: note.value.trim(),
        tags: tags.value
          .split(/[,，]/)
          .map((tag) => tag.trim())
          .filter(Boolean),
      });
      Object.assign(run, { note: saved.note, tags: saved.tags });
      tags.value = run.tags.join(", ");
      put(feedback, icon("done"), " ", t("compare.saved"));
    } catch (error) {
      put(
        feedback,
        h(
          "span",
          { class: "mark-error" },
          icon("failed"),
          " ",
          error.what,
          error.fix ? ` – ${error.fix}` : "",
        ),
      );
      ctx.announce(error.what);
    }
  });
  return form;
}
