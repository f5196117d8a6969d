// Curves, drawn by uPlot in the colours of the page.

import uPlot from "/static/vendor/uPlot.esm.js";
import {get} from "./api.js";
import {h, number} from "./dom.js";

export const COLOURS = ["accent", "score", "update", "sync", "evaluate", "save", "bad", "muted"];
const HEIGHT = 180;
// a step is a whole number
const STEP_TICKS = Array.from({length: 48}, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The number of pixels that curves are reduced to: the server sends the lowest and the highest value of each. */
export function plotWidth(element) {
  return Math.max(50, Math.min(Math.round(element.clientWidth || 320), 2000));
}

/**
 * A figure with the curves of one metric over runs. It fetches what its width can show, and again when a stretch is
 * chosen by dragging; a double click shows all steps again.
 */
export class CurveFigure {
  constructor(name, runs, beside = null) {
    this.name = name;
    this.runs = runs;
    this.beside = beside;
    this.range = null;
    this.plot = null;
    this.value = h("span");
    this.place = h("div", {class: "plot"});
    this.element = h("figure", {class: "curve", data: {metric: name}},
      h("figcaption", {}, h("b", {title: name}, name), beside && h("small", {}, `beside ${beside}`), this.value), this.place);
  }

  /** Fetches the curves and draws them. */
  async load(signal) {
    const names = this.beside ? [this.name, this.beside] : [this.name];
    const width = plotWidth(this.place);
    const range = this.range ? {first: Math.floor(this.range[0]), last: Math.ceil(this.range[1])} : {};
    const {curves} = await get("/api/curves", {run: this.runs, name: names, width, ...range}, signal);
    this.draw(curves);
  }

  /** Draws curves that were fetched: by run, by name. */
  draw(curves) {
    const tables = [];
    const series = [];
    this.runs.forEach((run, index) => {
      const curve = curves[run]?.[this.name];
      if (!curve || !curve.x.length) return;
      const shade = COLOURS[index % COLOURS.length];
      const isNoisy = curve.smooth && !/(^|\/)lr/.test(this.name);
      tables.push([curve.x, curve.y]);
      series.push({label: run, shade: isNoisy ? "faint" : shade, width: isNoisy ? 1 : 1.7,
        alpha: isNoisy && index ? 0.35 : 1, base: shade, points: curve.x.length <= 30});
      if (isNoisy) {
        tables.push([curve.x, curve.smooth]);
        series.push({label: `${run} mean`, shade, width: 1.9, alpha: 1, base: shade});
      }
    });
    const other = this.beside ? curves[this.runs[0]]?.[this.beside] : null;
    if (other?.x.length) {
      tables.push([other.x, other.y]);
      series.push({label: this.beside, shade: "muted", width: 1, dash: [4, 3], scale: "beside", alpha: 1, base: "muted"});
    }
    this.series = series;
    if (!tables.length) {
      this.place.replaceChildren(h("p", {class: "empty"}, "no values"));
      return;
    }
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    this.last = number(tables[0][1].at(-1));
    this.value.textContent = this.last;
    const shape = JSON.stringify(series.map((item) => [item.label, item.shade, item.points]));
    if (this.plot && this.shape === shape) {
      this.plot.setData(data, true);
      return;
    }
    this.destroyPlot();
    this.shape = shape;
    this.plot = new uPlot(this.options(series), data, this.place);
  }

  options(series) {
    const axis = {stroke: () => colour("muted"), grid: {stroke: () => colour("line"), width: 0.8}, ticks: {show: false},
      font: "11px system-ui, sans-serif"};
    return {
      width: plotWidth(this.place), height: HEIGHT, legend: {show: false}, padding: [8, 32, 0, 0],
      scales: {x: {time: false}, y: {range: limits}, beside: {range: limits}},
      cursor: {sync: {key: "steps", scales: ["x", null]}, drag: {x: true, y: false}, points: {size: 6}},
      axes: [{...axis, size: 26, incrs: STEP_TICKS}, {...axis, size: (plot, texts) => axisWidth(texts), values: (plot, ticks, index, space, step) => ticks.map((value) => tick(value, step))}],
      series: [{}, ...series.map((item) => ({
        label: item.label, width: item.width, dash: item.dash, scale: item.scale ?? "y", alpha: item.alpha,
        stroke: () => colour(item.alpha < 1 ? item.base : item.shade), spanGaps: true,
        points: {show: Boolean(item.points), size: 4, fill: () => colour(item.base)},
      }))],
      hooks: {setSelect: [(plot) => this.zoom(plot)], setCursor: [(plot) => this.say(plot)]},
    };
  }

  zoom(plot) {
    if (plot.select.width < 4) return;
    this.range = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    this.load().catch((error) => console.warn(error.message));
    plot.over.ondblclick = () => {
      this.range = null;
      this.load().catch((error) => console.warn(error.message));
    };
  }

  say(plot) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined) {
      this.value.textContent = this.last;
      return;
    }
    const values = this.series.map((item, i) => [item, plot.data[i + 1][index]])
      .filter(([item, value]) => value !== null && value !== undefined && !item.label.endsWith(" mean"));
    this.value.textContent = `${plot.data[0][index]}: ${values.map(([, value]) => number(value)).join(" · ")}`;
  }

  resize() {
    this.plot?.setSize({width: plotWidth(this.place), height: HEIGHT});
  }

  destroyPlot() {
    this.plot?.destroy();
    this.plot = null;
    this.place.replaceChildren();
  }
}

