// Curves: all metrics, grouped by what stands before the first slash, searched, of several runs over each other.

import {get, link} from "../api.js";
import {COLOURS, CurveFigure, FigureList} from "../charts.js";
import {fill, h, number} from "../dom.js";

export async function show(view, parameters, {keepInAddress}) {
  const run = parameters.get("run");
  const others = parameters.getAll("with");
  const runs = [run, ...others.filter((name) => name !== run)];
  const search = h("input", {type: "search", placeholder: "search metrics, such as reward|kl", class: "grow",
    value: parameters.get("search") ?? "", "aria-label": "search metrics"});
  const picker = h("select", {"aria-label": "add a run"}, h("option", {value: ""}, "add a run …"));
  const body = h("div");
  fill(view, h("div", {class: "tools"}, search, picker), legend(run, runs), body);
  let figures = new FigureList();
  let names = null;
  let timer;

  search.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => { keepInAddress({search: search.value}); names = null; update(); }, 150);
  };
  picker.onchange = () => { location.hash = link("curves", {run, with: [...runs.slice(1), picker.value], search: search.value}); };
  get("/api/names").then(({names: all}) => picker.append(...all.filter((name) => !runs.includes(name)).map((name) =>
    h("option", {value: name}, name)))).catch((error) => console.warn(error.message));

  async function update() {
    const lists = await Promise.all(runs.map((name) => get("/api/metrics", {run: name})));
    const metrics = new Map();
    for (const {metrics: list} of lists) {
      for (const metric of list) {
        const seen = metrics.get(metric.name);
        // flat in each run is flat only where all runs have the same value
        const isFlat = metric.is_flat && (!seen || (seen.is_flat && seen.last === metric.last));
        metrics.set(metric.name, {...metric, is_flat: isFlat});
      }
    }
    const pattern = parse(search.value);
    const chosen = [...metrics.values()].filter((metric) => pattern(metric.name)).sort((a, b) => a.name < b.name ? -1 : 1);
    const key = chosen.map((metric) => metric.name + metric.is_flat).join();
    if (key === names) {
      await figures.update();
      return;
    }
    names = key;
    figures.close();
    figures = new FigureList();
    draw(chosen, metrics.size);
  }

  function draw(chosen, total) {
    const groups = new Map();
    const flat = chosen.filter((metric) => metric.is_flat);
    for (const metric of chosen) {
      if (metric.is_flat) continue;
      const prefix = metric.name.includes("/") ? metric.name.split("/")[0] : "training";
      groups.set(prefix, [...(groups.get(prefix) ?? []), metric.name]);
    }
    const sections = [...groups].map(([prefix, list]) => h("details", {open: true},
      h("summary", {}, prefix, " ", h("small", {class: "note"}, list.length)),
      h("div", {class: "curves"}, list.map((name) => figures.add(new CurveFigure(name, runs))))));
    fill(body, !chosen.length && h("p", {class: "empty"}, total ? "no metric has that in its name" : "no numbers yet"), sections,
      flat.length > 0 && h("details", {}, h("summary", {}, `${flat.length} flat `, h("small", {class: "note"}, "one value at all steps")),
        h("ul", {class: "flat"}, flat.map((metric) => h("li", {}, metric.name, h("span", {}, number(metric.last)))))));
  }

  await update();
  return {update, close: () => { clearTimeout(timer); figures.close(); }, keys: (key) => key === "/" && (search.focus(), true)};
}

/** A test of names: by a regular expression, or by the text where it is none. */
function parse(text) {
  if (!text) return () => true;
  try {
    const expression = new RegExp(text, "i");
    return (name) => expression.test(name);
  } catch {
    return (name) => name.toLowerCase().includes(text.toLowerCase());
  }
}

function legend(run, runs) {
  if (runs.length < 2) return null;
  return h("div", {class: "legend"}, runs.map((name, index) => h("span", {},
    h("i", {style: {background: `var(--${COLOURS[index % COLOURS.length]})`}}), name, " ",
    index > 0 && h("a", {href: link("curves", {run, with: runs.slice(1).filter((other) => other !== name)}), title: "leave out"}, "×"))));
}
