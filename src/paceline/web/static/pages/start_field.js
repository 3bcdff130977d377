// A field of the form: the control of a config key, with its label, description and error.

import { h, newId, put } from "../lib/dom.js";
import { getLanguage, has, t } from "../lib/i18n.js";

const EDIT_MS = 150;
const OTHER = "\u0000other"; // no key has this value

export const helpOf = (described) => (getLanguage() === "zh" ? described.help_zh : described.help);

/**
 * Return `{node, set}`: `set(entry, error)` shows the value in the text and its error. `action`: a
 * button to the right of the input.
 */
export function makeField(field, state, action = null) {
  const { key } = field;
  const id = newId("field");
  let timer = null;
  let isUnsent = false; // the user has typed a value that has not been sent yet
  const send = (value, wait_ms = 0) => {
    isUnsent = true;
    state.touch();
    clearTimeout(timer);
    timer = setTimeout(() => {
      isUnsent = false;
      const isEmpty = value === "" || value === null;
      if (isEmpty) state.edit({}, [key]);
      else state.edit({ [key]: value });
    }, wait_ms);
  };
  // An input that loses the focus reports its value again.
  send.pending = (value) => isUnsent && send(value);
  const control = makeControl(field, id, send);
  for (const input of control.inputs) {
    input.setAttribute("aria-describedby", `${id}-help ${id}-wrong`);
    input.addEventListener("focus", () => (state.editedKey = null));
    input.addEventListener("input", () => (state.editedKey = key));
  }
  const [input] = control.inputs;
  const errorNote = h("p", { class: "bad small", id: `${id}-wrong` });
  const reset = resetButton(field, () => {
    send(null);
    input.focus();
  });
  const label = fieldLabel(field, id);
  const inputRow = action ? h("div", { class: "field-row" }, input, action) : input;
  const node = h(
    "div",
    { class: `form-field kind-${field.kind}`, data: { key } },
    field.kind === "bool"
      ? h("div", { class: "field-head" }, input, label, reset)
      : [h("div", { class: "field-head" }, label, reset), inputRow, control.inputs.slice(1)],
    control.list,
    errorNote,
    helpNote(field, id),
  );

  function set(entry, error) {
    const isSet = entry !== undefined;
    reset.hidden = !isSet || field.required;
    node.classList.toggle("given", isSet);
    const isEdited = control.inputs.includes(document.activeElement) && state.editedKey === key;
    if (!isUnsent && !isEdited) control.show(isSet ? entry.value : undefined);
    for (const each of control.inputs) each.setAttribute("aria-invalid", String(Boolean(error)));
    const { what, fix } = error ? describeError(error) : {};
    put(errorNote, error ? [renderCode(what), fix ? [h("br"), renderCode(fix)] : null] : null);
  }
  return { node, set };
}

/** Return `{what, fix}` of a mistake in the language of the page, if there is a text for it. */
export function describeError(error) {
  if (error.code === "path-does-not-exist") {
    const fix = `start.missing.${error.key}`;
    return {
      what: t("start.missing", { path: error.path, folder: error.folder }),
      fix: t(has(fix) ? fix : "start.missing.other"),
    };
  }
  return { what: error.what, fix: error.fix ? t("error.fix", { fix: error.fix }) : null };
}

function fieldLabel(field, id) {
  const name = h("code", { class: "key" }, field.key.split(".").at(-1));
  const text = `label.${field.key}`;
  return h(
    "label",
    { for: id },
    has(text) ? h("span", {}, t(text), " ") : null,
    name,
    field.required ? h("span", { class: "must" }, t("start.required")) : null,
  );
}

function resetButton(field, reset) {
  return h(
    "button",
    {
      type: "button",
      class: "quiet reset",
      hidden: true,
      title: t("start.reset.is", { value: formatValue(field.default) }),
      on: { click: reset },
    },
    t("start.reset"),
    h("span", { class: "sr" }, ` ${field.key}`),
  );
}

function helpNote(field, id) {
  return h(
    "p",
    { class: "muted small", id: `${id}-help` },
    renderCode(helpOf(field)),
    field.kind === "text" || field.kind === "bool"
      ? null
      : h("span", { class: "takes" }, bounds(field)),
  );
}

