// Timeline: what each process did in some steps.

import {get} from "../api.js";
import {duration, fill, h, svg} from "../dom.js";

const KINDS = ["generate", "score", "update", "sync", "evaluate", "save", "load"];
const ROW = 30, LEFT = 110, WIDTH = 1100, RIGHT = 50, TOP = 24;

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
    else fill(body, picture(data), legend(data), ...Object.entries(data.left_out).map(([role, [shown, total]]) =>
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
  return {update, close: () => clearTimeout(wait), keys: (key) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[key];
    if (!by) return false;
    slider.value = Number(slider.value) + by;
    slider.oninput();
    return true;
  }};
}

function picture(data) {
  const scale = (WIDTH - LEFT - RIGHT) / data.seconds;
  const height = TOP + data.rows.length * ROW + 22;
  const ends = Object.entries(data.ends);
  const marks = [];
  let before = 0;
  for (const [step, end] of ends) {
    const x = LEFT + end * scale;
    marks.push(svg("line", {x1: x, x2: x, y1: TOP - 6, y2: height - 20, style: {stroke: "var(--muted)", "stroke-dasharray": "3 3"}}),
      svg("text", {x: LEFT + ((before + end) / 2) * scale, y: 13, "text-anchor": "middle"}, `step ${step}`));
    before = end;
  }
  const rows = data.rows.flatMap((row, index) => {
    const y = TOP + index * ROW;
    return [svg("text", {x: 0, y: y + 17}, row.name), svg("text", {x: WIDTH - 4, y: y + 17, "text-anchor": "end"}, `${Math.round(100 * row.busy)} %`),
      ...row.bars.map(([kind, version, start, end, step]) => svg("rect", {x: LEFT + start * scale, y: y + 2, rx: 2, height: ROW - 8,
        width: Math.max(1, (end - start) * scale), style: {fill: `var(--${KINDS.includes(kind) ? kind : "other"})`}},
        svg("title", {}, `${kind} of step ${step}: ${(end - start).toFixed(2)} s${version === null ? "" : `, policy ${version}`}`)))];
  });
  return h("div", {class: "scroll card"}, svg("svg", {viewBox: `0 0 ${WIDTH} ${height}`, class: "timeline", role: "img", "aria-label": "what each process did"},
    ...marks, ...rows, svg("text", {x: LEFT, y: height - 4}, "0s"), svg("text", {x: WIDTH - RIGHT, y: height - 4, "text-anchor": "end"},
      data.seconds < 10 ? `${data.seconds.toFixed(1)}s` : duration(data.seconds))));
}

function legend(data) {
  const seen = new Set(data.rows.flatMap((row) => row.bars.map((bar) => (KINDS.includes(bar[0]) ? bar[0] : "other"))));
  return h("p", {class: "kinds"}, [...KINDS, "other"].filter((kind) => seen.has(kind)).map((kind) =>
    h("span", {}, h("i", {style: {background: `var(--${kind})`}}), kind)), h("span", {class: "note"}, "no bar: idle"));
}
