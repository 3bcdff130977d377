// Creation of elements. Nothing here parses markup, so the name of a run cannot inject an element.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Create an element.
 *
 * `attrs`: attributes by name, and `on: {event: listener}`, `style: {property: value}`, `data:
 * {name: value}` for data attributes, and `prop: {name: value}` for properties. Attributes that are
 * null, undefined or false are omitted. `children`: nodes, strings, numbers, and arrays of these;
 * null, undefined and false are ignored.
 */
export function h(tag, attrs, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

/** Create an SVG element. The arguments are as in `h`. */
export function svg(tag, attrs, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

/** Replace the children of `node` and return `node`. */
export function put(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

/** Return a new element id, for labels and descriptions. */
export function newId(prefix = "id") {
  newId.last = (newId.last ?? 0) + 1;
  return `${prefix}-${newId.last}`;
}

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style")
      for (const [key, propertyValue] of Object.entries(value))
        node.style.setProperty(key, propertyValue);
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
