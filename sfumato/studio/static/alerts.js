// Alerts: a run that died or stands still, signs of reward hacking, rewards that fail. In the page, and as notifications
// of the browser where they are asked for. A hidden tab has no stream, so it asks twice a minute.

import {get} from "./api.js";
import {h, toast} from "./dom.js";
import {showState} from "./app.js";

const ASK_EVERY_MS = 30_000;
const SHORTEST_MS = 2000;
const told = new Map();
const statuses = new Map();
let watched = "";
let asked = {run: "", at: 0};
let later = 0;

/** The button that turns notifications of the browser on. */
export function alertsButton() {
  if (!("Notification" in window)) return null;
  const button = h("button", {type: "button", title: "tell me by a notification when this run dies, stands still or shows " +
    "signs of reward hacking, also when this tab is hidden; the tab must stay open"});
  const draw = () => {
    button.textContent = {granted: "notifications on", denied: "notifications blocked"}[Notification.permission] ?? "notify me";
    button.disabled = Notification.permission !== "default";
  };
  button.onclick = async () => {
    await Notification.requestPermission();
    draw();
  };
  draw();
  return button;
}

/** Looks at the alerts of a run, at most every two seconds, and tells those that are new. */
export async function watchAlerts(run) {
  watched = run;
  if (statuses.has(run)) showState(statuses.get(run));
  clearTimeout(later);
  if (!run) return;
  const wait_ms = asked.run === run ? asked.at + SHORTEST_MS - Date.now() : 0;
  if (wait_ms > 0) {
    // what has just happened may be the last news of this run: it must not be left out
    later = setTimeout(() => watched === run && watchAlerts(run), wait_ms);
    return;
  }
  asked = {run, at: Date.now()};
  const status = await get("/api/status", {run}).catch(() => null);
  if (!status || watched !== run) return;
  statuses.set(run, status);
  showState(status);
  const texts = status.alerts.map((alert) => alert.text);
  const before = told.get(run);
  told.set(run, new Set([...(before ?? []), ...texts]));
  // what stood there when the page was opened is on it already
  if (before) texts.filter((text) => !before.has(text)).forEach((text) => tell(run, text));
}

function tell(run, text) {
  toast(`${run}: ${text}`, true);
  if ("Notification" in window && Notification.permission === "granted" && document.hidden) {
    new Notification(`sfumato: ${run}`, {body: text, tag: `${run} ${text}`, icon: "/static/icon.svg"});
  }
}

setInterval(() => {
  const isAsked = "Notification" in window && Notification.permission === "granted";
  if (document.hidden && isAsked && watched) watchAlerts(watched);
}, ASK_EVERY_MS);
