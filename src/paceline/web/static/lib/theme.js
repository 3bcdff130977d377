// Light and dark: the system's choice, or the one kept from the switch.

const KEY = "paceline-theme";
const watchers = new Set();
const system = matchMedia("(prefers-color-scheme: dark)");
export const THEMES = ["system", "light", "dark"];

export const getTheme = () => (THEMES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "system");

export const isDark = () => (getTheme() === "system" ? system.matches : getTheme() === "dark");

export function setTheme(name) {
  localStorage.setItem(KEY, name);
  apply();
}

/** `watcher()` after the colours have changed: what is drawn on a canvas is drawn anew. */
export function onTheme(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

/** The colour of a custom property, as `--accent`, as a canvas understands it. */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.setProperty("color", `var(${name})`);
  document.documentElement.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function apply() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const watcher of watchers) watcher();
}

system.addEventListener("change", apply);
apply();
