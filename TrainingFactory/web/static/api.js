// Client of the server's API: JSON requests, errors with their field, and jobs with progress events.

export let where = ""; // the --runs option that a command needs to find these runs

class ApiError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param ?? null;
    this.code = error.code ?? null;
  }
}

/** Returns the version and the folder of runs. */
export async function about() {
  const told = await get("/api/about");
  where = told.where;
  return told;
}

/** Builds /api/runs/NAME/episodes?step=3 from parts and a query; empty values are left out. */
export function url(parts, query = {}) {
  const kept = Object.entries(query).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const path = "/api/" + parts.map((part) => encodeURIComponent(part)).join("/");
  return kept.length ? path + "?" + new URLSearchParams(kept) : path;
}

export async function get(address, signal) {
  return await answer(await fetch(address, { signal, headers: { accept: "application/json" } }));
}

export async function post(address, body = {}, signal) {
  return await answer(await send(address, body, signal));
}

/** Posts a job and returns its result; `heard` gets its progress messages. */
export async function job(address, body, heard, signal) {
  const response = await send(address, body, signal);
  const kind = response.headers.get("content-type") ?? "";
  if (!response.ok || !kind.includes("event-stream")) return await answer(response);
  let last = null;
  for await (const { event, data } of events(response.body)) {
    if (event === "error") throw new ApiError(500, data.error ?? data);
    if (event === "done") last = data;
    else heard(data);
  }
  if (last === null) throw new ApiError(500, { message: "The server closed the connection before the job was done." });
  return last;
}

async function send(address, body, signal) {
  const headers = { "content-type": "application/json", "x-tfactory-page": "1" };
  return await fetch(address, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function answer(response) {
  const text = await response.text();
  let told = null;
  try {
    told = JSON.parse(text);
  } catch {
    throw new ApiError(response.status, { message: "The server's response is not JSON." });
  }
  if (!response.ok)
    throw new ApiError(response.status, told.error ?? { message: "The server responded with status " + response.status });
  return told;
}

/** Reads server-sent events from the body of a response. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (waiting + value).replaceAll("\r\n", "\n").split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const of = (name) =>
        lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length).trim());
      const data = of("data:").join("\n");
      if (data) yield { event: of("event:")[0] ?? "message", data: JSON.parse(data) };
    }
  }
}
