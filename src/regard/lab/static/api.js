// Asking the lab. What goes wrong is thrown as an Error whose message is one line for a person.

async function checked(response) {
  if (response.ok) return response;
  let why = `the lab answered ${response.status}`;
  try {
    why = (await response.json()).error ?? why;
  } catch {
    // no JSON: the status has to do
  }
  const error = new Error(why);
  error.status = response.status;
  throw error;
}

async function fetched(url, options) {
  try {
    return await checked(await fetch(url, options));
  } catch (error) {
    if (error instanceof TypeError) throw new Error("the lab does not answer; is it still running?");
    throw error;
  }
}

function query(path, fields) {
  const given = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export async function get(path, fields = {}, signal = undefined) {
  return (await fetched(query(path, fields), { signal })).json();
}

// Numbers as they are: little-endian float32.
export async function floats(path, fields = {}, signal = undefined) {
  const response = await fetched(query(path, fields), { signal });
  const values = new Float32Array(await response.arrayBuffer());
  return { values, shape: (response.headers.get("x-shape") ?? "").split(",").map(Number) };
}

export async function post(path, body = {}, signal = undefined) {
  const headers = { "content-type": "application/json" };
  return (await fetched(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

export function address(path, fields = {}) {
  return query(path, fields);
}

// Follow a job to its end; `tell(job)` at each change. Resolves to its result. `signal` stops following, not the job.
export async function followed(job, tell = () => {}, signal = undefined) {
  let now = job;
  tell(now);
  while (now.state === "queued" || now.state === "running") {
    now = await get(`/api/jobs/${now.id}`, { after: now.seq, wait: 10 }, signal);
    tell(now);
  }
  if (now.state === "done") return now.result;
  const error = new Error(now.state === "cancelled" ? "cancelled" : now.error);
  error.cancelled = now.state === "cancelled";
  throw error;
}

export function cancel(job) {
  return post("/api/jobs/cancel", { job: job.id });
}
