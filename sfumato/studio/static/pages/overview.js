// Overview: how far a run is, what its evaluations say, and what a person should look at.

import {get, link, thumbnail} from "../api.js";
import {showState} from "../app.js";
import {CurveFigure, FigureList} from "../charts.js";
import {controls} from "../control.js";
import {badge, chip, duration, fill, h, number, rewardRange, signed, table} from "../dom.js";

export async function show(view, parameters) {
  const run = parameters.get("run");
  const top = h("div");
  const curves = h("div", {class: "curves"});
  const samples = h("div");
  const bottom = h("div");
  const buttons = await controls(run);
  fill(view, top, buttons?.section, h("h2", {}, "Curves"), curves,
    h("p", {class: "note"}, h("a", {href: link("curves", {run})}, "all curves")), samples, bottom);
  const figures = new FigureList();
  let names = null;
  let samplesShown = "";

  async function update() {
    const data = await get("/api/overview", {run});
    showState(data);
    buttons?.allow(data.is_alive);
    fill(top, header(data), ...data.problems.map((text) => h("p", {class: "warning"}, text)), headlines(data), signs(data, run));
    if (data.curves.join() !== names) {
      names = data.curves.join();
      fill(curves, data.curves.map((name) => figures.add(new CurveFigure(name, [run]))),
        !data.curves.length && h("p", {class: "empty"}, "no numbers yet"));
    } else await figures.update();
    fill(bottom, failures(data), h("details", {}, h("summary", {}, "Environment"),
      h("dl", {class: "facts"}, data.facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))));
    const samplesNow = `${data.last_sample_step} ${data.samples_generation}`;
    if (samplesNow !== samplesShown) await newest(samples, run, data.last_sample_step);
    samplesShown = samplesNow;
  }

  await update();
  return {update, close: () => figures.close()};
}

function header(data) {
  const left = data.eta_s === null ? "" : `${duration(data.eta_s)} left`;
  const end = data.eta_s === null ? "" : new Date((data.time + data.eta_s) * 1000).toLocaleString([], {dateStyle: "medium", timeStyle: "short"});
  return h("div", {}, h("h1", {}, data.run),
    h("p", {class: "state"}, badge(data.state, data.state_text),
      data.total_steps && h("progress", {max: data.total_steps, value: data.step, "aria-label": "progress"}),
      h("span", {}, `step ${data.step}${data.total_steps ? ` of ${data.total_steps}` : ""}`),
      data.step_s !== null && h("span", {}, `${Number(data.step_s.toPrecision(3))} s a step`),
      left && h("span", {title: `ends about ${end}`}, `${left}, until ${end}`),
      data.task && h("span", {}, data.task), data.date && h("span", {}, `begun ${data.date}`)),
    data.state_text && h("p", {class: "warning"}, data.state_text),
    data.last_line && h("p", {class: "note"}, h("a", {href: link("files", {run: data.run})}, "its log"), " ends with: ",
      h("span", {class: "text", id: "last-line"}, data.last_line)),
    data.idle && h("p", {class: "warning"}, data.idle));
}

function headlines(data) {
  if (!data.figures.length) return null;
  const cards = data.figures.map((figure) => {
    const [[firstStep, first], [lastStep, last], [bestStep, best]] = [figure.first, figure.last, figure.best];
    const isSingle = firstStep === lastStep;
    const isLost = figure.lost_at !== null;
    const single = isLost ? `step ${firstStep} alone has a value` : `one evaluation so far, at step ${firstStep}`;
    return h("div", {class: "card", data: {metric: figure.name}}, h("p", {class: "note"}, figure.name.replace(/^eval\//, "")),
      h("p", {class: "numbers"}, isSingle ? h("b", {}, first.toFixed(3)) : [
        h("span", {class: "first"}, first.toFixed(3)), h("span", {class: "first"}, "→"), h("b", {}, last.toFixed(3)),
        h("span", {class: `change ${figure.change}`}, signed(last - first))]),
      h("p", {class: "note"}, isSingle ? single
        : `before: step ${firstStep} · after: ${lastStep} · ${figure.has_direction ? "best" : "highest"}: ${best.toFixed(3)} at ${bestStep}`,
        isLost && h("span", {class: "warn"}, ` · not finite at step ${figure.lost_at}`)));
  });
  return h("section", {}, h("h2", {}, "Evaluation: before and after"), h("div", {class: "cards"}, cards));
}

function signs(data, run) {
  if (!data.has_signs && !data.signs.length) return null;
  return h("section", {id: "signs"}, h("h2", {}, "Signs of reward hacking"),
    data.signs.length ? data.signs.map((sign) => h("p", {class: "warning", data: {sign: sign.metric}}, sign.text))
      : h("p", {class: "note"}, "None found. ", h("a", {href: link("why", {run})}, "Why did the reward rise?")));
}

function failures(data) {
  if (!data.failed.length) return null;
  return h("section", {}, h("h2", {}, "Samples without a reward"),
    table(["reward and reason", "#training samples", "#evaluation samples", "steps"],
      data.failed.slice(0, 20).map((line) => [h("span", {class: "text"}, line.reason), line.train, line.eval, `${line.first} to ${line.last}`])));
}

async function newest(place, run, step) {
  if (step === null) return;
  const data = await get("/api/step", {run, step});
  const chosen = data.evaluation.length ? data.evaluation : data.groups.flatMap((group) => group.samples);
  const shown = chosen.slice(0, 12);
  const range = rewardRange(chosen.map((sample) => sample.total));
  fill(place, h("h2", {}, `Newest samples, step ${step}`),
    h("div", {class: "strip"}, shown.map((sample) => tile(run, step, data.version, sample, range))),
    h("p", {class: "note"}, h("a", {href: link("gallery", {run, step})}, "gallery"),
      chosen.length > shown.length ? ` · ${shown.length} of ${chosen.length} samples of this step` : ""));
}

/** A sample as a small tile that leads to its page. */
export function tile(run, step, version, sample, range, border = {}) {
  const address = link("sample", {run, step, kind: sample.kind, id: sample.id});
  const content = sample.file && !/\.(wav|flac|mp4)$/.test(sample.file)
    ? h("img", {src: thumbnail(run, step, sample.file, version, 256), alt: sample.prompt, loading: "lazy", class: "pixels"})
    : h("p", {}, sample.damage || sample.text || sample.file || "empty");
  return h("a", {class: sample.file ? "tile" : "tile words", href: address, title: sample.prompt, style: border}, content,
    h("small", {}, chip(sample.total, range), sample.advantage !== null && h("span", {title: "advantage"}, signed(sample.advantage))));
}
