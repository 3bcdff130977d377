// The config changes of a resumed run, and whether they must be allowed.

import { post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { card, icon } from "../lib/ui.js";
import { spelt } from "./start_form.js";

/** `changed()`, `ready()` and `allowed()` are for the Resume button; `onChange` is called when they may have changed. */
export function changesCard(state, id) {
  const body = h("div", { "aria-live": "polite" }, h("p", { class: "muted" }, t("loading")));
  const box = h("input", { type: "checkbox", id: "allow", on: { change: () => one.onChange() } });
  let changes = null;
  let of = null;
  const one = {
    node: card(t("changes.title"), null, body), onChange: () => {},
    changed: () => Boolean(changes?.length),
    ready: () => of === state.yaml && (!needs() || box.checked),
    allowed: () => needs() && box.checked,
  };
  const needs = () => Boolean(changes?.some((change) => change.needs_allow));

  state.on("checked", async (found) => {
    if (!found.ok) return;
    const yaml = state.yaml;
    try {
      const answer = await post(`api/runs/${id}/diff`, { yaml });
      if (yaml !== state.yaml || state.ended) return;
      changes = answer.changes;
      of = yaml;
      draw();
    } catch (error) {
      changes = null;
      of = null;
      put(body, h("p", { class: "bad" }, icon("failed"), String(error.what)), error.fix ? h("p", { class: "small" }, t("error.fix", { fix: error.fix })) : null);
    }
    one.onChange();
  });

  function draw() {
    if (!changes.length) return void put(body, h("p", { class: "muted", id: "no-changes" }, t("changes.none")));
    if (!needs()) box.checked = false;
    put(body,
      h("div", { class: "table-wrap", tabindex: 0, role: "region", "aria-label": t("changes.title") }, h("table", { id: "changes" },
        h("thead", {}, h("tr", {}, [t("changes.key"), t("changes.old"), t("changes.new")].map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, changes.map((change) => h("tr", {},
          h("th", { scope: "row" }, h("code", {}, change.key), change.needs_allow ? h("div", { class: "small warn" }, icon("warning"), t("changes.needs")) : null),
          h("td", {}, h("del", {}, spelt(change.old))), h("td", {}, h("ins", {}, spelt(change.new)))))))),
      needs() ? h("p", {}, h("label", { class: "check" }, box, t("changes.allow"))) : null);
    return undefined;
  }
  return one;
}
