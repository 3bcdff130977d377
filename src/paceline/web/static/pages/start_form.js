// The form: a control for each config key, generated from the schema. It shows the values of the text.

import { h, newId, put } from "../lib/dom.js";
import { getLanguage, has, t } from "../lib/i18n.js";

const EDIT_MS = 250;
const helpOf = (one) => (getLanguage() === "zh" ? one.help_zh : one.help);

/** `form`: the response of api/schema. Return its node, and `slot(group)`: a place at the end of a group. */
export function makeForm({ fields, groups }, state) {
  const controls = new Map();
  const slots = {};
  const make = (key) => {
    const one = control(fields[key], state);
    controls.set(key, one);
    return one.node;
  };
  const section = (group) => {
    slots[group.name] = h("div", {});
    return h("fieldset", { class: "card fields", data: { group: group.name } }, h("legend", {}, h("h2", {}, t(`group.${group.name}`))),
      has(`group.${group.name}.is`) ? h("p", { class: "muted small" }, t(`group.${group.name}.is`)) : null,
      h("div", { class: "field-grid" }, group.keys.map(make)), slots[group.name]);
  };
  const common = groups.filter((one) => one.common).map(section);
  const rest = groups.filter((one) => !one.common).map((group) => h("details", { class: "more-group" },
    h("summary", {}, t(`group.${group.name}`), h("span", { class: "muted small" }, coded(helpOf(group)))),
    h("div", { class: "field-grid" }, group.keys.map(make))));
  const none = h("p", { class: "muted", hidden: true }, t("start.filter.none"));
  const filter = h("input", { type: "search", id: "filter", placeholder: t("start.filter.hint"), "aria-label": t("start.filter"), on: { input: search } });
  const node = h("div", { class: "stack" }, common,
    h("section", { class: "card more" }, h("div", { class: "card-head" }, h("h2", {}, t("start.more")), filter), rest, none));

  function search() {
    const wanted = filter.value.trim().toLowerCase();
    for (const one of rest) {
      let shown = 0;
      for (const place of one.querySelectorAll("[data-key]")) {
        const fits = !wanted || place.textContent.toLowerCase().includes(wanted) || place.dataset.key.includes(wanted);
        place.hidden = !fits;
        shown += fits;
      }
      one.hidden = shown === 0;
      one.open = Boolean(wanted) && shown > 0;
    }
    none.hidden = rest.some((one) => !one.hidden);
  }

  state.on("checked", (found) => {
    const wrong = new Map(found.errors.filter((one) => one.key).map((one) => [one.key, one]));
    for (const [key, one] of controls) one.set(found.values[key], wrong.get(key));
  });
  return { node, slot: (name) => slots[name] };
}

function control(field, state) {
  const { key } = field;
  const id = newId("field");
  const helpId = `${id}-help`;
  const wrongId = `${id}-wrong`;
  let timer = null;
  let typed = false; // not sent yet
  const send = (value, wait_ms = 0) => {
    typed = true;
    clearTimeout(timer);
    timer = setTimeout(() => {
      typed = false;
      const empty = value === "" || value === null;
      if (empty) state.edit({}, [key]);
      else state.edit({ [key]: value });
    }, wait_ms);
  };
  const input = widget(field, id, send);
  input.setAttribute("aria-describedby", `${helpId} ${wrongId}`);
  const wrong = h("p", { class: "bad small", id: wrongId });
  const reset = h("button", { type: "button", class: "quiet reset", hidden: true, title: t("start.reset.is", { value: spelt(field.default) }), on: { click: () => { send(null); input.focus(); } } },
    t("start.reset"), h("span", { class: "sr" }, ` ${key}`));
  const name = key.split(".").at(-1);
  const label = h("label", { for: id }, h("code", {}, name), field.required ? h("span", { class: "must" }, t("start.must")) : null);
  const about = h("p", { class: "muted small", id: helpId }, coded(helpOf(field)), field.kind === "text" || field.kind === "bool" ? null : h("span", { class: "takes" }, ` ${bounds(field)}`));
  const node = h("div", { class: `form-field kind-${field.kind}`, data: { key } },
    field.kind === "bool" ? h("div", { class: "field-head" }, input, label, reset) : [h("div", { class: "field-head" }, label, reset), input], input.suggestions, wrong, about);

  function set(found, error) {
    const given = found !== undefined;
    reset.hidden = !given || field.required;
    node.classList.toggle("given", given);
    if (!typed && !(document.activeElement === input && state.focusTyped === key)) show(given ? found.value : undefined);
    input.setAttribute("aria-invalid", String(Boolean(error)));
    put(wrong, error ? [error.what, error.fix ? ` ${t("error.fix", { fix: error.fix })}` : ""] : "");
  }

  function show(value) {
    if (field.kind === "bool") input.checked = value ?? field.default ?? false;
    else if (input.tagName === "SELECT") input.value = value === undefined ? "" : String(value);
    else if (!same(value, input.value)) input.value = value === undefined ? "" : spelt(value);
  }

  input.addEventListener("focus", () => (state.focusTyped = null));
  input.addEventListener("input", () => (state.focusTyped = key));
  return { node, set };
}

// The input may write the same value in another way (1e-4 and 0.0001); then it is left unchanged.
const same = (value, text) => value !== undefined && text !== "" && (spelt(value) === text || (typeof value === "number" && Number(text) === value));

function widget(field, id, send) {
  if (field.kind === "bool") return h("input", { type: "checkbox", id, on: { change: (event) => send(event.target.checked) } });
  if (field.kind === "choice") {
    return h("select", { id, on: { change: (event) => send(event.target.value) } },
      h("option", { value: "" }, t("start.default", { value: spelt(field.default) })), field.choices.map((one) => h("option", { value: one }, one)));
  }
  const list = field.suggested.length ? h("datalist", { id: `${id}-list` }, field.suggested.map((one) => h("option", { value: one }))) : null;
  const input = h("input", {
    type: "text", id, spellcheck: "false", autocapitalize: "off", autocomplete: "off", list: list?.id, required: field.required,
    inputmode: field.kind === "integer" ? "numeric" : field.kind === "number" ? "decimal" : null,
    placeholder: field.required ? "" : field.default === null ? "" : spelt(field.default),
    on: { input: (event) => send(event.target.value, EDIT_MS), change: (event) => send(event.target.value) },
  });
  return list ? Object.assign(input, { suggestions: list }) : input;
}

/** A value as the user would type it. */
export function spelt(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function bounds({ minimum, maximum, exclusive, kind }) {
  if (minimum === null && maximum === null) return kind === "yaml" ? t("start.yaml_value") : "";
  const low = minimum === null ? "" : t(exclusive.includes("exclusiveMinimum") ? "start.above" : "start.least", { value: minimum });
  const high = maximum === null ? "" : t(exclusive.includes("exclusiveMaximum") ? "start.below" : "start.most", { value: maximum });
  return `(${[low, high].filter(Boolean).join(t("start.and"))})`;
}

/** Text with code between backticks. */
export function coded(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}
