// A sample: its picture, animation, sound or text, its rewards, and what it taught.

import {fileAddress, get, link, post} from "../api.js";
import {settings} from "../control.js";
import {chip, fill, h, number, rewardRange, signed, table} from "../dom.js";

export async function show(view, parameters, {keepInAddress}) {
  const run = parameters.get("run");
  const kind = parameters.get("kind") ?? "eval";
  let step = Number(parameters.get("step"));
  let id = Number(parameters.get("id"));
  let data;
  const {replay: canReplay} = await settings();

  async function load() {
    data = await get("/api/sample", {run, step, kind, id});
    keepInAddress({step, id});
    draw();
  }

  function draw() {
    const row = data.sample;
    fill(view, h("div", {class: "tools"},
      h("button", {type: "button", disabled: neighbour(data.steps, step, -1) === null, onclick: () => move("steps", -1)}, "← step"),
      h("b", {}, `step ${step}`),
      h("button", {type: "button", disabled: neighbour(data.steps, step, 1) === null, onclick: () => move("steps", 1)}, "step →"),
      h("button", {type: "button", disabled: neighbour(data.ids, id, -1) === null, onclick: () => move("ids", -1)}, "↑"),
      h("b", {}, `${kind} ${id}`),
      h("button", {type: "button", disabled: neighbour(data.ids, id, 1) === null, onclick: () => move("ids", 1)}, "↓"),
      data.group !== null ? h("a", {href: link("group", {run, step, group: data.group})}, "its group")
        : h("a", {href: link("scrub", {run, kind, id, seed: row.seed, prompt_key: data.prompt_key, step})}, "over training")),
    h("div", {class: "sample"}, h("div", {class: "stage"}, media(run, step, data.version, row)),
      h("div", {}, facts(row), taught(row, data.largest_advantage), canReplay && replayPart(run, step, kind, id, row, data.version))));
  }

  async function move(list, by) {
    const next = neighbour(data[list], list === "steps" ? step : id, by);
    if (next === null) return;
    const before = [step, id];
    if (list === "steps") step = next;
    else id = next;
    try {
      await load();
    } catch (error) {
      // a group's samples have other numbers in another step
      [step, id] = before;
      if (list !== "steps") throw error;
      const other = await get("/api/step", {run, step: next});
      const first = (kind === "train" ? other.groups.flatMap((group) => group.samples) : other.evaluation)[0];
      if (!first) return;
      [step, id] = [next, first.id];
      await load();
    }
  }

  await load();
  return {
    keys: (key) => {
      const moves = {ArrowLeft: ["steps", -1], ArrowRight: ["steps", 1], ArrowUp: ["ids", -1], ArrowDown: ["ids", 1]};
      if (!(key in moves)) return false;
      move(...moves[key]);
      return true;
    },
  };
}

function neighbour(list, value, by) {
  const index = list.indexOf(value);
  if (index < 0) return by < 0 ? list.findLast((item) => item < value) ?? null : list.find((item) => item > value) ?? null;
  return list[index + by] ?? null;
}

/** What was generated, as large as it fits. */
export function media(run, step, version, row) {
  // a sound's file is the picture of its spectrum, that of a video with sound the video
  const sound = row.sound && h("audio", {src: fileAddress(run, step, row.sound, version), controls: true});
  return [picture(run, step, version, row), sound];
}

function picture(run, step, version, row) {
  if (row.damage) return [h("p", {class: "warning"}, row.damage), row.file && h("img", {src: fileAddress(run, step, row.file, version), alt: ""})];
  if (row.tokens && row.text !== undefined) return tokens(row);
  if (row.text !== undefined) return h("div", {class: "text", tabindex: 0}, row.text || h("span", {class: "note"}, "empty"));
  const address = fileAddress(run, step, row.file ?? "", version);
  if (/\.(wav|flac)$/.test(row.file ?? "")) {
    const spectrum = `/spectrum?${new URLSearchParams({run, step, file: row.file, v: version})}`;
    return [h("img", {src: spectrum, alt: "spectrum"}), h("audio", {src: address, controls: true})];
  }
  if (/\.mp4$/.test(row.file ?? "")) return h("video", {src: address, controls: true, loop: true, muted: true});
  return h("a", {href: address, target: "_blank", rel: "noopener", title: "full size"},
    h("img", {src: address, alt: row.prompt, onload: (event) => {
      if (event.target.naturalWidth <= 128) event.target.classList.add("pixels");
    }}));
}

