// The room «convolution».
import { element } from "./dom.js";

export function open(root) {
  root.append(element("p", { text: "…" }));
}
