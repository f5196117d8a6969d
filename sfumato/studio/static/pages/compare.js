// Compare: runs beside each other: only what differs in their configurations, their results, and their curves.

import {get, link} from "../api.js";
import {COLOURS, CurveFigure, FigureList} from "../charts.js";
import {fill, h, number, table} from "../dom.js";
import {intervals} from "./why.js";

export async function show(view, parameters) {
  let runs = parameters.getAll("run");
  const {names} = await get("/api/names");
  if (runs.length === 1) runs = [...runs, ...parameters.getAll("with")];
  const picker = h("select", {"aria-label": "add a run"}, h("option", {value: ""}, "add a run …"),
    names.filter((name) => !runs.includes(name)).map((name) => h("option", {value: name}, name)));
  picker.onchange = () => { location.hash = link("compare", {run: [...runs, picker.value]}); };
  const body = h("div");
  fill(view, h("h1", {}, "Compare"), h("div", {class: "tools"}, runs.map((name, index) => h("span", {class: "badge"},
    h("span", {style: {color: `var(--${COLOURS[index % COLOURS.length]})`}}, "● "), h("a", {href: link("overview", {run: name})}, name), " ",
    h("a", {href: link("compare", {run: runs.filter((other) => other !== name)}), title: "leave out"}, "×"))),
    runs.length < 8 && picker), body);
  if (runs.length < 2) {
    fill(body, h("p", {class: "empty"}, "add a run to compare with"));
    return {};
  }
  fill(body, h("p", {class: "empty"}, "computing …"));
  const figures = new FigureList();
  let key = "";

  async function update() {
    const data = await get("/api/compare", {run: runs, step: parameters.get("step")});
    if (data.problem) {
      fill(body, h("p", {class: "warning"}, data.problem));
      return;
    }
    const text = JSON.stringify(data);
    if (text === key) return;
    const wasDrawn = key !== "";
    key = text;
    if (wasDrawn) await figures.update();
    else draw(data);
  }

  function draw(data) {
    const results = Object.entries(data.results);
    fill(body, data.notes.map((note) => h("p", {class: "warning"}, note)),
      data.runs.flatMap((run) => run.problems.map((problem) => h("p", {class: "warning"}, `${run.run}: ${problem}`))),
      h("h2", {}, "What differs in the configuration"),
      data.config.length ? table(["field", ...runs], data.config.map((line) => [line.name, ...line.values])) : h("p", {class: "note"}, "nothing"),
      h("h2", {}, "Results"), table(["metric", ...runs.map((name) => `#${name}`)], results.map(([name, values]) => [name,
        ...values.map((value) => value === null ? "" : [h("b", {}, number(value.last)), h("small", {}, ` from ${number(value.first)}, step ${value.last_step}`)])])),
      data.paired.map((line) => [h("h2", {}, `${line.run} against ${runs[0]}`),
        line.steps && h("p", {class: "note"}, `evaluations of step ${line.steps[0]} and ${line.steps[1]}; the change is that from ${runs[0]} to ${line.run}`),
        line.notes.map((note) => h("p", {class: "note"}, note)), line.differences.length > 0 && intervals(line.differences)]),
      h("h2", {}, "Curves"), h("div", {class: "curves"}, results.slice(0, 12).map(([name]) => figures.add(new CurveFigure(name, runs)))),
      h("p", {class: "note"}, h("a", {href: link("curves", {run: runs[0], with: runs.slice(1)})}, "all curves over each other"), " · ",
        h("a", {href: link("scrub", {run: runs[0], with: runs.slice(1)})}, "pictures in step")),
      h("details", {}, h("summary", {}, "What differs in versions and hardware ", h("small", {class: "note"}, data.environment.length)),
        table(["", ...runs], data.environment.map((line) => [line.name, ...line.values]))));
  }

  await update();
  return {update, close: () => figures.close()};
}
