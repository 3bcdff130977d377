// The form: a control for each config key, generated from the schema. It shows the values of the
// YAML text.

import { h, newId, put } from "../lib/dom.js";
import { getLanguage, has, t } from "../lib/i18n.js";

const EDIT_MS = 250;
const helpOf = (described) => (getLanguage() === "zh" ? described.help_zh : described.help);

/**
 * Return the form for the response of `api/schema`: `{node, slot}`. `slot(group)` is a node at the
 * end of a group.
 */
export function makeForm({ fields, groups }, state) {
  const controls = new Map();
  const slots = {};
  const makeControl = (key) => {
    const control = makeFieldControl(fields[key], state);
    controls.set(key, control);
    return control.node;
  };
  const section = (group) => {
    slots[group.name] = h("div", {});
    return h(
      "fieldset",
      { class: "card fields", data: { group: group.name } },
      h("legend", {}, h("h2", {}, t(`group.${group.name}`))),
      has(`group.${group.name}.is`)
        ? h("p", { class: "muted small" }, t(`group.${group.name}.is`))
        : null,
      h("div", { class: "field-grid" }, group.keys.map(makeControl)),
      slots[group.name],
    );
  };
  const common = groups.filter((group) => group.common).map(section);
  const otherGroups = groups
    .filter((group) => !group.common)
    .map((group) =>
      h(
        "details",
        { class: "more-group" },
        h(
          "summary",
          {},
          t(`group.${group.name}`),
          h("span", { class: "muted small" }, renderCode(helpOf(group))),
        ),
        h("div", { class: "field-grid" }, group.keys.map(makeControl)),
      ),
    );
  const noneNote = h("p", { class: "muted", hidden: true }, t("start.filter.none"));
  const filter = h("input", {
    type: "search",
    id: "filter",
    placeholder: t("start.filter.hint"),
    "aria-label": t("start.filter"),
    on: { input: search },
  });
  const node = h(
    "div",
    { class: "stack" },
    common,
    h(
      "section",
      { class: "card more" },
      h("div", { class: "card-head" }, h("h2", {}, t("start.more")), filter),
      otherGroups,
      noneNote,
    ),
  );

  function search() {
    const searchText = filter.value.trim().toLowerCase();
    for (const group of otherGroups) {
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
    noneNote.hidden = otherGroups.some((group) => !group.hidden);
  }

  state.on("checked", (result) => {
    const errors = new Map(
      result.errors.filter((error) => error.key).map((error) => [error.key, error]),
    );
    for (const [key, control] of controls) control.set(result.values[key], errors.get(key));
  });
  return { node, slot: (name) => slots[name] };
}

function makeFieldControl(field, state) {
  const { key } = field;
  const id = newId("field");
  const helpId = `${id}-help`;
  const errorId = `${id}-wrong`;
  let timer = null;
  let isUnsent = false; // the user has typed a value that has not been sent yet
  const send = (value, wait_ms = 0) => {
    isUnsent = true;
    clearTimeout(timer);
    timer = setTimeout(() => {
      isUnsent = false;
      const isEmpty = value === "" || value === null;
      if (isEmpty) state.edit({}, [key]);
      else state.edit({ [key]: value });
    }, wait_ms);
  };
  const input = widget(field, id, send);
  input.setAttribute("aria-describedby", `${helpId} ${errorId}`);
  const errorNote = h("p", { class: "bad small", id: errorId });
  const reset = h(
    "button",
    {
      type: "button",
      class: "quiet reset",
      hidden: true,
      title: t("start.reset.is", { value: formatValue(field.default) }),
      on: {
        click: () => {
          send(null);
          input.focus();
        },
      },
    },
    t("start.reset"),
    h("span", { class: "sr" }, ` ${key}`),
  );
  const name = key.split(".").at(-1);
  const label = h(
    "label",
    { for: id },
    h("code", {}, name),
    field.required ? h("span", { class: "must" }, t("start.required")) : null,
  );
  const helpNote = h(
    "p",
    { class: "muted small", id: helpId },
    renderCode(helpOf(field)),
    field.kind === "text" || field.kind === "bool"
      ? null
      : h("span", { class: "takes" }, ` ${bounds(field)}`),
  );
  const node = h(
    "div",
    { class: `form-field kind-${field.kind}`, data: { key } },
    field.kind === "bool"
      ? h("div", { class: "field-head" }, input, label, reset)
      : [h("div", { class: "field-head" }, label, reset), input],
    input.suggestions,
    errorNote,
    helpNote,
  );

  function set(entry, error) {
    const isSet = entry !== undefined;
    reset.hidden = !isSet || field.required;
    node.classList.toggle("given", isSet);
    if (!isUnsent && !(document.activeElement === input && state.editedKey === key))
      show(isSet ? entry.value : undefined);
    input.setAttribute("aria-invalid", String(Boolean(error)));
    put(
      errorNote,
      error ? [error.what, error.fix ? ` ${t("error.fix", { fix: error.fix })}` : ""] : "",
    );
  }

  function show(value) {
    if (field.kind === "bool") input.checked = value ?? field.default ?? false;
    else if (input.tagName === "SELECT") input.value = value === undefined ? "" : String(value);
    else if (!isSameValue(value, input.value))
      input.value = value === undefined ? "" : formatValue(value);
  }

  input.addEventListener("focus", () => (state.editedKey = null));
  input.addEventListener("input", () => (state.editedKey = key));
  return { node, set };
}

// The user may have written the value in another way, such as 1e-4 for 0.0001. Then the input is
// left unchanged.
const isSameValue = (value, text) =>
  value !== undefined &&
  text !== "" &&
  (formatValue(value) === text || (typeof value === "number" && Number(text) === value));

function widget(field, id, send) {
  if (field.kind === "bool")
    return h("input", {
      type: "checkbox",
      id,
      on: { change: (event) => send(event.target.checked) },
    });
  if (field.kind === "choice") {
    return h(
      "select",
      { id, on: { change: (event) => send(event.target.value) } },
      h("option", { value: "" }, t("start.default", { value: formatValue(field.default) })),
      field.choices.map((choice) => h("option", { value: choice }, choice)),
    );
  }
  const list = field.suggested.length
    ? h(
        "datalist",
        { id: `${id}-list` },
        field.suggested.map((suggestion) => h("option", { value: suggestion })),
      )
    : null;
  const input = h("input", {
    type: "text",
    id,
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    list: list?.id,
    required: field.required,
    inputmode: field.kind === "integer" ? "numeric" : field.kind === "number" ? "decimal" : null,
    placeholder: field.required ? "" : field.default === null ? "" : formatValue(field.default),
    on: {
      input: (event) => send(event.target.value, EDIT_MS),
      change: (event) => send(event.target.value),
    },
  });
  return list ? Object.assign(input, { suggestions: list }) : input;
}

/** Format a value as the user would type it. */
export function formatValue(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function bounds({ minimum, maximum, exclusive, kind }) {
  if (minimum === null && maximum === null) return kind === "yaml" ? t("start.yaml_value") : "";
  const low =
    minimum === null
      ? ""
      : t(exclusive.includes("exclusiveMinimum") ? "start.above" : "start.at_least", {
          value: minimum,
        });
  const high =
    maximum === null
      ? ""
      : t(exclusive.includes("exclusiveMaximum") ? "start.below" : "start.at_most", {
          value: maximum,
        });
  const text = [low, high].filter(Boolean).join(t("start.and"));
  return t("start.bounds", { bounds: text });
}

/** Convert text with backticks to nodes with `code` elements. */
export function renderCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}
