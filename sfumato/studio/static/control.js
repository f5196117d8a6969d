// What pages may have a run do, where the studio was started with --control.

import {get, post} from "./api.js";
import {fill, h, toast} from "./dom.js";

let asked = null;

/** What this studio may do. */
export async function settings() {
  asked ??= get("/api/settings");
  return asked;
}

const COMMANDS = [
  ["save", "save now", "writes a checkpoint after this step"],
  ["sample", "sample now", "draws the evaluation's prompts and the watched ones after this step"],
  ["evaluate", "evaluate now", "evaluates after this step; the figures stand in control.jsonl, the curves stay as they are"],
  ["pause", "pause", "waits after this step until it is resumed"],
  ["resume", "resume", "goes on"],
  ["stop", "save and stop", "saves after this step, and ends the run"],
];

/** The buttons of a run, and what to call with whether it is at work; nothing where the studio only reads. */
export async function controls(run) {
  const {control} = await settings();
  if (!control) return null;
  const answers = h("div");
  const prompts = h("textarea", {rows: 4, "aria-label": "watched prompts", placeholder: "one prompt a line", style: {width: "100%"}});
  const buttons = COMMANDS.map(([command, text, title]) => h("button", {type: "button", title, data: {command},
    class: command === "stop" ? "danger" : "", onclick: () => send(command, text)}, text));

  async function send(command, text) {
    if (command === "stop" && !confirm(`Save and end ${run}?`)) return;
    try {
      await post("/api/control", {run, command});
      toast(`${run} is asked to: ${text}`);
      await read();
    } catch (error) {
      toast(error.message, true);
    }
  }

  async function read() {
    const data = await get("/api/control", {run});
    const lines = data.answers.slice(-5).reverse();
    fill(answers, data.waiting.length > 0 && h("p", {class: "note"}, `${data.waiting.length} asked for, waiting for the end of the step`),
      lines.map((line) => h("p", {class: line.result === "done" ? "note" : "note warn", data: {answer: line.command ?? ""}},
        `${new Date(1000 * line.time).toLocaleTimeString()} step ${line.step}: ${line.command ?? "?"} ${line.result}${line.text ? `: ${line.text}` : ""}`)));
    if (document.activeElement !== prompts) prompts.value = data.prompts.join("\n");
  }

  const keep = h("button", {type: "button", onclick: async () => {
    try {
      const {prompts: lines} = await post("/api/watched", {run, prompts: prompts.value.split("\n")});
      toast(`${lines.length} prompts are drawn from the next evaluation on`);
    } catch (error) {
      toast(error.message, true);
    }
  }}, "watch these prompts");
  const timer = setInterval(() => {
    if (!answers.isConnected) clearInterval(timer);
    else if (!document.hidden) read().catch((error) => console.warn(error.message));
  }, 2000);
  await read();
  const nobody = h("p", {class: "note", hidden: true}, "No process of this run is at work.");
  const section = h("section", {id: "control"}, h("h2", {}, "Control"), h("div", {class: "tools"}, buttons), nobody, answers,
    h("details", {}, h("summary", {}, "Watched prompts"), prompts, h("p", {class: "tools"}, keep)));
  const allow = (isAlive) => {
    nobody.hidden = isAlive;
    for (const button of buttons) button.disabled = !isAlive;
  };
  return {section, allow};
}
