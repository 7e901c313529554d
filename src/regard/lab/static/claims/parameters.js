// Which values of a claim's parameters are accepted. The lab checks them again; here they are refused before they are sent.
import { number } from "./words.js";

const RELATIONS = {
  "divides": [(left, right) => right % left === 0, "divide"],
  "at most": [(left, right) => left <= right, "be at most"],
  "below": [(left, right) => left < right, "be below"],
};

// Returns why `value` is not accepted for a parameter, or "".
export function outOfRange({ label, low, high, integer }, value) {
  if (!Number.isFinite(value) || value < low || value > high) {
    return `${label} must be between ${number(low)} and ${number(high)}, got ${number(value)}`;
  }
  if (integer && !Number.isInteger(value)) return `${label} must be an integer, got ${number(value)}`;
  return "";
}

// Returns the rules of a claim that its values break together, each with its reason.
export function brokenRules(claim, chosen) {
  const values = {};
  const labels = {};
  for (const { name, label, value } of claim.parameters) {
    values[name] = chosen[name] ?? value;
    labels[name] = label;
  }
  const broken = [];
  for (const { left, relation, right, factor } of claim.rules) {
    const total = factor * left.reduce((sum, name) => sum + values[name], 0);
    const [holds, words] = RELATIONS[relation];
    if (holds(total, values[right])) continue;
    const names = left.map((name) => labels[name]).join(" + ");
    const times = factor > 1 ? `${factor} × ` : "";
    const reason = `${times}${names} must ${words} ${labels[right]}, got ${number(total)} and ${number(values[right])}`;
    broken.push({ names: [...left, right], reason });
  }
  return broken;
}

// Removes from `chosen` what is not accepted, and returns the reasons.
export function removeRefused(claim, chosen) {
  const reasons = [];
  for (const parameter of claim.parameters) {
    const { name } = parameter;
    if (!(name in chosen)) continue;
    const reason = outOfRange(parameter, chosen[name]);
    if (!reason) continue;
    delete chosen[name];
    reasons.push(reason);
  }
  for (const { names, reason } of brokenRules(claim, chosen)) {
    for (const name of names) delete chosen[name];
    reasons.push(reason);
  }
  return reasons;
}
