// Timeline: what each process did in some steps.

import {get} from "../api.js";
import {duration, fill, h, svg} from "../dom.js";

const KINDS = ["generate", "score", "update", "sync", "evaluate", "save", "load"];
const BAR = 22, TOP = 24, BOTTOM = 22;
const NARROW = 600;

export async function show(view, parameters, {keepInAddress}) {
  const run = parameters.get("run");
  let last = parameters.has("step") ? Number(parameters.get("step")) : null;
  let steps = [];
  const slider = h("input", {type: "range", min: 0, max: 0, value: 0, "aria-label": "last step"});
  const output = h("output");
  const body = h("div");
  fill(view, h("div", {class: "tools"}, h("div", {class: "slider"}, slider, output)), body);

  async function update() {
    const data = await get("/api/timeline", {run, last});
    steps = data.steps;
    slider.max = Math.max(0, steps.length - 1);
    slider.value = last === null ? steps.length - 1 : Math.max(0, steps.findLastIndex((step) => step <= last));
    output.textContent = steps.length ? `until step ${last ?? steps.at(-1)}` : "";
    if (data.problem) fill(body, h("p", {class: "warning"}, data.problem));
    else if (!data.rows.length) fill(body, h("p", {class: "empty"}, "no timeline: it is written by RL, and by runs with roles"));
    else fill(body, h("div", {class: "card"}, picture(data, body.clientWidth - 30)), legend(data), ...Object.entries(data.left_out).map(([role, [shown, total]]) =>
      h("p", {class: "note"}, `${shown} of ${total} processes of ${role} are shown`)));
  }

  let wait;
  slider.oninput = () => {
    const index = Number(slider.value);
    last = index >= steps.length - 1 ? null : steps[index];
    keepInAddress({step: last});
    clearTimeout(wait);
    wait = setTimeout(update, 60);
  };
  await update();
  let width = body.clientWidth;
  const observer = new ResizeObserver(() => {
    if (body.clientWidth === width) return;
    width = body.clientWidth;
    update().catch((error) => console.warn(error.message));
  });
  observer.observe(body);
  return {update, close: () => { clearTimeout(wait); observer.disconnect(); }, keys: (key) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[key];
    if (!by) return false;
    slider.value = Number(slider.value) + by;
    slider.oninput();
    return true;
  }};
}

/** The picture in pixels of the screen, so that its texts have one size. On a phone names stand above their bars. */
function picture(data, width) {
  const isNarrow = width < NARROW;
  const [left, right] = isNarrow ? [0, width] : [110, width - 50];
  const rowHeight = isNarrow ? BAR + 22 : BAR + 8;
  const scale = (right - left) / data.seconds;
  const height = TOP + data.rows.length * rowHeight + BOTTOM;
  const marks = [];
  let before = 0;
  for (const [step, end] of Object.entries(data.ends)) {
    const x = left + end * scale;
    const room = (end - before) * scale;
    const text = [`step ${step}`, step].find((label) => 7 * label.length < room);
    marks.push(svg("line", {x1: x, x2: x, y1: TOP - 6, y2: height - 20, style: {stroke: "var(--muted)", "stroke-dasharray": "3 3"}}));
    if (text) marks.push(svg("text", {x: x - room / 2, y: 13, "text-anchor": "middle"}, text));
    before = end;
  }
  const rows = data.rows.flatMap((row, index) => {
    const y = TOP + index * rowHeight;
    const [textY, barY] = isNarrow ? [y + 12, y + 16] : [y + 17, y + 2];
    return [svg("text", {x: 0, y: textY}, row.name),
      svg("text", {x: width, y: textY, "text-anchor": "end"}, `${Math.round(100 * row.busy)} %${isNarrow ? " busy" : ""}`),
      ...row.bars.map(([kind, version, start, end, step]) => svg("rect", {x: left + start * scale, y: barY, rx: 2, height: BAR,
        width: Math.max(1, (end - start) * scale), style: {fill: `var(--${KINDS.includes(kind) ? kind : "other"})`}},
        svg("title", {}, `${kind} of step ${step}: ${(end - start).toFixed(2)} s${version === null ? "" : `, policy ${version}`}`)))];
  });
  return svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, class: "timeline", role: "img", "aria-label": "what each process did"},
    ...marks, ...rows, svg("text", {x: left, y: height - 4}, "0s"), svg("text", {x: right, y: height - 4, "text-anchor": "end"},
      data.seconds < 10 ? `${data.seconds.toFixed(1)}s` : duration(data.seconds)));
}

function legend(data) {
  const seen = new Set(data.rows.flatMap((row) => row.bars.map((bar) => (KINDS.includes(bar[0]) ? bar[0] : "other"))));
  return h("p", {class: "kinds"}, [...KINDS, "other"].filter((kind) => seen.has(kind)).map((kind) =>
    h("span", {}, h("i", {style: {background: `var(--${kind})`}}), kind)), h("span", {class: "note"}, "no bar: idle"));
}
