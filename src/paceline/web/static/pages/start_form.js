// The form: a field for each config key, generated from the schema. It shows the values of the YAML
// text.

import { h } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { helpOf, makeField, renderCode } from "./start_field.js";

/**
 * Return the form for the response of `api/schema`: `{node, slot}`. `slot` is a node at the end of
 * the essential fields.
 *
 * `folder`: where relative paths start. `actions`: buttons beside the inputs of some keys.
 */
export function makeForm({ fields, groups }, state, { folder, actions }) {
  const controls = new Map();
  const slot = h("div", {});
  const makeControl = (key) => {
    const field = makeField(fields[key], state, actions[key]);
    controls.set(key, field);
    return field.node;
  };
  const section = (group) =>
    h(
      "fieldset",
      { class: "card fields", data: { group: group.name } },
      h("legend", {}, h("h2", {}, t(`group.${group.name}`))),
      h("p", { class: "muted small" }, renderCode(t(`group.${group.name}.is`, { folder }))),
      h("div", { class: "field-grid" }, group.keys.map(makeControl)),
      slot,
    );
  const collapsed = (group) => {
    const count = h("span", { class: "tag", hidden: true });
    const node = h(
      "details",
      { class: "more-group", data: { group: group.name } },
      h(
        "summary",
        {},
        t(`group.${group.name}`),
        count,
        h("span", { class: "muted small" }, renderCode(helpOf(group))),
      ),
      h("div", { class: "field-grid" }, group.keys.map(makeControl)),
    );
    return { node, count, keys: group.keys };
  };
  const essential = groups.filter((group) => group.essential).map(section);
  const others = groups.filter((group) => !group.essential).map(collapsed);
  const search = makeSearch(others.map((group) => group.node));

  state.on("checked", (result) => {
    const errors = new Map(
      result.errors.filter((error) => error.key).map((error) => [error.key, error]),
    );
    for (const [key, control] of controls) control.set(result.values[key], errors.get(key));
    for (const { node, count, keys } of others) {
      const setCount = keys.filter((key) => key in result.values).length;
      count.hidden = setCount === 0;
      count.textContent = t("start.set", { n: setCount });
      if (keys.some((key) => errors.has(key))) node.open = true;
    }
  });
  const node = h(
    "div",
    { class: "stack" },
    essential,
    h(
      "section",
      { class: "card more" },
      h("div", { class: "card-head" }, h("h2", {}, t("start.more")), search.input),
      others.map((group) => group.node),
      search.noneNote,
    ),
  );
  return { node, slot };
}

/** Return the input that searches the collapsed groups, and the note that nothing matches. */
function makeSearch(groups) {
  const noneNote = h("p", { class: "muted", hidden: true }, t("start.filter.none"));
  const input = h("input", {
    type: "search",
    id: "filter",
    placeholder: t("start.filter.hint"),
    "aria-label": t("start.filter"),
    on: { input: search },
  });
  function search() {
    const searchText = input.value.trim().toLowerCase();
    for (const group of groups) {
      let shownCount = 0;
      for (const field of group.querySelectorAll("[data-key]")) {
        const matches =
          !searchText ||
          field.textContent.toLowerCase().includes(searchText) ||
          field.dataset.key.includes(searchText);
        field.hidden = !matches;
        shownCount += matches;
      }
      group.hidden = shownCount === 0;
      group.open = Boolean(searchText) && shownCount > 0;
    }
    noneNote.hidden = groups.some((group) => !group.hidden);
  }
  return { input, noneNote };
}
