// Runs: all runs below the folder, the newest first.

import {get, link} from "../api.js";
import {badge, duration, fill, h, number, signed} from "../dom.js";

export async function show(view, parameters, {keepInAddress, isShown}) {
  let first = Number(parameters.get("first") ?? 0);
  const search = h("input", {type: "search", placeholder: "search runs", value: parameters.get("search") ?? "",
    "aria-label": "search runs", class: "grow"});
  const compare = h("button", {type: "button", disabled: true}, "compare");
  const place = h("div");
  const chosen = new Set();
  fill(view, h("h1", {}, "Runs"), h("div", {class: "tools"}, search, compare), place);

  compare.onclick = () => { location.hash = link("compare", {run: [...chosen]}); };
  let timer;
  let again;
  let isFirst = true;
  search.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => { first = 0; update(); }, 200);
  };

  async function update() {
    keepInAddress({search: search.value, first: first || null});
    const {runs, total, was_cut: wasCut, problem, folder} = await get("/api/runs",
      {search: search.value, first, quick: isFirst || null});
    isFirst = false;
    if (!total) {
      fill(place, problem && h("p", {class: "warning"}, problem),
        h("p", {class: "empty"}, search.value ? "no run has that in its name" : `no run in ${folder} yet: this page shows one when it starts`));
      return;
    }
    const pager = total > runs.length && h("p", {class: "tools"},
      h("button", {type: "button", disabled: !first, onclick: () => { first = Math.max(0, first - 30); update(); }}, "newer"),
      h("small", {}, `${first + 1} to ${first + runs.length} of ${total}`),
      h("button", {type: "button", disabled: first + runs.length >= total, onclick: () => { first += 30; update(); }}, "older"));
    fill(place, problem && h("p", {class: "warning"}, problem),
      wasCut && h("p", {class: "warning"}, "there are more runs or folders than are looked at: name a smaller folder"),
      h("div", {class: "scroll"}, h("table", {class: "runs"},
        h("thead", {}, h("tr", {}, ["run", "", "state", "progress", "evaluation", "task", "begun"].map((name) =>
          h("th", {scope: "col"}, name)))),
        h("tbody", {}, runs.map((line) => line.is_pending ? pendingRow(line) : row(line))))), pager);
    // runs are read for the first time a second at a time, so that the list stands at once
    clearTimeout(again);
    if (runs.some((line) => line.is_pending)) again = setTimeout(() => isShown() && update(), 0);
  }

  function pendingRow(line) {
    return h("tr", {class: "link", onclick: () => { location.hash = link("overview", {run: line.run}); }},
      h("td", {}, h("a", {href: link("overview", {run: line.run})}, line.run)), h("td"),
      h("td", {colSpan: 5}, h("small", {}, "reading …")));
  }

  function row(line) {
    const box = h("input", {type: "checkbox", checked: chosen.has(line.run), "aria-label": `compare ${line.run}`,
      onclick: (event) => event.stopPropagation(),
      onchange: (event) => {
        if (event.target.checked) chosen.add(line.run);
        else chosen.delete(line.run);
        compare.disabled = chosen.size < 2 || chosen.size > 8;
        compare.textContent = chosen.size > 1 ? `compare ${chosen.size}` : "compare";
      }});
    const progress = line.total_steps
      ? [h("progress", {max: line.total_steps, value: line.step}), " ", h("small", {}, `${line.step} of ${line.total_steps}`)]
      : h("small", {}, `step ${line.step}`);
    return h("tr", {class: "link", onclick: (event) => {
      if (!event.target.closest("a, input")) location.hash = link("overview", {run: line.run});
    }},
      h("td", {}, h("a", {href: link("overview", {run: line.run})}, line.run)), h("td", {}, box),
      h("td", {}, badge(line.state, line.state_text)),
      h("td", {}, progress, line.eta_s !== null && h("small", {}, ` · ${duration(line.eta_s)} left`)),
      h("td", {}, h("div", {class: "figures"}, line.figures.map((figure) =>
        h("small", {title: figure.name}, `${figure.name.replace(/^eval\//, "")} `, h("b", {}, number(figure.last[1])), " ",
          figure.first[0] !== figure.last[0] &&
            h("span", {class: figure.change}, signed(figure.last[1] - figure.first[1])),
          figure.lost_at !== null && h("span", {class: "warn"}, ` not finite at ${figure.lost_at}`))))),
      h("td", {}, h("small", {}, line.task)), h("td", {}, h("small", {}, line.date)));
  }

  await update();
  return {update, close: () => { clearTimeout(timer); clearTimeout(again); }};
}
