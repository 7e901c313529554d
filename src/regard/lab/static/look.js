// The room «Look»: what heads do, from the grid of all of them down to one weight and why it is what it is.
import { followed, get, post } from "./api.js";
import { element, note } from "./dom.js";
import { makeAblate } from "./look/ablate.js";
import { makeAttend } from "./look/attend.js";
import { makeDetails } from "./look/details.js";
import { defaultHead, makeGrid } from "./look/grid.js";
import { makeHead } from "./look/head.js";
import { makeInput } from "./look/input.js";
import { makeMaps } from "./look/maps.js";
import { recordingOf } from "./look/pinned.js";
import { makeReading } from "./look/reading.js";
import { makeScores } from "./look/scores.js";
import { makeView } from "./look/view.js";
import { makeWhy } from "./look/why.js";

const named = new Map(); // model → its heads' kinds, for recordings that were asked for before they were known

export async function open(root, state) {
  const view = makeView(state, () => root.contains(input));
  view.workspace = { models: [], recordings: [], runs: [] };
  const gone = new AbortController();
  view.gone = gone.signal;
  const part = (kind, className, label) => element(kind, { className, "aria-label": label });
  const input = part("section", "input", "input and recordings");
  const grid = part("section", "panel overview", "all heads");
  const ablate = part("section", "panel ablate", "ablation");
  const head = part("section", "head-line", "picked head");
  const scores = part("section", "panel scores bar", "how scores are made");
  const maps = part("section", "map-part", "map of weights");
  const why = part("section", "panel why", "why this number");
  const reading = part("section", "panel reading", "weights on the text");
  const details = part("section", "details", "more of this head");
  const naming = element("p", { className: "quiet naming", role: "status", hidden: true });
  const left = element("div", { className: "left" }, grid, ablate);
  const right = element("div", { className: "right" }, head, scores, element("div", { className: "around" }, maps, why), reading, details);
  const body = element("div", { className: "body", hidden: true }, left, right);
  root.append(input, body);
  const ends = [];

  async function reload() {
    view.change({ workspace: await get("/api/workspace", {}, gone.signal) });
  }

  // Show the recording that the address names, or the newest.
  async function show() {
    const known = view.workspace.recordings;
    if (!known.some((one) => one.id === view.recording)) {
      if (view.recording) note("This recording is not open any more.");
      // An address that names a head and no recording means the newest's.
      view.change({ recording: known.at(-1)?.id ?? "", ...(view.recording ? { place: null, head: null } : {}) });
    }
    const { recording } = view;
    if (!recording) {
      body.hidden = true;
      return view.change({ found: null, input: true });
    }
    try {
      const found = await recordingOf(recording, gone.signal);
      if (view.recording !== recording) return;
      const place = found.places.find((one) => one.place === view.place);
      const fits = place?.heads.includes(view.head);
      body.hidden = false;
      view.change({ ...(fits ? {} : defaultHead(found)), found, hover: null, ablated: view.ablated.filter((id) => has(found, id)) });
      nameKinds(found);
    } catch (error) {
      if (error.name !== "AbortError") note(error.message, "error");
    }
  }

  const has = (found, id) => found.places.some((one) => id.startsWith(`${one.place}.`) && one.heads.includes(Number(id.split(".")[1])));

  // Kinds take a while: the heads are there before their names.
  async function nameKinds(found) {
    if (!found.kinds && named.has(found.model)) Object.assign(found, named.get(found.model));
    if (found.kinds || !found.model || found.naming) return view.change({ kinds: found.kinds });
    found.naming = true;
    naming.hidden = false;
    try {
      await followed(await post("/api/look/kinds", { model: found.model }, gone.signal), (job) => {
        naming.textContent = `naming heads by what they do on probes … ${job.of ? `${Math.round((100 * job.done) / job.of)} %` : ""}`;
      }, gone.signal);
      const { kinds, kind_columns } = await get("/api/look/recording", { recording: found.id }, gone.signal);
      named.set(found.model, { kinds, kind_columns });
      Object.assign(found, { kinds, kind_columns });
      if (view.found === found) view.change({ kinds });
    } catch (error) {
      if (error.name !== "AbortError" && !error.cancelled) note(`Heads could not be named: ${error.message}`, "error");
    }
    found.naming = false;
    naming.hidden = true;
  }

  function released(event) {
    const typing = event.target.closest?.("input, textarea, select, details[open]");
    if (event.key === "Escape" && !typing && view.lock) view.lock(null);
  }

  await reload().catch((error) => note(error.message, "error"));
  let last = view.recording;
  view.on("recording", () => {
    // Another text has other tokens; one that the address did not name is no other.
    if (last && !view.reloading) view.change({ row: null, key: null, weights: null, at: { u: 0.5, v: 0.5, z: 1 } });
    last = view.recording;
    show();
  });
  makeInput(input, view, reload);
  const shownMaps = makeMaps(maps, view);
  ends.push(makeGrid(grid, view), () => shownMaps.close());
  grid.append(naming);
  makeHead(head, view, shownMaps.map);
  makeScores(scores, view);
  ends.push(makeWhy(why, view), makeReading(reading, view), makeDetails(details, view), makeAttend(view));
  makeAblate(ablate, view);
  document.addEventListener("keydown", released);
  ends.push(state.onChange(() => view.reload()), () => document.removeEventListener("keydown", released));
  await show();
  return () => {
    gone.abort();
    view.close();
    for (const end of ends) end();
  };
}
