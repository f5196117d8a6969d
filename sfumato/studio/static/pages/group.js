// Groups: the training samples of a step, those of one prompt together, with their rewards and advantages.

import {get, link} from "../api.js";
import {chip, fill, h, number, rewardRange, table} from "../dom.js";
import {tile} from "./overview.js";

const SHOWN = 8;

export async function show(view, parameters, {keepInAddress}) {
  const run = parameters.get("run");
  let step = parameters.has("step") ? Number(parameters.get("step")) : null;
  let first = Number(parameters.get("first") ?? 0);
  let steps = [];
  let shown = "";
  let generation = 0;
  let later;
  const slider = h("input", {type: "range", min: 0, max: 0, value: 0, "aria-label": "step"});
  const output = h("output");
  const body = h("div");
  fill(view, h("div", {class: "tools"}, h("div", {class: "slider"}, slider, output)), body);

  async function update() {
    const isNewest = step === null || (steps.length && step === steps.at(-1) && !parameters.has("step"));
    const {train_steps: all, is_complete: isComplete, generation: now} = await get("/api/gallery", {run});
    steps = all;
    generation = now;
    clearTimeout(later);
    if (!isComplete) later = setTimeout(() => update().catch((error) => console.warn(error.message)), 300);
    // a step that the address names is shown before all have been looked at
    if (step === null && !steps.length) {
      fill(body, h("p", {class: "empty"}, isComplete ? "this run has no training samples: supervised tasks draw none" : "looking at samples …"));
      return;
    }
    slider.max = Math.max(0, steps.length - 1);
    slider.value = indexOf(step);
    await goTo(isNewest ? steps.at(-1) : step);
  }

  const indexOf = (wanted) => Math.max(0, steps.findLastIndex((other) => other <= wanted));

  async function goTo(wanted) {
    const asked = `${wanted} ${generation}`;
    if (shown === asked) return;
    step = wanted;
    shown = asked;
    slider.value = indexOf(step);
    output.textContent = `step ${step}`;
    const data = await get("/api/step", {run, step: wanted});
    if (shown === asked) draw(data);
  }

  function draw(data) {
    const wanted = parameters.get("group");
    const groups = data.groups;
    const range = rewardRange(groups.flatMap((group) => group.samples.map((sample) => sample.total)));
    const chosen = wanted === null ? groups.slice(first, first + SHOWN) : groups.filter((group) => group.group === wanted);
    fill(body, data.problem && h("p", {class: "warning"}, data.problem),
      wanted !== null && h("p", {}, h("a", {href: link("group", {run, step})}, `all ${groups.length} groups of this step`)),
      !chosen.length && h("p", {class: "empty"}, groups.length ? "no such group in this step" : "no training samples of this step"),
      chosen.map((group) => drawGroup(run, data, group, range, wanted !== null)),
      wanted === null && groups.length > SHOWN && h("p", {class: "tools"},
        h("button", {type: "button", disabled: !first, onclick: () => move(-SHOWN, data)}, "before"),
        h("small", {}, `groups ${first + 1} to ${Math.min(first + SHOWN, groups.length)} of ${groups.length}`),
        h("button", {type: "button", disabled: first + SHOWN >= groups.length, onclick: () => move(SHOWN, data)}, "next")));
  }

  function move(by, data) {
    first = Math.max(0, first + by);
    keepInAddress({first: first || null});
    draw(data);
  }

  let wait;
  slider.oninput = () => {
    output.textContent = `step ${steps[Number(slider.value)]}`;
    clearTimeout(wait);
    wait = setTimeout(() => { pick(Number(slider.value)); }, 60);
  };
  function pick(index) {
    parameters.set("step", steps[index]);
    parameters.delete("group");
    first = 0;
    keepInAddress({step: steps[index], group: null, first: null});
    return goTo(steps[index]);
  }
  await update();
  return {
    update,
    close: () => { clearTimeout(wait); clearTimeout(later); },
    keys: (key) => {
      const by = {ArrowLeft: -1, ArrowRight: 1}[key];
      const index = indexOf(step) + (by ?? 0);
      if (!by || !(index in steps)) return false;
      pick(index);
      return true;
    },
  };
}

function drawGroup(run, data, group, range, isWhole) {
  const largest = Math.max(...group.samples.map((sample) => Math.abs(sample.advantage ?? 0)), 1e-12);
  const samples = [...group.samples].sort((a, b) => (b.total ?? -Infinity) - (a.total ?? -Infinity));
  const names = [...new Set(samples.flatMap((sample) => Object.keys(sample.rewards)))];
  return h("div", {class: "group", data: {group: group.group}},
    h("p", {}, h("span", {class: "text"}, group.prompt), " ", h("small", {}, `${samples.length} samples`,
      group.mean !== null && ` · mean ${number(group.mean)} · deviation ${number(group.std)}`,
      group.is_computed ? "" : " of these samples"), " ",
      !isWhole && h("a", {href: link("group", {run, step: data.step, group: group.group})}, "link")),
    h("div", {class: "strip"}, samples.map((sample) => tile(run, data.step, data.version, sample, range, border(sample.advantage, largest)))),
    isWhole && table(["sample", "#reward", ...names.map((name) => `#${name}`), "#advantage"], samples.map((sample) => [
      h("a", {href: link("sample", {run, step: data.step, kind: "train", id: sample.id})}, sample.id), chip(sample.total, range),
      ...names.map((name) => number(sample.rewards[name])), sample.advantage === null ? "" : number(sample.advantage)])));
}

/** The border of a sample: green for what it is drawn towards, red for what it is pushed away from, by the advantage. */
export function border(advantage, largest) {
  if (advantage === null || advantage === undefined) return {};
  const share = Math.round(100 * Math.min(1, Math.abs(advantage) / largest));
  return {"border-color": `color-mix(in srgb, var(--${advantage >= 0 ? "good" : "bad"}) ${share}%, var(--line))`};
}
