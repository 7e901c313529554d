// Light or dark theme: the system's choice, unless the user chooses.
import { readSetting, writeSetting } from "./browser_storage.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();
let chosen = readSetting("theme");

export function isDark() {
  return chosen ? chosen === "dark" : system.matches;
}

export function themeName() {
  return isDark() ? "light" : "dark";
}

// Pages redraw their canvases and charts when the theme changes. Returns a function that stops listening.
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function toggleTheme() {
  chosen = isDark() ? "light" : "dark";
  writeSetting("theme", chosen);
  apply();
  return themeName();
}

function apply() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const listener of listeners) listener();
}

system.addEventListener("change", apply);
apply();
