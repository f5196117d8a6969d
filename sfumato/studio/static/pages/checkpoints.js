// Checkpoints, and the playground: a prompt through one of them, or through all.

import {get, link, post} from "../api.js";
import {settings} from "../control.js";
import {fill, h, table, toast} from "../dom.js";

const FIELDS = {
  seed: ["seed", "of the noise", "both"],
  steps: ["steps", "denoising steps", "pictures"],
  guidance: ["guidance", "classifier-free guidance; 1 is none", "pictures"],
  temperature: ["temperature", "0 takes the likeliest token each time", "texts"],
  max_new_tokens: ["new tokens", "most tokens of an answer", "texts"],
};

const size = (bytes) => bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(0)} KiB` : bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 30).toFixed(2)} GiB`;

export async function show(view, parameters) {
  const run = parameters.get("run");
  const list = h("div");
  const {control, playground: canPlay} = await settings();
  const play = canPlay ? playground(run) : null;
  fill(view, h("h1", {}, "Checkpoints"), list, play ? play.section : h("p", {class: "note"},
    control ? "This version has no playground." : "The playground loads checkpoints: start the studio with --control to use it."));

  async function update() {
    const {checkpoints, has_export: hasExport, answers} = await get("/api/checkpoints", {run});
    if (play) play.fit(answers);
    fill(list, checkpoints.length ? table(["#step", "#size", "written", ""], checkpoints.map((line) => [line.step, size(line.bytes),
      new Date(1000 * line.time).toLocaleString(), h("a", {href: link("gallery", {run, step: line.step})}, "samples")]))
      : h("p", {class: "empty"}, "no finished checkpoint yet"), hasExport && h("p", {class: "note"}, "hf_ckpt holds an export."));
    const picker = document.getElementById("checkpoint");
    if (picker && document.activeElement !== picker) {
      const value = picker.value;
      fill(picker, h("option", {value: ""}, "the newest"), h("option", {value: "base"}, "the run's start"), h("option", {value: "all"}, "all"), checkpoints.map((line) => h("option", {value: line.step}, `step ${line.step}`)));
      picker.value = value;
    }
  }

  await update();
  return {update};
}

/** Asks checkpoints: a prompt with settings, or with language models a conversation that goes on. */
function playground(run) {
  const prompt = h("textarea", {rows: 3, placeholder: "prompt", "aria-label": "prompt", style: {width: "100%"}});
  const checkpoint = h("select", {id: "checkpoint", "aria-label": "checkpoint"});
  const withBase = h("input", {type: "checkbox", checked: true, id: "with-base"});
  const goesOn = h("input", {type: "checkbox", id: "goes-on"});
  const fields = Object.entries(FIELDS).map(([name, [label, title, kind]]) => {
    const input = h("input", {type: "number", min: 0, step: "any", "aria-label": label, title, placeholder: "run's", data: {field: name}, style: {width: "90px"}});
    return {name, kind, input, part: h("label", {title, hidden: kind !== "both"}, `${label} `, input)};
  });
  const chat = h("label", {hidden: true, title: "what was said goes along with the next message; one model answers then"}, goesOn, " conversation");
  const answers = h("div", {class: "frames"});
  const said = h("div");
  const memory = h("p", {class: "note"}, "The first question loads the model into a process of its own.");
  let messages = [];

  function question() {
    const value = checkpoint.value;
    const asked = {run, checkpoint: value === "" ? "newest" : ["all", "base"].includes(value) ? value : Number(value)};
    if (goesOn.checked) asked.messages = [...messages, {role: "user", content: prompt.value}];
    else Object.assign(asked, {prompt: prompt.value, with_base: withBase.checked});
    for (const {name, input, part} of fields) if (!part.hidden && input.value !== "") asked[name] = Number(input.value);
    return asked;
  }

  const ask = h("button", {type: "button", onclick: async () => {
    if (goesOn.checked && checkpoint.value === "all") return toast("a conversation is with one model: choose a checkpoint", true);
    ask.disabled = true;
    ask.textContent = "at work …";
    try {
      const asked = question();
      const result = await post("/api/playground", asked);
      fill(answers, result.answers.map((answer) => h("div", {class: "frame", data: {label: answer.label ?? ""}},
        h("p", {}, h("b", {}, answer.label ?? ""), answer.seconds !== undefined && h("small", {}, ` ${answer.seconds} s`)),
        (answer.error || answer.damage) && h("p", {class: "warning"}, answer.error || answer.damage),
        answer.picture ? h("img", {src: answer.picture, alt: prompt.value, class: "pixels"})
          : answer.text !== undefined && h("div", {class: "text"}, answer.text || h("span", {class: "note"}, "empty")),
        answer.spectrum && h("img", {src: answer.spectrum, alt: `spectrum of ${prompt.value}`, class: "spectrum"}),
        answer.sound && h("audio", {src: answer.sound, controls: true}),
        h("p", {class: "note"}, answer.settings ?? "", answer.is_truncated ? "; cut at the limit of tokens" : ""))));
      const [answer] = result.answers;
      if (asked.messages && answer && answer.text !== undefined) {
        messages = [...asked.messages, {role: "assistant", content: answer.text}];
        if (prompt.value === asked.messages.at(-1).content) prompt.value = "";  // what was typed meanwhile stays
      }
      fill(said, messages.map((message) => h("p", {class: "text"}, h("b", {}, `${message.role}: `), message.content)));
      if (result.memory) memory.textContent = `The model's process takes ${size(result.memory.process_mib * 2 ** 20)} of memory` +
        `${result.memory.gpu_mib ? `, and ${size(result.memory.gpu_mib * 2 ** 20)} of the GPU's` : ""}, until it is freed or the studio ends.`;
    } catch (error) {
      toast(error.message, true);
    }
    ask.disabled = false;
    ask.textContent = "ask";
  }}, "ask");
  goesOn.onchange = () => {
    messages = [];
    fill(said);
    withBase.disabled = goesOn.checked;
  };
  const free = h("button", {type: "button", title: "ends the process that holds the model, and an answer that it is computing", onclick: () =>
    post("/api/playground/end", {}).then(() => { memory.textContent = "The model's memory is free."; }, (error) => toast(error.message, true))}, "free memory");
  const section = h("section", {id: "playground"}, h("h2", {}, "Playground"), said, prompt,
    h("div", {class: "tools", style: {"margin-top": "8px"}}, checkpoint, h("label", {title: "the model that the run started from answers, too"}, withBase, " base beside it"),
      chat, fields.map(({part}) => part), ask, free), memory, answers);

  /** Shows the settings of what the run's models make. */
  function fit(kind) {
    section.hidden = !kind;
    for (const {kind: of, part} of fields) part.hidden = of !== "both" && of !== kind;
    chat.hidden = kind !== "texts";
  }
  return {section, fit};
}
