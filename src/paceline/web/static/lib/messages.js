// Errors, notices and events of the server in the language of the panel. The server sends them in
// English, with a code and the values that they contain; a template of another language is found by
// the code, never by the text.

import { getLanguage, t } from "./i18n.js";

const PARTS = ["what", "text", "allowed", "fix"];
let templates = null; // {code: {what, allowed, fix}} in Chinese

/** Load the templates if the language of the panel needs them. `get` requests JSON. */
export async function loadMessages(get) {
  if (getLanguage() === "en" || templates) return;
  try {
    templates = await get("api/messages/zh");
  } catch {
    // Errors are then shown in English; the connection banner tells that the server is lost.
  }
}

/**
 * A reviver for `JSON.parse`: texts of objects with `code` and `values` are read in the language of
 * the panel, also after the language has changed; and so are those that an object names in
 * `translations`: {key: {code, values}, or a list of them for a list of texts}.
 */
export function reviveTexts(_, value) {
  if (value === null || typeof value !== "object") return value;
  if ("code" in value && "values" in value)
    for (const part of PARTS)
      define(value, part, { ...value }, part === "text" ? "what" : part);
  for (const [key, of] of Object.entries(value.translations ?? {})) {
    if (!Array.isArray(of)) define(value, key, { ...of, [key]: value[key] }, "what");
    else
      for (const [index, each] of of.entries())
        define(value[key], index, { ...each, [index]: value[key][index] }, "what");
  }
  return value;
}

function define(object, key, english, part) {
  if (typeof object[key] === "string" && object[key])
    Object.defineProperty(object, key, {
      enumerable: true,
      configurable: true,
      get: () => translation(english, english[key], part),
    });
}

function translation({ code, values, reason }, text, part) {
  if (getLanguage() === "en") return text;
  const isKnown = templates !== null && Object.hasOwn(templates, code);
  const found = [isKnown ? (templates[code][part] ?? []) : []].flat();
  const filled = { ...values, ...translatedValues(values ?? {}) };
  if (reason?.code) filled.reason = translation(reason, filled.reason, "what");
  const template = found.find((each) => hasValues(each, filled));
  return template === undefined
    ? t("message.english", { text })
    : template.replace(/\{(\w+)\}/g, (_, name) => String(filled[name]));
}

/** Return the values that are texts with a code of their own: `reason`, of `reason.code`. */
function translatedValues(values) {
  const names = Object.keys(values).flatMap((key) => /^(\w+)\.code$/.exec(key)?.[1] ?? []);
  return Object.fromEntries(
    names.map((name) => {
      const own = Object.entries(values).filter(([key]) => key.startsWith(`${name}.`));
      const of = Object.fromEntries(own.map(([key, value]) => [key.slice(name.length + 1), value]));
      return [name, translation({ code: of.code, values: of }, values[name], "what")];
    }),
  );
}

const hasValues = (template, values) =>
  [...template.matchAll(/\{(\w+)\}/g)].every(
    ([, name]) => ![undefined, null, ""].includes(values[name]),
  );
