// Requests to the lab. Every failure is thrown as an Error whose message is one line for a person.

async function check(response) {
  if (response.ok) return response;
  let message = `the lab responded with status ${response.status}`;
  try {
    const body = await response.json();
    message = body.error ?? message;
    if (body.reopen) reportClosed(message, body.reopen);
  } catch {
    // The body is not JSON, so the message has only the status.
  }
  // Many callers try again later or leave a part of the page empty. The frame of the lab says what happened.
  if (response.status === 401) window.dispatchEvent(new CustomEvent("token-needed"));
  throw new Error(message);
}

// What a page shows was closed by another window. The frame of the lab offers to open it again. The caller of the request
// shows the same message as an error; the frame's message replaces it, so it comes later.
function reportClosed(message, item) {
  setTimeout(() => window.dispatchEvent(new CustomEvent("item-closed", { detail: { message, item } })));
}

async function request(url, options) {
  try {
    return await check(await fetch(url, options));
  } catch (error) {
    // fetch throws a TypeError if there is no connection.
    if (error instanceof TypeError) throw new Error("the lab does not respond; is it still running?");
    throw error;
  }
}

// The path with its query; empty fields are left out.
export function urlOf(path, fields = {}) {
  const filled = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return filled.length ? `${path}?${new URLSearchParams(filled)}` : path;
}

export async function get(path, fields = {}, signal = undefined) {
  return (await request(urlOf(path, fields), { signal })).json();
}

// A tensor of little-endian float32 numbers.
export async function getFloats(path, fields = {}, signal = undefined) {
  const response = await request(urlOf(path, fields), { signal });
  const values = new Float32Array(await response.arrayBuffer());
  return { values, shape: (response.headers.get("x-shape") ?? "").split(",").map(Number) };
}

export async function post(path, body = {}, signal = undefined) {
  const headers = { "content-type": "application/json" };
  return (await request(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

// Wait for a job to end and return its result. `onChange(job)` is called at each change. `signal` stops waiting, not
// the job.
export async function followJob(job, onChange = () => {}, signal = undefined) {
  let current = job;
  onChange(current);
  while (current.state === "queued" || current.state === "running") {
    current = await get(`/api/jobs/${current.id}`, { after: current.seq, wait: 10 }, signal);
    onChange(current);
  }
  if (current.state === "done") return current.result;
  const error = new Error(current.state === "cancelled" ? "cancelled" : current.error);
  error.cancelled = current.state === "cancelled";
  throw error;
}

// What a job in the queue waits for, as a text.
export function waitingText(job) {
  return job.waits_for ? `waits for: ${job.waits_for}` : "waiting to start";
}

export function cancelJob(job) {
  return post("/api/jobs/cancel", { job: job.id });
}
