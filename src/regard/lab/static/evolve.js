// The room «evolve».
import { element } from "./dom.js";

export function open(root) {
  root.append(element("p", { text: "…" }));
}