// --- Controls --------------------------------------------------------------------------------------

/**
 * Return `{inputs, list, show}`: the elements that take the value, the main one first; an element
 * with proposals, or null; and a function that shows a value, or undefined for the default.
 */
function makeControl(field, id, send) {
  if (field.kind === "bool") return checkbox(field, id, send);
  if (field.suggested.length) return openSelect(field, id, send);
  if (field.kind === "choice") return select(field, id, send);
  return textInput(field, id, send);
}

function checkbox(field, id, send) {
  const input = h("input", {
    type: "checkbox",
    id,
    on: { change: () => send(input.checked) },
  });
  return {
    inputs: [input],
    list: null,
    show: (value) => (input.checked = value ?? field.default ?? false),
  };
}

function optionText(key, value) {
  const text = `option.${key}.${value}`;
  return has(text) ? t(text) : String(value);
}

const defaultOption = ({ key, default: value }) =>
  h("option", { value: "" }, t("start.default", { value: optionText(key, formatValue(value)) }));

function options(field, values) {
  return [
    defaultOption(field),
    values.map((value) => h("option", { value }, optionText(field.key, value))),
  ];
}

function select(field, id, send) {
  const input = h(
    "select",
    { id, on: { change: () => send(input.value) } },
    options(field, field.choices),
  );
  return {
    inputs: [input],
    list: null,
    show: (value) => (input.value = value === undefined ? "" : String(value)),
  };
}

/** Return a list of common values, whose last entry opens a text input for any other. */
function openSelect(field, id, send) {
  const text = h("input", {
    type: "text",
    hidden: true,
    "aria-label": t("start.other.is", { key: field.key }),
    placeholder: field.key === "task" ? "./my_task.py:MyTask" : "",
    ...TEXT_ATTRIBUTES,
    on: {
      input: () => send(text.value, EDIT_MS),
      change: () => send.pending(text.value),
    },
  });
  const input = h(
    "select",
    {
      id,
      on: {
        change: () => {
          text.hidden = input.value !== OTHER;
          if (text.hidden) return send(input.value);
          text.value = "";
          return text.focus();
        },
      },
    },
    options(field, field.suggested),
    h("option", { value: OTHER }, t("start.other")),
  );
  return {
    inputs: [input, text],
    list: null,
    show: (value) => {
      const shown = value === undefined ? "" : String(value);
      const isOther = shown !== "" && !field.suggested.includes(shown);
      if (!isOther && input.value === OTHER && document.activeElement === text) return;
      input.value = isOther ? OTHER : shown;
      text.hidden = !isOther;
      if (isOther && text.value !== shown) text.value = shown;
    },
  };
}

const TEXT_ATTRIBUTES = { spellcheck: "false", autocapitalize: "off", autocomplete: "off" };

function textInput(field, id, send) {
  const list = field.proposed.length
    ? h(
        "datalist",
        { id: `${id}-list` },
        field.proposed.map((value) => h("option", { value })),
      )
    : null;
  const input = h("input", {
    type: "text",
    id,
    ...TEXT_ATTRIBUTES,
    list: list?.id,
    required: field.required,
    inputmode: field.kind === "integer" ? "numeric" : field.kind === "number" ? "decimal" : null,
    placeholder: field.required ? "" : field.default === null ? "" : formatValue(field.default),
    on: {
      input: () => send(input.value, EDIT_MS),
      change: () => send.pending(input.value),
    },
  });
  const show = (value) => {
    if (!isSameValue(value, input.value))
      input.value = value === undefined ? "" : formatValue(value);
  };
  return { inputs: [input], list, show };
}

// The user may have written the value in another way, such as 1e-4 for 0.0001. Then the input is
// left unchanged.
const isSameValue = (value, text) =>
  value !== undefined &&
  text !== "" &&
  (formatValue(value) === text || (typeof value === "number" && Number(text) === value));

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
  return t("start.bounds", { bounds: [low, high].filter(Boolean).join(t("start.and")) });
}

/** Convert text with backticks to nodes with `code` elements. */
export function renderCode(text) {
  return String(text).split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}
