// Why did the reward rise? Two evaluations of the same prompts and seeds: the change of each part of the reward with its
// interval, the prompts that moved, and the samples that moved most as pairs.

import {get} from "../api.js";
import {fill, h, number, rewardRange, signed, table, toast} from "../dom.js";
import {tile} from "./overview.js";

export async function show(view, parameters, {keepInAddress, isShown}) {
  const run = parameters.get("run");
  // sliders, as a long run has thousands of evaluations
  const ends = ["first", "last"].map((name) => {
    const slider = h("input", {type: "range", min: 0, max: 0, value: 0, "aria-label": `${name} step`});
    return {name, slider, output: h("output")};
  });
  const body = h("div");
  fill(view, h("h1", {}, "Why did the reward rise?"),
    h("div", {class: "tools"}, ends.map(({slider, output}) => h("div", {class: "slider"}, slider, output))), body);
  fill(body, h("p", {class: "empty"}, "computing …"));
  let steps = [];
  let drawn = "";

  async function update() {
    const data = await get("/api/gallery", {run});
    const isNew = data.repeated_steps.length !== steps.length;
    steps = data.repeated_steps;
    if (!data.is_complete) setTimeout(() => isShown() && update().catch((error) => console.warn(error.message)), 400);
    if (steps.length < 2 && !data.is_complete) return;
    if (steps.length < 2) {
      fill(body, h("p", {class: "empty"}, "two evaluations with samples are needed: eval.every_steps and eval.num_saved say when and how many"));
      return;
    }
    if (!isNew) return;
    for (const {name, slider} of ends) {
      slider.max = steps.length - 1;
      const wanted = steps.indexOf(Number(parameters.get(name) ?? NaN));
      slider.value = wanted >= 0 ? wanted : name === "first" ? 0 : steps.length - 1;
    }
    if (say() !== drawn) await load();
  }

  /** The steps that are chosen, which are told beside the sliders. */
  function chosen() {
    return Object.fromEntries(ends.map(({name, slider}) => [name, steps[slider.value]]));
  }

  function say() {
    for (const {name, output} of ends) output.textContent = `${name === "first" ? "from" : "to"} step ${chosen()[name]}`;
    return Object.values(chosen()).join(" ");
  }

  async function load() {
    drawn = say();
    const asked = drawn;
    const data = await get("/api/why", {run, ...chosen()});
    if (asked === drawn) draw(data);
  }

  for (const {name, slider} of ends) {
    slider.oninput = say;
    slider.onchange = () => {
      parameters.set(name, chosen()[name]);
      keepInAddress(chosen());
      load().catch((error) => toast(error.message, true));
    };
  }

  function draw(data) {
    const watched = data.differences.filter((line) => line.is_watched);
    const optimised = data.differences.filter((line) => !line.is_watched);
    const total = data.differences.find((line) => line.reward === "total");
    fill(body, sentence(total, data),
      data.signs.map((text) => h("p", {class: "warning"}, text)),
      h("h2", {}, "Parts of the reward"), intervals(optimised),
      watched.length > 0 && [h("h2", {}, "Rewards that only watch"),
        h("p", {class: "note"}, "They are not optimised: a reward that rises while these fall is learned in a way that nobody wanted."), intervals(watched)],
      data.risen.length > 0 && [h("h2", {}, "Samples that rose most"), pairs(data.risen, data)],
      data.fallen.length > 0 && [h("h2", {}, "Samples that fell most"), pairs(data.fallen, data)],
      prompts(data));
  }

  function pairs(movers, data) {
    const range = rewardRange(movers.flatMap((mover) => [mover.before.total, mover.after.total]));
    return h("div", {class: "groups"}, movers.map((mover) => h("div", {class: "group"},
      h("p", {}, h("span", {class: "text"}, mover.before.prompt), " ", h("b", {class: mover.change > 0 ? "better" : "worse"}, signed(mover.change))),
      h("div", {class: "pair"}, tile(run, data.first, data.versions[data.first], mover.before, range),
        tile(run, data.last, data.versions[data.last], mover.after, range)))));
  }

  await update();
  return {update};
}

function sentence(total, data) {
  if (!total) return h("p", {class: "empty"}, "these evaluations have no rewards in common");
  const isCertain = total.low > 0 || total.high < 0;
  const change = meanChange(total);
  const before = h("b", {}, number(total.before));
  const after = h("b", {}, number(total.after));
  const way = change === 0 ? ["stayed at ", after] : [change > 0 ? "rose" : "fell", " from ", before, " to ", after];
  const saved = data.num_evaluated !== null && data.num_saved < data.num_evaluated
    ? ` Of ${data.num_evaluated} evaluated prompts ${data.num_saved} are kept (eval.num_saved), and only these are looked at.` : "";
  return h("div", {class: "card"}, h("p", {}, `Between step ${data.first} and ${data.last} the total reward `, way,
    ` (${signed(change)}`,
    total.low === null ? ")" : `, 95 % interval ${signed(total.low)} to ${signed(total.high)})`,
    ` over ${total.num_prompts} prompts. `, total.low === null ? "One prompt alone gives no interval."
      : isCertain ? "The interval does not hold 0." : h("b", {}, "The interval holds 0: this may be chance.")),
    h("p", {class: "note"}, `Same prompts, seeds and noise at both steps; prompts are drawn anew for the interval (paired bootstrap).${saved}`,
      data.num_unpaired ? ` ${data.num_unpaired} samples have no partner and are left out.` : "",
      total.num_failed ? ` ${total.num_failed} pairs have a sample without a reward and are left out.` : ""));
}

/** The mean change of a reward; differences that cancel are not quite 0 in floating point. */
function meanChange(line) {
  return Math.abs(line.mean) <= 1e-12 * Math.max(Math.abs(line.before), Math.abs(line.after)) ? 0 : line.mean;
}

/** A line for each reward, with its change and interval drawn on one scale. */
export function intervals(differences) {
  if (!differences.length) return h("p", {class: "note"}, "none");
  const largest = Math.max(...differences.flatMap((line) => [line.mean, line.low, line.high].map((value) => Math.abs(value ?? 0))), 1e-12);
  const place = (value) => `${50 + 48 * (value / largest)}%`;
  return table(["reward", "#before", "#after", "#change", "95 % interval", "", "#prompts"], differences.map((line) => [
    line.reward, number(line.before), number(line.after),
    h("span", {class: "change"}, signed(meanChange(line))),
    line.low === null ? "one prompt" : `${signed(line.low)} to ${signed(line.high)}`,
    h("div", {class: "interval", title: "0 in the middle"}, h("u", {style: {left: "50%"}}),
      line.low !== null && h("i", {style: {left: place(line.low), width: `${(48 * (line.high - line.low)) / largest}%`}}),
      h("b", {style: {left: place(line.mean)}})),
    line.num_prompts]), {data: {table: "intervals"}});
}

function prompts(data) {
  const names = [...new Set(data.prompts.flatMap((line) => Object.keys(line.parts)))];
  if (!names.length) return null;
  return h("details", {open: data.prompts.length <= 30}, h("summary", {}, "Each prompt ", h("small", {class: "note"}, data.prompts.length)),
    table(["prompt", "#samples", ...names.map((name) => `#${name}`)], data.prompts.map((line) => [h("span", {class: "text"}, line.prompt), line.num_samples,
      ...names.map((name) => {
        const part = line.parts[name];
        if (!part) return "";
        const change = part[1] - part[0];
        return [`${number(part[0])} → ${number(part[1])} `, h("span", {class: change > 0 ? "better" : change < 0 ? "worse" : ""}, change ? signed(change) : "")];
      })])));
}
