// Gallery: every prompt and seed over every step. Only the cells that are seen exist: the page stays small however long
// the run is. Cells come in chunks of columns, the last of which are held.

import {get, link, thumbnail} from "../api.js";
import {chip, fill, h, rewardRange} from "../dom.js";

const CHUNK = 32;
const MOST_CHUNKS = 48;
const SIZES = {small: 84, middle: 132, large: 260};
const HEAD = 30;

export async function show(view, parameters, {keepInAddress, isShown}) {
  const run = parameters.get("run");
  const slider = h("input", {type: "range", min: 0, max: 0, value: 0, "aria-label": "step"});
  const output = h("output");
  const size = h("select", {"aria-label": "size"}, Object.keys(SIZES).map((name) => h("option", {value: name}, name)));
  size.value = parameters.get("size") in SIZES ? parameters.get("size") : "middle";
  const search = h("input", {type: "search", placeholder: "search prompts", "aria-label": "search prompts"});
  const note = h("small", {class: "note"});
  const space = h("div", {class: "space"});
  const columns = h("div", {class: "columns"});
  const names = h("div", {class: "names"});
  const matrix = h("div", {class: "matrix", tabindex: 0, "aria-label": "samples over steps"}, columns, names, space);
  fill(view, h("div", {class: "tools"}, h("div", {class: "slider"}, slider, output), size, search, note), matrix);

  let data = {repeated_steps: [], prompts: []};
  let rows = [];
  let range = [0, 1];
  const chunks = new Map();
  const cells = new Map();
  const active = {step: parameters.has("step") ? Number(parameters.get("step")) : null, row: Number(parameters.get("row") ?? 0)};
  let timer;

  async function update() {
    const fresh = await get("/api/gallery", {run});
    // nothing is awaited from here on: another update may be under way
    const before = data.repeated_steps.length;
    const wasAtEnd = active.step === null || active.step === data.repeated_steps.at(-1);
    const anchor = data.repeated_steps[firstVisible()];
    const column = firstVisible();
    data = fresh;
    if (data.generation !== update.generation) chunks.clear();
    update.generation = data.generation;
    // chunks are counted from the first step: steps that were looked at later than their neighbours move them
    if (data.repeated_steps.length !== before) chunks.clear();
    range = rewardRange([data.low, data.high]);
    slider.max = Math.max(0, data.repeated_steps.length - 1);
    note.textContent = data.is_complete ? `${data.repeated_steps.length} steps, ${data.prompts.length} prompts and seeds`
      : `${data.num_indexed} of ${data.num_steps} steps looked at so far`;
    if (!data.repeated_steps.length) {
      const train = data.train_steps.at(-1);
      fill(space, h("p", {class: "empty"}, data.is_complete ? "this run has no samples of evaluations yet" : "looking at samples …",
        train !== undefined && [" · ", h("a", {href: link("group", {run, step: train})}, "training samples by group")]));
      space.style.height = space.style.width = "auto";
    } else {
      select();
      if (wasAtEnd && parameters.get("step") === null) goTo(data.repeated_steps.length - 1);
      else if (!before) goTo(indexOf(active.step));
      else if (data.repeated_steps.length !== before) {
        // steps that came before those that are seen push them to the right: what is seen stays where it is
        matrix.scrollLeft += (indexOf(anchor) - column) * metrics().width;
        slider.value = indexOf(active.step);
        draw();
      }
    }
    if (!data.is_complete) timer = setTimeout(() => update().catch((error) => console.warn(error.message)), 300);
  }

  /** The number of the first column that is seen. */
  function firstVisible() {
    const {name, width} = metrics();
    return Math.min(Math.max(0, Math.floor((matrix.scrollLeft - name) / width)), Math.max(0, data.repeated_steps.length - 1));
  }

  function indexOf(step) {
    const index = data.repeated_steps.findLastIndex((other) => other <= step);
    return Math.max(0, index);
  }

  /** Chooses the rows, and lays the matrix out anew. */
  function select() {
    const text = search.value.toLowerCase();
    rows = data.prompts.map((prompt, index) => ({...prompt, index}))
      .filter((prompt) => !text || prompt.prompt.toLowerCase().includes(text))
      .sort((a, b) => (a.kind === b.kind ? a.id - b.id || a.seed - b.seed : a.kind === "watched" ? -1 : 1));
    lay();
  }

  const metrics = () => {
    const edge = SIZES[size.value];
    const name = matrix.clientWidth < 600 ? 0 : 170;
    return {edge, name, width: edge + 10, height: edge + 34 + (name ? 0 : 34)};
  };

  function lay() {
    const {name, width, height} = metrics();
    space.style.width = `${name + data.repeated_steps.length * width}px`;
    space.style.height = `${rows.length * height}px`;
    columns.style.width = space.style.width;
    for (const [key, cell] of cells) removeCell(key, cell);
    draw();
  }

  /** Draws the cells that are seen, and removes the others. */
  function draw() {
    const {edge, name, width, height} = metrics();
    const firstColumn = Math.max(0, Math.floor((matrix.scrollLeft - name) / width) - 1);
    const lastColumn = Math.min(data.repeated_steps.length - 1, Math.ceil((matrix.scrollLeft + matrix.clientWidth - name) / width));
    const firstRow = Math.max(0, Math.floor(matrix.scrollTop / height) - 1);
    const lastRow = Math.min(rows.length - 1, Math.ceil((matrix.scrollTop + matrix.clientHeight) / height));
    const seen = new Set();
    const heads = [];
    for (let column = firstColumn; column <= lastColumn; column++) {
      const step = data.repeated_steps[column];
      heads.push(h("div", {class: "head", style: {left: `${name + column * width}px`, width: `${width}px`}}, `step ${step}`));
      const chunk = chunkOf(Math.floor(column / CHUNK));
      const entry = chunk?.[step];
      for (let row = firstRow; row <= lastRow; row++) {
        const key = `${column} ${row} ${entry ? entry.version : ""}`;
        seen.add(key);
        if (!cells.has(key)) {
          const cell = makeCell(step, rows[row], entry, edge, !name);
          Object.assign(cell.style, {left: `${name + column * width}px`, top: `${row * height}px`, width: `${width}px`, height: `${height}px`});
          cells.set(key, cell);
          space.append(cell);
        }
        cells.get(key).classList.toggle("active", step === active.step && row === active.row);
      }
    }
    for (const [key, cell] of cells) {
      if (!seen.has(key)) removeCell(key, cell);
    }
    fill(columns, heads);
    fill(names, name ? rows.slice(firstRow, lastRow + 1).map((prompt, index) => h("div", {class: "name", title: prompt.prompt,
      style: {top: `${(firstRow + index) * height}px`, width: `${name - 6}px`, height: `${height}px`}},
      prompt.kind === "watched" ? h("small", {}, "watched · ") : "", prompt.prompt, h("br"), h("small", {}, `seed ${prompt.seed}`))) : []);
  }

  /** Removes a cell; a picture that was still on its way would hold up those that are seen. */
  function removeCell(key, cell) {
    cell.querySelector("img")?.removeAttribute("src");
    cell.remove();
    cells.delete(key);
  }

  function chunkOf(number) {
    const chunk = chunks.get(number);
    if (chunk === undefined) {
      chunks.set(number, null);
      const steps = data.repeated_steps.slice(number * CHUNK, (number + 1) * CHUNK);
      get("/api/cells", {run, steps: steps.join()}).then((columnsOfChunk) => {
        for (const entry of Object.values(columnsOfChunk)) entry.byKey = new Map(entry.cells.map((cell) => [cell[0], cell]));
        chunks.set(number, columnsOfChunk);
        while (chunks.size > MOST_CHUNKS) chunks.delete(chunks.keys().next().value);
        if (isShown()) draw();
      }).catch((error) => { chunks.delete(number); console.warn(error.message); });
      return null;
    }
    // what was used last is forgotten last
    if (chunk) {
      chunks.delete(number);
      chunks.set(number, chunk);
    }
    return chunk;
  }

  function makeCell(step, prompt, entry, edge, hasName) {
    const cell = entry?.byKey.get(prompt.index);
    if (!entry) return h("div", {class: "cell"});
    if (!cell) return h("div", {class: "cell"}, h("small", {class: "note"}, "absent"));
    const [, file, total, text] = cell;
    const address = link("sample", {run, step, kind: prompt.kind, id: prompt.id});
    const width = edge <= 128 ? 128 : 256;
    const content = file && !/\.(wav|flac|mp4)$/.test(file)
      ? h("img", {src: thumbnail(run, step, file, entry.version, width), alt: prompt.prompt, class: "pixels", style: {height: `${edge}px`}})
      : h("p", {style: {height: `${edge}px`}}, text || file);
    return h("a", {class: "cell", href: address, title: `${prompt.prompt} · seed ${prompt.seed}`}, content,
      total === null && prompt.kind === "watched" ? null : chip(total, range),
      hasName && h("small", {class: "clip", style: {display: "block"}}, prompt.prompt));
  }

  function goTo(column) {
    const {name, width} = metrics();
    const step = data.repeated_steps[column];
    if (step === undefined) return;
    active.step = step;
    slider.value = column;
    output.textContent = `step ${step}`;
    const left = column * width;
    if (left < matrix.scrollLeft || left + width + name > matrix.scrollLeft + matrix.clientWidth) {
      matrix.scrollLeft = Math.max(0, left + name + width - matrix.clientWidth);
    }
    draw();
  }

  slider.oninput = () => {
    parameters.set("step", "");
    goTo(Number(slider.value));
    keepInAddress({step: active.step});
  };
  size.onchange = () => { keepInAddress({size: size.value}); lay(); goTo(indexOf(active.step)); };
  search.oninput = select;
  let isDue = false;
  matrix.onscroll = () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; draw(); });
  };
  const observer = new ResizeObserver(() => lay());
  observer.observe(matrix);
  await update();

  function keys(key) {
    const column = indexOf(active.step);
    const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    if (key === "Enter") {
      const cell = matrix.querySelector("a.cell.active");
      if (cell) location.hash = cell.getAttribute("href");
      return Boolean(cell);
    }
    if (!(key in moves)) return false;
    active.row = Math.min(Math.max(active.row + moves[key][1], 0), rows.length - 1);
    parameters.set("step", "");
    goTo(Math.min(Math.max(column + moves[key][0], 0), data.repeated_steps.length - 1));
    const {height} = metrics();
    const top = active.row * height;
    if (top < matrix.scrollTop) matrix.scrollTop = top;
    else if (top + height + HEAD > matrix.scrollTop + matrix.clientHeight) matrix.scrollTop = top + height + HEAD - matrix.clientHeight;
    keepInAddress({step: active.step, row: active.row});
    return true;
  }
  return {update, keys, close: () => {
    clearTimeout(timer);
    observer.disconnect();
    // the next page must not wait for pictures of this one
    for (const [key, cell] of cells) removeCell(key, cell);
  }};
}
