// Light and dark theme: the system's, or the one selected on the page.

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

/** Call `watcher()` after the colors have changed, so that canvases are redrawn. */
export function onTheme(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

/** Return the color of a custom property such as `--accent` for a canvas. */
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
