// Scrubber: one prompt and seed over training, in step over several runs, with the reward under each frame.

import {fileAddress, get, link} from "../api.js";
import {chip, fill, h, rewardRange} from "../dom.js";

const valueOf = (key) => `${key.id} ${key.seed} ${key.prompt_key}`;

export async function show(view, parameters, {keepInAddress}) {
  const run = parameters.get("run");
  const runs = [run, ...parameters.getAll("with").filter((name) => name !== run)];
  const kind = parameters.get("kind") ?? "eval";
  let id = parameters.has("id") ? Number(parameters.get("id")) : null;
  let seed = parameters.has("seed") ? Number(parameters.get("seed")) : null;
  let promptKey = parameters.get("prompt_key");
  let step = parameters.has("step") ? Number(parameters.get("step")) : null;
  let films = [];
  let steps = [];
  let timer;
  let later;
  const slider = h("input", {type: "range", min: 0, max: 0, value: 0, "aria-label": "step"});
  const output = h("output");
  const play = h("button", {type: "button", onclick: toggle}, "play");
  const prompts = h("select", {"aria-label": "prompt"});
  const picker = h("select", {"aria-label": "add a run"}, h("option", {value: ""}, "add a run …"));
  const frames = h("div", {class: "frames"});
  fill(view, h("div", {class: "tools"}, prompts, picker, play, h("div", {class: "slider"}, slider, output)), frames);
  get("/api/names").then(({names}) => picker.append(...names.filter((name) => !runs.includes(name)).map((name) =>
    h("option", {value: name}, name)))).catch((error) => console.warn(error.message));
  picker.onchange = () => { location.hash = link("scrub", {run, with: [...runs.slice(1), picker.value], kind, id, seed, prompt_key: promptKey, step}); };

  async function update() {
    const {prompts: all, is_complete: isComplete} = await get("/api/gallery", {run});
    const keys = all.filter((key) => key.kind === kind).sort((a, b) => a.id - b.id);
    if (!keys.length) {
      fill(frames, h("p", {class: "empty"}, isComplete ? "this run has no samples of evaluations yet" : "looking at samples …"));
      if (!isComplete) later = setTimeout(() => update().catch((error) => console.warn(error.message)), 400);
      return;
    }
    // an evaluation of other prompts may have had another one with the same id and seed
    const alike = keys.filter((key) => key.id === id && (seed === null || key.seed === seed));
    const chosen = alike.find((key) => key.prompt_key === promptKey) ?? alike[0] ?? keys[0];
    [id, seed, promptKey] = [chosen.id, chosen.seed, chosen.prompt_key];
    if (document.activeElement !== prompts) {
      fill(prompts, keys.map((key) => h("option", {value: valueOf(key)}, `${key.prompt.slice(0, 60)} · seed ${key.seed}`)));
      prompts.value = valueOf(chosen);
    }
    films = await Promise.all(runs.map((name) => get("/api/frames", {run: name, kind, id, seed, prompt_key: promptKey})));
    clearTimeout(later);
    if (films.some((film) => !film.is_complete)) later = setTimeout(() => update().catch((error) => console.warn(error.message)), 400);
    const wasAtEnd = step === null || step === steps.at(-1);
    steps = [...new Set(films.flatMap((film) => film.frames.map((frame) => frame.step)))].sort((a, b) => a - b);
    slider.max = Math.max(0, steps.length - 1);
    goTo(wasAtEnd && !parameters.has("step") ? steps.length - 1 : Math.max(0, steps.findLastIndex((other) => other <= step)));
  }

  function goTo(index) {
    if (!(index in steps)) return;
    step = steps[index];
    slider.value = index;
    output.textContent = `step ${step}`;
    keepInAddress({step, id, seed, prompt_key: promptKey});
    draw();
  }

  function draw() {
    // a sound that plays goes on with the other step's, at the same moment: so two steps are compared by ear
    const heard = [...frames.children].map((frame) => frame.querySelector("audio")).map((audio) => audio && !audio.paused && audio.currentTime);
    const range = rewardRange(films.flatMap((film) => film.frames.map((frame) => frame.total)));
    fill(frames, films.map((film, index) => {
      // runs evaluate at steps of their own: the newest one until this step stands for it
      const frame = film.frames.findLast((other) => other.step <= step);
      if (!frame) return h("div", {class: "frame"}, h("b", {}, runs[index]), h("p", {class: "empty"}, film.prompt ? "not evaluated yet at this step" : "has no sample of this prompt and seed"));
      const content = frame.file ? h("img", {src: fileAddress(runs[index], frame.step, frame.file, frame.version), alt: film.prompt, class: "pixels"})
        : h("div", {class: "text"}, frame.text);
      const sound = frame.sound && h("audio", {src: fileAddress(runs[index], frame.step, frame.sound, frame.version), controls: true,
        currentTime: heard[index] || 0, autoplay: typeof heard[index] === "number"});
      return h("div", {class: "frame", data: {step: frame.step}}, h("p", {}, h("b", {}, runs[index])),
        h("a", {href: link("sample", {run: runs[index], step: frame.step, kind, id})}, content), sound,
        h("p", {}, chip(frame.total, range), h("small", {}, ` step ${frame.step} · ${film.prompt}`)));
    }));
    const next = steps[Number(slider.value) + 1];
    films.forEach((film, index) => {
      const frame = film.frames.find((other) => other.step === next);
      if (frame?.file) new Image().src = fileAddress(runs[index], frame.step, frame.file, frame.version);
    });
  }

  function toggle() {
    if (timer) {
      clearInterval(timer);
      timer = null;
    } else {
      if (Number(slider.value) >= steps.length - 1) goTo(0);
      timer = setInterval(() => (Number(slider.value) < steps.length - 1 ? goTo(Number(slider.value) + 1) : toggle()), 400);
    }
    play.textContent = timer ? "stop" : "play";
  }

  slider.oninput = () => { parameters.set("step", ""); goTo(Number(slider.value)); };
  prompts.onchange = () => {
    const [wantedId, wantedSeed, wantedPrompt] = prompts.value.split(" ");
    [id, seed, promptKey] = [Number(wantedId), Number(wantedSeed), wantedPrompt];
    prompts.blur();
    update();
  };
  await update();
  return {
    update,
    close: () => { clearInterval(timer); clearTimeout(later); },
    keys: (key) => {
      if (key === " ") { toggle(); return true; }
      const by = {ArrowLeft: -1, ArrowRight: 1}[key];
      if (!by) return false;
      parameters.set("step", "");
      goTo(Math.min(Math.max(Number(slider.value) + by, 0), steps.length - 1));
      return true;
    },
  };
}
