// Typeset text from the lab, parsed apart from the page: MathML's own elements, indices and powers are taken over, and
// nothing else.
const MATH = "http://www.w3.org/1998/Math/MathML";
const HTML = "http://www.w3.org/1999/xhtml";
const ELEMENTS = new Set(["span", "sub", "sup"]);
const ATTRIBUTES = new Set([
  "accent", "accentunder", "columnalign", "columnspacing", "display", "displaystyle", "fence", "form", "height", "largeop",
  "linethickness", "lspace", "mathvariant", "maxsize", "minsize", "movablelimits", "rowspacing", "rspace", "scriptlevel",
  "separator", "stretchy", "symmetric", "width",
]);

function adopted(given) {
  if (given.nodeType === Node.TEXT_NODE) return document.createTextNode(given.data);
  if (given.nodeType !== Node.ELEMENT_NODE) return "";
  const math = given.namespaceURI === MATH;
  if (!math && !(given.namespaceURI === HTML && ELEMENTS.has(given.localName))) return "";
  const made = document.createElementNS(math ? MATH : HTML, given.localName);
  for (const { name, value } of given.attributes) if (math ? ATTRIBUTES.has(name) : name === "class") made.setAttribute(name, value);
  made.append(...[...given.childNodes].map(adopted));
  return made;
}

export function typeset(text) {
  return [...new DOMParser().parseFromString(text, "text/html").body.childNodes].map(adopted);
}