function facts(row) {
  const parts = Object.entries(row.rewards ?? {});
  const totals = rewardRange([row.total, ...parts.map(([, value]) => value)]);
  const line = (name, value) => value !== undefined && value !== null && value !== "" && [h("dt", {}, name), h("dd", {}, value)];
  return h("div", {}, h("p", {class: "text"}, row.prompt),
    row.source && h("p", {class: "note"}, "made from a picture"),
    h("p", {class: "numbers"}, row.total === null || row.total === undefined
      ? (row.kind === "watched" ? null : h("span", {class: "chip none"}, "no reward")) : h("b", {}, number(row.total))),
    parts.length > 0 && table(["part of the reward", "#value"], parts.map(([name, value]) => [name, value === null ? "failed" : chip(value, totals)])),
    h("dl", {class: "facts"}, line("advantage", row.advantage === null || row.advantage === undefined ? null : signed(row.advantage)),
      line("mean of the group", row.group_mean === undefined || row.group_mean === null ? null : `${number(row.group_mean)}, deviation ${number(row.group_std)}`),
      line("finished by", row.finish_reason), line("seed", row.seed), line("weights after", `${row.policy_version} ${row.policy_version === 1 ? "step" : "steps"}`),
      line("learned from", row.is_trained === undefined ? null : row.is_trained ? "yes" : "no: it has no reward, or its group no spread")));
}

/** What the sample taught: each denoising step that was learned from, with its log-ratio and whether it was clipped. */
function taught(row, largest) {
  if (row.noise_levels) {
    return h("div", {}, h("h3", {}, "Noise levels that it was learned from"),
      h("div", {class: "denoise"}, row.noise_levels.map((level) => h("div", {class: "trained"}, h("b", {}, number(level))))));
  }
  if (!row.trained_steps || !row.log_ratio) return null;
  const last = Math.max(...row.trained_steps);
  const steps = Array.from({length: last + 1}, (_, step) => {
    const index = row.trained_steps.indexOf(step);
    if (index < 0) return h("div", {}, h("b", {}, step), h("small", {}, "not trained"));
    const isClipped = row.clipped?.[index];
    return h("div", {class: isClipped ? "trained clipped" : "trained"}, h("b", {}, step),
      h("span", {title: "log-ratio"}, ratio(row.log_ratio[index])), isClipped && h("div", {class: "warn"}, "clipped"));
  });
  const direction = row.advantage > 0 ? "made likelier" : row.advantage < 0 ? "made less likely" : "left as they are";
  return h("div", {}, h("h3", {}, "What this sample taught"),
    h("p", {class: "note"}, `Denoising steps from noise on; those with a border are ${direction}` +
      `${largest ? `, by ${Math.round((100 * Math.abs(row.advantage ?? 0)) / largest)} % of the group's largest advantage` : ""}. ` +
      "The number is the log-ratio of the policy that learned to the one that drew."),
    h("div", {class: "denoise"}, steps));
}

function ratio(value) {
  return value === null ? "not finite" : value === 0 ? "0" : value.toExponential(1);
}

/** The tokens of an answer, coloured by their log-ratio; underlined where the objective clipped them. */
function tokens(row) {
  const ratios = row.log_ratio ?? [];
  const largest = Math.max(...ratios.map((value) => Math.abs(value ?? 0)), 1e-9);
  const spans = row.tokens.map((piece, index) => {
    const value = ratios[index];
    const share = value ? Math.round((70 * Math.abs(value)) / largest) : 0;
    const title = [`token ${index}`, row.token_ids && `id ${row.token_ids[index]}`, row.log_probs && `log-probability ${number(row.log_probs[index])}`, value !== undefined && `log-ratio ${ratio(value)}`,
      row.token_advantages && `advantage ${number(row.token_advantages[index])}`, row.clipped?.[index] && "clipped"].filter(Boolean).join(" · ");
    return h("span", {class: row.clipped?.[index] ? "clipped" : "", title,
      style: share ? {background: `color-mix(in srgb, var(--${value > 0 ? "good" : "bad"}) ${share}%, transparent)`} : {}}, piece);
  });
  return [h("div", {class: "tokens", tabindex: 0}, spans),
    h("p", {class: "note"}, ratios.length ? "Green: likelier than when it was drawn; red: less likely; underlined: clipped. " : "",
      row.cut ? `${row.cut} more tokens are not kept. ` : "", row.finish_reason ? `Ended by: ${row.finish_reason}.` : "")];
}

/** Makes the sample again from its checkpoint, and says what came of it: never more than was computed. */
function replayPart(run, step, kind, id, row, version) {
  const place = h("div");
  const button = h("button", {type: "button", onclick: async () => {
    button.disabled = true;
    fill(place, h("p", {class: "note"}, "the checkpoint is loaded in a process of its own …"));
    try {
      const result = await post("/api/replay", {run, step, kind, id});
      const isSame = result.verdict === "identical";
      fill(place, h("p", {class: isSame ? "better" : "warning", data: {verdict: result.verdict}}, result.text),
        (result.notes ?? []).map((note) => h("p", {class: "note"}, note)),
        result.picture && h("div", {class: "pair"}, h("figure", {}, h("img", {src: fileAddress(run, step, row.file, version), alt: "saved", class: "pixels", style: {width: "100%"}}), h("small", {}, "saved")),
          h("figure", {}, h("img", {src: result.picture, alt: "made again", class: "pixels", style: {width: "100%"}}), h("small", {}, "made again"))));
    } catch (error) {
      fill(place, h("p", {class: "warning"}, error.message));
    }
    button.disabled = false;
  }}, "make it again, and compare");
  return h("div", {}, h("h3", {}, "Replay with proof"), button, place);
}
