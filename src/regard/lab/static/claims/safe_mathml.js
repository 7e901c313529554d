// Typeset text from the lab. It is parsed apart from the page, and only MathML elements, indices and powers are copied,
// so that text from a file can never bring scripts or styles into the page.
const MATH = "http://www.w3.org/1998/Math/MathML";
const HTML = "http://www.w3.org/1999/xhtml";
const HTML_ELEMENTS = new Set(["span", "sub", "sup"]);
const MATH_ATTRIBUTES = new Set([
  "accent", "accentunder", "columnalign", "columnspacing", "display", "displaystyle", "fence", "form", "height", "largeop",
  "linethickness", "lspace", "mathvariant", "maxsize", "minsize", "movablelimits", "rowspacing", "rspace", "scriptlevel",
  "separator", "stretchy", "symmetric", "width",
]);

function safeCopy(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  if (node.nodeType !== Node.ELEMENT_NODE) return "";
  const isMath = node.namespaceURI === MATH;
  const isText = node.namespaceURI === HTML && HTML_ELEMENTS.has(node.localName);
  if (!isMath && !isText) return "";
  const copy = document.createElementNS(isMath ? MATH : HTML, node.localName);
  for (const { name, value } of node.attributes) {
    const allowed = isMath ? MATH_ATTRIBUTES.has(name) : name === "class";
    if (allowed) copy.setAttribute(name, value);
  }
  copy.append(...[...node.childNodes].map(safeCopy));
  return copy;
}

export function typeset(text) {
  return [...new DOMParser().parseFromString(text, "text/html").body.childNodes].map(safeCopy);
}
