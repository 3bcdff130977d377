// Building the page. Text is always text: nothing here parses markup, so what a run calls itself cannot become an element.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. `attrs`: attributes by name; `class`; `on: {event: listener}`; `style: {"--name" or property: value}`;
 * `data: {name: value}`; `prop: {name: value}` for what is a property only. null, undefined and false leave an attribute out.
 * Children: nodes, texts, numbers, arrays of these; null and false are passed over.
 */
export function h(tag, attrs, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

/** An element of SVG; as `h`. */
export function svg(tag, attrs, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

/** Replaces what is in `node`. Returns it. */
export function put(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

/** A new id, for labels and descriptions. */
export function newId(word = "id") {
  newId.last = (newId.last ?? 0) + 1;
  return `${word}-${newId.last}`;
}

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "prop") Object.assign(node, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  return append(node, children);
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
