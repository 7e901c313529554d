// Light or dark: the system's choice, until a person makes another.
const system = matchMedia("(prefers-color-scheme: dark)");
const watchers = new Set();
let chosen = localStorage.getItem("theme");

export function isDark() {
  return chosen ? chosen === "dark" : system.matches;
}

export function themeName() {
  return isDark() ? "light" : "dark";
}

// Rooms redraw their canvases and charts.
export function onTheme(call) {
  watchers.add(call);
  return () => watchers.delete(call);
}

export function toggleTheme() {
  chosen = isDark() ? "light" : "dark";
  localStorage.setItem("theme", chosen);
  apply();
  return themeName();
}

function apply() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const call of watchers) call();
}

system.addEventListener("change", apply);
apply();