/** The ends of an axis: those of the values and a twentieth more; of equal values, a range around them. */
function limits(plot, low, high) {
  if (low === null) return [0, 1];
  const margin = high - low > 1e-13 * Math.max(Math.abs(low), Math.abs(high)) ? 0.05 * (high - low) : 0.05 * Math.abs(low) || 1;
  return [low - margin, high + margin];
}

/** A number of an axis, with as many digits as tell it from the next one. */
function tick(value, step) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(Math.min(Math.max(Math.ceil(Math.log10(size / step)) + 1, 4), 7)));
  return size < 1e-3 || size >= 1e5 ? rounded.toExponential().replace("+", "") : String(rounded);
}

/** The pixels that the numbers beside an axis need: numbers that differ late have many digits. */
function axisWidth(texts) {
  const longest = (texts ?? []).reduce((most, text) => Math.max(most, text.length), 0);
  return Math.max(54, 14 + 6.6 * longest);
}

/**
 * Draws figures while they can be seen and forgets them when they cannot: of 200 metrics a screen shows a dozen. Figures
 * that come into view together are fetched together.
 */
export class FigureList {
  constructor() {
    this.figures = new Map();
    this.visible = new Set();
    this.pending = new Set();
    this.observer = new IntersectionObserver((entries) => this.look(entries), {rootMargin: "250px"});
    this.resizer = new ResizeObserver(() => this.visible.forEach((figure) => figure.resize()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw = () =>
      this.visible.forEach((figure) => figure.plot?.redraw()));
  }

  add(figure) {
    this.figures.set(figure.element, figure);
    this.observer.observe(figure.element);
    this.resizer.observe(figure.element);
    return figure.element;
  }

  look(entries) {
    for (const {target, isIntersecting} of entries) {
      const figure = this.figures.get(target);
      if (!figure) continue;
      if (isIntersecting) {
        this.visible.add(figure);
        this.pending.add(figure);
      } else {
        this.visible.delete(figure);
        this.pending.delete(figure);
        figure.destroyPlot();
        figure.shape = null;
      }
    }
    if (this.pending.size) queueMicrotask(() => this.fetch());
  }

  /** Fetches the curves that are seen. */
  async fetch(figures = [...this.pending]) {
    this.pending.clear();
    const simple = figures.filter((figure) => !figure.beside && !figure.range);
    const others = figures.filter((figure) => figure.beside || figure.range);
    const jobs = others.map((figure) => figure.load());
    for (let i = 0; i < simple.length; i += 32) {
      const part = simple.slice(i, i + 32);
      const width = plotWidth(part[0].place);
      jobs.push(get("/api/curves", {run: part[0].runs, name: part.map((figure) => figure.name), width}).then(({curves}) =>
        part.forEach((figure) => this.visible.has(figure) && figure.draw(curves))));
    }
    await Promise.all(jobs).catch((error) => console.warn(error.message));
  }

  /** Fetches what is seen again. */
  update() {
    return this.fetch([...this.visible]);
  }

  close() {
    this.observer.disconnect();
    this.resizer.disconnect();
    this.figures.forEach((figure) => figure.destroyPlot());
  }
}
