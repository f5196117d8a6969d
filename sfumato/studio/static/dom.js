// Elements and texts. A text is always a text node: what a run has logged is never read as HTML.

/** An element: `h("p", {class: "note", onclick: f}, "text", child)`. Properties that start with "on" are listeners. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, item]) => element.style.setProperty(key, item));
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && name !== "list" && name !== "width" && name !== "height") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  if (properties.class) element.className = properties.class;
  append(element, children);
  return element;
}

/** An element of SVG, all properties of which are attributes. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.entries(value).forEach(([key, item]) => element.style.setProperty(key, item));
    else element.setAttribute(name, value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false || child === "") continue;
    element.append(child);
  }
}

/** Puts children in the place of what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** A number in a few characters, as the terminal shows it: 0.4321, 1.0e-3, 812.25. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size < 0.01 || size >= 1e6) return value.toExponential(1);
  return size < 10 ? value.toFixed(4) : size < 10_000 ? value.toFixed(2) : value.toFixed(0);
}

/** A change with its sign. */
export function signed(value) {
  return (value >= 0 ? "+" : "−") + number(Math.abs(value));
}

/** Seconds in a short form: 42s, 3m12s, 5h07m, 2d04h. */
export function duration(seconds) {
  const whole = Math.round(seconds);
  const two = (part) => String(Math.floor(part)).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two((whole % 3600) / 60)}m`;
  return `${Math.floor(whole / 86400)}d${two((whole % 86400) / 3600)}h`;
}

/** The label of a reward, red to green over the range of the values that are shown. */
export function chip(total, range) {
  if (total === null || total === undefined) return h("span", {class: "chip none"}, "no reward");
  const [low, high] = range;
  const part = high > low ? (total - low) / (high - low) : 0.5;
  const hue = Math.round(120 * Math.min(Math.max(part, 0), 1));
  return h("span", {class: "chip", style: {"--hue": hue}, title: String(total)}, total.toFixed(2));
}

/** The range over which rewards are coloured: 0 to 1, or that of the values where it is wider. */
export function rewardRange(totals) {
  const values = totals.filter((value) => value !== null && value !== undefined);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return !values.length || (low >= 0 && high <= 1) ? [0, 1] : [low, high];
}

/** The badge of what a run is doing. */
export function badge(state, title = "") {
  const kind = {"running": "running", "finished": "finished", "died": "died", "standing still": "still"}[state] ?? "";
  return h("span", {class: `badge ${kind}`, title}, state);
}

/** A table of texts and elements; columns whose name starts with "#" hold numbers. */
export function table(columns, rows, properties = {}) {
  const isNumber = columns.map((column) => column.startsWith("#"));
  const head = columns.map((column, i) =>
    h("th", {scope: "col", class: isNumber[i] ? "number" : ""}, column.replace("#", "")));
  const body = rows.map((cells) =>
    cells instanceof Element ? cells : h("tr", {}, cells.map((cell, i) => h("td", {class: isNumber[i] ? "number" : ""}, cell))));
  return h("div", {class: "scroll"}, h("table", properties, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

/** A message in the corner, for some seconds. */
export function toast(text, isBad = false) {
  const box = h("div", {class: isBad ? "toast bad" : "toast"}, text);
  const toasts = document.getElementById("toasts");
  toasts.append(box);
  while (toasts.children.length > 5) toasts.firstChild.remove();
  setTimeout(() => box.remove(), 9000);
}
