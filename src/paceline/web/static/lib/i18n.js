// The texts of the panel in English and Chinese.

import { en } from "../i18n/en.js";
import { zh } from "../i18n/zh.js";

const KEY = "paceline-language";
const tables = { en: { ...en }, zh: { ...zh } };
const watchers = new Set();
export const LANGUAGES = { en: "English", zh: "中文" };
let language = detectLanguage();

/** Add the texts of a module: `{en: {key: text}, zh: {key: text}}`. */
export function addTexts(texts) {
  for (const [name, table] of Object.entries(texts)) Object.assign(tables[name], table);
}

/**
 * Return the text of `key` with `{name}` replaced by `values.name`. A text "singular|plural" is
 * selected by `values.n`. A key without a text is returned unchanged, so that missing texts are
 * visible.
 */
export function t(key, values = {}) {
  let text = tables[language][key] ?? tables.en[key] ?? key;
  if (text.includes("|") && "n" in values) text = text.split("|")[Number(values.n) === 1 ? 0 : 1];
  return text.replace(/\{(\w+)\}/g, (placeholder, name) =>
    name in values ? String(values[name]) : placeholder,
  );
}

/** Return whether `key` has a text. */
export const has = (key) => key in tables.en;

export const getLanguage = () => language;

export function setLanguage(name) {
  language = name;
  localStorage.setItem(KEY, name);
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
  for (const watcher of watchers) watcher(name);
}

export function onLanguage(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function detectLanguage() {
  const stored = localStorage.getItem(KEY);
  const name =
    stored in LANGUAGES ? stored : (navigator.language ?? "").startsWith("zh") ? "zh" : "en";
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
  return name;
}
