// Configuration and log. Keys and passwords are replaced before they are sent.

import {get} from "../api.js";
import {fill, h} from "../dom.js";

export async function show(view, parameters) {
  const run = parameters.get("run");
  const {config, facts} = await get("/api/files", {run});
  const log = h("pre", {id: "log", tabindex: 0});
  let first = 0;
  const earlier = h("button", {type: "button", onclick: async () => {
    const part = await get("/api/log", {run, before: first});
    log.prepend(part.text);
    first = part.first;
    earlier.disabled = first === 0;
  }}, "earlier lines");
  fill(view, h("h2", {}, "Log"), h("p", {class: "tools"}, earlier), log,
    h("h2", {}, "Configuration"), h("pre", {id: "config", tabindex: 0}, config || "no config.yaml"),
    h("h2", {}, "Environment"), h("dl", {class: "facts"}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));

  let seen = null;
  async function update() {
    const part = await get("/api/log", {run, after: seen});
    if (seen === part.last) return;
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
    // new lines come below what is read, and lines that were asked for further above stay
    if (seen && part.first === seen) log.append(part.text);
    else {
      log.textContent = part.text || "nothing yet";
      first = part.first;
    }
    seen = part.last;
    earlier.disabled = first === 0;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  await update();
  return {update};
}
