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
 * the panel, also after the language has changed.
 */
export function reviveTexts(_, value) {
  if (value === null || typeof value !== "object" || !("code" in value && "values" in value))
    return value;
  const english = { ...value };
  for (const part of PARTS)
    if (typeof value[part] === "string" && value[part])
      Object.defineProperty(value, part, {
        enumerable: true,
        configurable: true,
        get: () => translation(english, part),
      });
  return value;
}

function translation(english, part) {
  if (getLanguage() === "en") return english[part];
  const isKnown = templates !== null && Object.hasOwn(templates, english.code);
  const texts = isKnown ? templates[english.code][part === "text" ? "what" : part] : [];
  const values = { ...english.values };
  if (english.reason?.code)
    values.reason = translation({ ...english.reason, text: values.reason }, "text");
  const template = [texts ?? []].flat().find((text) => hasValues(text, values));
  return template === undefined
    ? t("message.english", { text: english[part] })
    : template.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

const hasValues = (template, values) =>
  [...template.matchAll(/\{(\w+)\}/g)].every(
    ([, name]) => ![undefined, null, ""].includes(values[name]),
  );
