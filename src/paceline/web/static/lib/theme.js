// The theme: light or dark, as selected by the user or by the system.

const KEY = "paceline-theme";
const watchers = new Set();
const system = matchMedia("(prefers-color-scheme: dark)");
export const THEMES = ["system", "light", "dark"];

export const getTheme = () =>
  THEMES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "system";

export const isDark = () => (getTheme() === "system" ? system.matches : getTheme() === "dark");

export function setTheme(name) {
  localStorage.setItem(KEY, name);
  apply();
}

/**
 * Call `watcher()` after each change of colors, so that canvases are redrawn. Return a function
 * that unsubscribes.
 */
export function onTheme(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

/** Return the value of a color property, such as `--accent`, for drawing on a canvas. */
export function color(name) {
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
