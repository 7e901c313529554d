// Counts, bytes and seconds with three digits, as the command line says them.

function three(x) {
  return x < 9.995 ? x.toFixed(2) : x < 99.95 ? x.toFixed(1) : Math.round(x).toLocaleString("en");
}

export function exact(x) {
  return x === null || x === undefined ? "–" : x.toLocaleString("en", { maximumFractionDigits: 1 });
}

export function counted(x) {
  if (x === null || x === undefined) return "–";
  for (const [letter, power] of [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (x >= 0.9995 * power) return `${three(x / power)} ${letter}`;
  }
  return exact(Math.round(x));
}

export function bytes(x) {
  if (x === null || x === undefined) return "–";
  for (const [unit, power] of [["PiB", 50], ["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]]) {
    if (x >= 0.9995 * 2 ** power) return `${three(x / 2 ** power)} ${unit}`;
  }
  return `${exact(Math.round(x))} B`;
}

export function seconds(x) {
  if (x === null || x === undefined) return "–";
  for (const [unit, size, most] of [["µs", 1e-6, 0.9995e-3], ["ms", 1e-3, 0.9995], ["s", 1, 600], ["min", 60, 7200]]) {
    if (x < most) return `${three(x / size)} ${unit}`;
  }
  return `${three(x / 3600)} h`;
}

export function percent(x) {
  return x > 0 && x < 0.01 ? "< 1%" : `${Math.round(100 * x)}%`;
}
