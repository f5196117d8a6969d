// The frame of all pages: which view the address names, the bar on top, news, keys and alerts.

import {link, StudioError} from "./api.js";
import {alertsButton, watchAlerts} from "./alerts.js";
import {badge, fill, h} from "./dom.js";
import {Live} from "./live.js";

const PAGES = {
  runs: {title: "Runs", load: () => import("./pages/runs.js")},
  overview: {title: "Overview", load: () => import("./pages/overview.js")},
  curves: {title: "Curves", load: () => import("./pages/curves.js")},
  gallery: {title: "Gallery", load: () => import("./pages/gallery.js")},
  group: {title: "Groups", load: () => import("./pages/group.js")},
  sample: {title: "Sample", load: () => import("./pages/sample.js"), hidden: true},
  scrub: {title: "Scrubber", load: () => import("./pages/scrub.js")},
  why: {title: "Why", load: () => import("./pages/why.js")},
  compare: {title: "Compare", load: () => import("./pages/compare.js")},
  timeline: {title: "Timeline", load: () => import("./pages/timeline.js")},
  files: {title: "Configuration and log", load: () => import("./pages/files.js")},
  checkpoints: {title: "Checkpoints", load: () => import("./pages/checkpoints.js")},
};

const bar = document.getElementById("bar");
const view = document.getElementById("view");
const live = new Live();
let shown = {page: "", run: "", handle: null, number: 0};

/** What the address says: a page and its parameters. */
function parseAddress() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const page = path in PAGES ? path : "runs";
  return {page, parameters: new URLSearchParams(search)};
}

/** Changes parameters of the address without leaving the view, so that the address always says what is seen. */
function keepInAddress(changes) {
  const {page, parameters} = parseAddress();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") parameters.delete(name);
    else parameters.set(name, value);
  }
  history.replaceState(null, "", `#/${page}?${parameters}`);
}

async function show() {
  const {page, parameters} = parseAddress();
  const run = parameters.get("run") ?? "";
  if (page !== "runs" && page !== "compare" && !run) {
    location.hash = link("runs");
    return;
  }
  shown.handle?.close?.();
  const number = shown.number + 1;
  shown = {page, run, handle: null, number};
  document.title = `${run ? `${run} · ` : ""}${PAGES[page].title} · sfumato studio`;
  drawBar(page, run);
  view.classList.toggle("wide", page === "gallery");
  fill(view, h("p", {class: "empty"}, "reading …"));
  live.watch(run, onChange);
  try {
    const module = await PAGES[page].load();
    if (shown.number !== number) return;
    const handle = await module.show(view, parameters, {keepInAddress, isShown: () => shown.number === number});
    if (shown.number === number) shown.handle = handle ?? {};
    else handle?.close?.();
  } catch (error) {
    if (shown.number === number) showError(error);
  }
  watchAlerts(run);
}

function showError(error) {
  const text = error instanceof StudioError ? error.message : `this page has failed: ${error.message}`;
  fill(view, h("p", {class: "warning", role: "alert"}, text), h("p", {}, h("a", {href: link("runs")}, "all runs")));
  if (!(error instanceof StudioError)) console.error(error);
}

function drawBar(page, run) {
  const dot = h("span", {class: "live", title: "news of the run arrive by themselves"});
  live.onState = (state) => { dot.className = `live ${state}`; };
  live.onState(live.state);
  const top = h("div", {class: "bar"},
    h("a", {class: "brand", href: link("runs")}, h("img", {src: "/static/icon.svg", alt: ""}), "sfumato studio"),
    run && h("span", {class: "run", title: run}, run),
    run && h("span", {id: "state"}),
    h("span", {class: "spacer"}), alertsButton(), dot);
  const tabs = run && h("nav", {class: "tabs", "aria-label": "pages of this run"},
    Object.entries(PAGES).filter(([name, entry]) => name !== "runs" && !entry.hidden).map(([name, entry]) =>
      h("a", {href: link(name, {run}), "aria-current": isCurrent(name, page) ? "page" : null}, entry.title)));
  fill(bar, top, tabs);
  // on a phone the tabs are wider than the window
  const current = tabs && tabs.querySelector("[aria-current]");
  if (current) tabs.scrollLeft = current.offsetLeft + current.offsetWidth / 2 - tabs.clientWidth / 2;
}

function isCurrent(name, page) {
  return name === page || (name === "group" && page === "sample");
}

/** Shows in the bar what the run is doing; pages that have asked for it anyway tell it. */
export function showState(line) {
  const place = document.getElementById("state");
  if (!place || line.run !== shown.run) return;
  fill(place, badge(line.state, line.state_text), " ",
    h("small", {}, `step ${line.step}${line.total_steps ? ` of ${line.total_steps}` : ""}`));
}

async function onChange(cursor) {
  if (cursor === "gone") {
    showError(new StudioError(`${shown.run} is not there any more: it was moved or removed`));
    return;
  }
  const number = shown.number;
  try {
    await shown.handle?.update?.();
    watchAlerts(shown.run);
  } catch (error) {
    if (number === shown.number && error.name !== "AbortError") console.warn(error.message);
  }
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input:not([type=range]), textarea, select");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (shown.handle?.keys?.(event.key)) event.preventDefault();
});
window.addEventListener("hashchange", show);
show();
