// Requests to the studio, and addresses of views and files.

export class StudioError extends Error {}

/** Asks the studio. Parameters that are lists are given several times. */
export async function get(path, parameters = {}, signal = undefined) {
  const answer = await fetch(`${path}?${query(parameters)}`, {signal, headers: {accept: "application/json"}});
  return read(answer);
}

/** Has the studio do something. */
export async function post(path, value) {
  const body = JSON.stringify(value);
  return read(await fetch(path, {method: "POST", headers: {"content-type": "application/json"}, body}));
}

async function read(answer) {
  if (answer.status === 401) throw new StudioError("the studio was started anew: open the address that it printed");
  const value = await answer.json().catch(() => ({error: `the studio answered ${answer.status}`}));
  if (!answer.ok) throw new StudioError(value.error ?? `the studio answered ${answer.status}`);
  return value;
}

export function query(parameters) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === undefined || value === null || value === "") continue;
    for (const item of [value].flat()) search.append(name, item);
  }
  return search.toString();
}

/** The address of a view: every view has one, which can be sent to others. */
export function link(page, parameters = {}) {
  const search = query(parameters);
  return `#/${page}${search ? `?${search}` : ""}`;
}

/** The address of a small copy of a picture; the version lets browsers keep it until the file changes. */
export function thumbnail(run, step, file, version, width) {
  return `/thumbnail?${query({run, step, file, v: version, width})}`;
}

/** The address of a file as the run has written it. */
export function fileAddress(run, step, file, version) {
  return `/file?${query({run, step, file, v: version})}`;
}
