// Counts, bytes and seconds with three digits, as the command line writes them.

const COUNT_UNITS = [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
const BYTE_UNITS = [["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
// Name, seconds, and the number of seconds from which on the next unit is used.
const TIME_UNITS = [["µs", 1e-6, 0.9995e-3], ["ms", 1e-3, 0.9995], ["s", 1, 600], ["min", 60, 7200]];

const isMissing = (value) => value === null || value === undefined;

function threeDigits(value) {
  if (value > 0 && value < 0.9995) return value.toFixed(Math.min(8, 2 - Math.floor(Math.log10(1.0005 * value))));
  if (value < 9.995) return value.toFixed(2);
  if (value < 99.95) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

export function formatExact(value) {
  return isMissing(value) ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
}

// `smallUnit` is appended to values that are smaller than all units.
function formatScaled(value, units, smallUnit) {
  if (isMissing(value)) return "–";
  for (const [unit, size] of units) {
    if (value >= 0.9995 * size) return `${threeDigits(value / size)} ${unit}`;
  }
  return formatExact(Math.round(value)) + smallUnit;
}

// Only what is not a whole number has decimals, such as a rate.
export function formatCount(value) {
  if (!isMissing(value) && value < 999.5 && !Number.isInteger(value)) return threeDigits(value);
  return formatScaled(value, COUNT_UNITS, "");
}
// The largest n that fits.
export const formatLongest = (n) => (n === 0 ? "none" : formatExact(n));

export const formatBytes = (value) => formatScaled(value, BYTE_UNITS, " B");

export function formatSeconds(value) {
  if (isMissing(value)) return "–";
  for (const [unit, size, limit] of TIME_UNITS) {
    if (value < limit) return `${threeDigits(value / size)} ${unit}`;
  }
  return `${threeDigits(value / 3600)} h`;
}

export function formatPercent(share) {
  return share > 0 && share < 0.01 ? "< 1%" : `${Math.round(100 * share)}%`;
}
