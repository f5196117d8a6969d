// Checkpoints, and the playground: a prompt through one of them, or through all.

import {get, link, post} from "../api.js";
import {settings} from "../control.js";
import {fill, h, table, toast} from "../dom.js";

export async function show(view, parameters) {
  const run = parameters.get("run");
  const list = h("div");
  const {control, playground: canPlay} = await settings();
  fill(view, h("h1", {}, "Checkpoints"), list, canPlay ? playground(run) : h("p", {class: "note"},
    control ? "This version has no playground." : "The playground loads checkpoints: start the studio with --control to use it."));

  async function update() {
    const {checkpoints, has_export: hasExport} = await get("/api/checkpoints", {run});
    const size = (bytes) => bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(0)} KiB` : bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 30).toFixed(2)} GiB`;
    fill(list, checkpoints.length ? table(["#step", "#size", "written", ""], checkpoints.map((line) => [line.step, size(line.bytes),
      new Date(1000 * line.time).toLocaleString(), h("a", {href: link("gallery", {run, step: line.step})}, "samples")]))
      : h("p", {class: "empty"}, "no finished checkpoint yet"), hasExport && h("p", {class: "note"}, "hf_ckpt holds an export."));
    const picker = document.getElementById("checkpoint");
    if (picker && document.activeElement !== picker) {
      const value = picker.value;
      fill(picker, h("option", {value: ""}, "the newest"), h("option", {value: "all"}, "all"), checkpoints.map((line) => h("option", {value: line.step}, `step ${line.step}`)));
      picker.value = value;
    }
  }

  await update();
  return {update};
}

function playground(run) {
  const prompt = h("textarea", {rows: 3, placeholder: "prompt", "aria-label": "prompt", style: {width: "100%"}});
  const checkpoint = h("select", {id: "checkpoint", "aria-label": "checkpoint"});
  const seed = h("input", {type: "number", value: 0, min: 0, "aria-label": "seed", style: {width: "100px"}});
  const answers = h("div", {class: "frames"});
  const ask = h("button", {type: "button", onclick: async () => {
    ask.disabled = true;
    ask.textContent = "at work …";
    try {
      const value = checkpoint.value === "" ? null : checkpoint.value === "all" ? "all" : Number(checkpoint.value);
      const result = await post("/api/playground", {run, prompt: prompt.value, checkpoint: value, seed: Number(seed.value)});
      fill(answers, result.answers.map((answer) => h("div", {class: "frame", data: {checkpoint: answer.checkpoint ?? ""}},
        h("p", {}, h("b", {}, answer.checkpoint === undefined ? "" : `step ${answer.checkpoint}`)),
        answer.error ? h("p", {class: "warning"}, answer.error)
          : answer.picture ? h("img", {src: answer.picture, alt: prompt.value, class: "pixels"}) : h("div", {class: "text"}, answer.text))));
    } catch (error) {
      toast(error.message, true);
    }
    ask.disabled = false;
    ask.textContent = "ask";
  }}, "ask");
  const free = h("button", {type: "button", title: "ends the process that holds the model", onclick: () =>
    post("/api/playground/end", {}).then(() => toast("the model's memory is free"), (error) => toast(error.message, true))}, "free memory");
  return h("section", {id: "playground"}, h("h2", {}, "Playground"), prompt,
    h("div", {class: "tools", style: {"margin-top": "8px"}}, checkpoint, h("label", {}, "seed ", seed), ask, free), answers);
}
