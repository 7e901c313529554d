// The room «convolution»: heads that each look at one offset are a convolution, exactly in the limit of large α.
import { floats, get, post } from "./api.js";
import { element, said, select, settled, slider } from "./dom.js";
import { onTheme } from "./theme.js";
import { ALPHAS, chart } from "./convolution/chart.js";
import { heads } from "./convolution/heads.js";
import { NAMES, SIDES, grid, named, resized } from "./convolution/kernels.js";
import { css, map } from "./convolution/maps.js";
import { editor, fromText, toText } from "./convolution/picture.js";

const MODES = ["zeros", "reflect", "replicate", "circular"];
const STEPS = [1, 2, 3];
const SOFTEST = [...ALPHAS, null]; // null: ∞

export async function open(root, state) {
  const leaving = new AbortController();
  const start = await get("/api/convolution", {}, leaving.signal);
  const now = fromState();
  let answer = null;
  let maps = null; // the heads' weights, from the pixel that is looked at
  let hovered = null;
  let asking = null;
  let looking = null;

  // Controls
  const kernels = select("kernel", [...NAMES.map((x) => [x, x]), ["own", "your own"]], "own", (name) => {
    if (name !== "own") set({ kernelName: name, kernel: named(name, now.kernel.length) });
  });
  const sides = select("side K", SIDES.map((x) => [String(x), `${x} × ${x}`]), "3", (text) => {
    const side = Number(text);
    const name = now.kernelName;
    set({ kernel: name === "own" ? resized(now.kernel, side) : named(name, side) });
  });
  const written = grid((kernel) => set({ kernel, kernelName: "own" }));
  const pictures = select("picture", [...Object.keys(start.pictures).map((x) => [x, x]), ["own", "your own"]], "own", (name) => {
    if (name !== "own") set({ pictureName: name, picture: start.pictures[name] });
  });
  const drawn = editor((picture) => set({ picture, pictureName: "own" }));
  const clear = element("button", { type: "button", text: "clear", on: { click: () => set({ picture: now.picture.map((row) => row.map(() => 0)), pictureName: "own" }) } });
  const modes = select("padding", MODES.map((x) => [x, x]), now.mode, (mode) => set({ mode }));
  const strides = select("stride", STEPS.map((x) => [String(x), String(x)]), "1", (x) => set({ stride: Number(x) }));
  const dilations = select("dilation", STEPS.map((x) => [String(x), String(x)]), "1", (x) => set({ dilation: Number(x) }));
  const softness = slider("α, soft to hard", SOFTEST, SOFTEST.indexOf(now.alpha), (x) => (x === null ? "∞, exact" : String(x)), (alpha) => set({ alpha }));

  // Results
  const pick = (row, column, lock) => {
    hovered = row === null ? null : [row, column];
    if (lock) { now.at = [row, column]; remember(); }
    mark();
    look();
  };
  const seen = map("picture, padded", { name: "input" });
  const right = map("convolution", { name: "convolution", pick });
  const found = map("attention", { name: "attention", pick });
  const off = map("difference", { name: "difference", pick });
  const readout = element("p", { className: "readout", role: "status" });
  const sum = map("all heads together: Σ W·A", { name: "together" });
  const each = heads((h) => mark(h));
  const lines = chart();
  const why = element("p", { className: "error", role: "alert" });
  const largest = element("p", { className: "largest", role: "status" });

  function fromState() {
    const side = SIDES.includes(state.number("k", 3)) ? state.number("k", 3) : 3;
    const kernelText = state.get("kernel", "edge across");
    const numbers = kernelText.split(",").map(Number);
    const whole = Math.sqrt(numbers.length);
    const own = SIDES.includes(whole) && numbers.every((x) => Number.isFinite(x) && Math.abs(x) <= 1000);
    const name = NAMES.includes(kernelText) ? kernelText : "edge across";
    const kernel = own ? Array.from({ length: whole }, (_, i) => numbers.slice(i * whole, (i + 1) * whole)) : named(name, side);
    const pictureText = state.get("picture", Object.keys(start.pictures)[3]);
    const pixels = fromText(pictureText);
    const pictureName = Object.hasOwn(start.pictures, pictureText) ? pictureText : Object.keys(start.pictures)[3];
    const [row, column] = state.get("at", "3,3").split(",").map(Number);
    const alpha = state.get("alpha", "1") === "inf" ? null : SOFTEST.includes(state.number("alpha", 1)) ? state.number("alpha", 1) : 1;
    return {
      kernelName: own ? (state.get("from") === "random" ? "random" : "own") : name, kernel, pictureName: pixels ? "own" : pictureName,
      picture: pixels ?? start.pictures[pictureName], mode: MODES.includes(state.get("mode")) ? state.get("mode") : "zeros",
      stride: STEPS.includes(state.number("stride", 1)) ? state.number("stride", 1) : 1,
      dilation: STEPS.includes(state.number("dilation", 1)) ? state.number("dilation", 1) : 1,
      alpha, at: Number.isInteger(row) && Number.isInteger(column) ? [row, column] : [3, 3],
    };
  }
  function remember() {
    const numbers = now.kernelName === "own" || now.kernelName === "random";
    state.set({
      kernel: numbers ? now.kernel.flat().join(",") : now.kernelName, from: now.kernelName === "random" ? "random" : "",
      k: now.kernel.length, picture: now.pictureName === "own" ? toText(now.picture) : now.pictureName, mode: now.mode === "zeros" ? "" : now.mode,
      stride: now.stride === 1 ? "" : now.stride, dilation: now.dilation === 1 ? "" : now.dilation,
      alpha: now.alpha === null ? "inf" : now.alpha, at: now.at.join(","),
    });
  }

  function set(change) {
    Object.assign(now, change);
    if (!possible(now.mode)) now.mode = "zeros";
    controls();
    remember();
    compute();
  }
  // Reflected and wrapped padding takes what it needs from the picture itself.
  function possible(mode) {
    const total = now.dilation * (now.kernel.length - 1);
    const widest = now.stride === 1 ? Math.ceil(total / 2) : Math.floor(total / 2);
    const least = Math.min(now.picture.length, now.picture[0].length);
    return mode === "reflect" ? widest < least : mode !== "circular" || widest <= least;
  }
  function controls() {
    kernels.querySelector("select").value = now.kernelName;
    sides.querySelector("select").value = String(now.kernel.length);
    written.show(now.kernel);
    pictures.querySelector("select").value = now.pictureName;
    drawn.show(now.picture);
    modes.querySelector("select").value = now.mode;
    for (const option of modes.querySelectorAll("option")) option.disabled = !possible(option.value);
    strides.querySelector("select").value = String(now.stride);
    dilations.querySelector("select").value = String(now.dilation);
    softness.put(now.alpha);
  }

  const setting = () => ({ kernel: now.kernel, picture: now.picture, mode: now.mode, stride: now.stride, dilation: now.dilation });

  async function run() {
    asking?.abort();
    asking = new AbortController();
    const body = { ...setting(), ...(now.alpha === null ? {} : { alpha: now.alpha }) };
    try {
      answer = await post("/api/convolution/both", body, asking.signal);
      why.textContent = "";
      show();
      await look();
      root.dataset.shown = JSON.stringify({ k: now.kernel.length, ...body, picture: now.pictureName, alpha: now.alpha ?? "inf" });
      sweep();
    } catch (error) {
      if (error.name !== "AbortError") why.textContent = error.message;
    }
  }
  const compute = settled(run, 60);
  // Once nothing has changed for a while: fifteen α cost more than one.
  const sweep = settled(() => {
    if (!leaving.signal.aborted) lines.show(setting(), now.alpha).catch((error) => { why.textContent = error.message; });
  }, 250);

  function show() {
    const most = Math.max(...answer.convolution.flat().map(Math.abs), ...answer.attention.flat().map(Math.abs), 1e-9);
    now.at = [Math.min(now.at[0], answer.convolution.length - 1), Math.min(now.at[1], answer.convolution[0].length - 1)];
    hovered = null;
    seen.show(answer.padded, { largest: Math.max(1, ...answer.padded.flat().map(Math.abs)) });
    right.show(answer.convolution, { largest: most });
    found.show(answer.attention, { largest: most });
    off.show(answer.difference, { largest: answer.largest || 1 });
    right.say(`−${said(most)} … ${said(most)}`);
    found.say("the same colours");
    off.say(answer.largest ? `−${exactly(answer.largest)} … ${exactly(answer.largest)}` : "0 everywhere");
    largest.replaceChildren("Largest difference ", element("strong", { dataset: { value: answer.largest }, text: exactly(answer.largest) }),
      now.alpha === null ? ": each head has all its weight at its offset." : ", at most ", now.alpha === null ? "" : element("strong", { dataset: { bound: answer.bound }, text: exactly(answer.bound) }),
      now.alpha === null ? "" : " by the bound.");
    mark();
  }

  function mark(head = null) {
    if (!answer) return;
    const [row, column] = hovered ?? now.at;
    const here = [{ row, column, colour: css("--asked"), width: 2, halo: css("--ground") }];
    for (const box of [right, found, off]) box.mark(here, [row, column]);
    const [top, left] = answer.before;
    const taps = answer.shifts.map(([dy, dx], h) => ({
      row: row * now.stride + dy + top, column: column * now.stride + dx + left, halo: css("--ground"),
      colour: h === head ? css("--asked") : css("--good"), width: h === head ? 3 : 1.5, dash: now.kernel.flat()[h] === 0,
    }));
    const frame = { row: top, column: left, rows: now.picture.length, columns: now.picture[0].length, colour: css("--quiet"), width: 1, dash: true };
    seen.mark([frame, ...taps.filter((_, h) => h !== head), { ...here[0], row: row * now.stride + top, column: column * now.stride + left }, ...taps.filter((_, h) => h === head)]);
    seen.say(`${answer.shifts.length} ${answer.shifts.length === 1 ? "head looks" : "heads look"} from pixel ${row * now.stride + 1}, ${column * now.stride + 1}`);
    const [a, b] = [answer.convolution[row][column], answer.attention[row][column]];
    readout.textContent = `Output ${row + 1}, ${column + 1}: convolution ${said(a)}, attention ${said(b)}, difference ${exactly(answer.difference[row][column])}.`;
  }

  // The heads' weights from the pixel that is looked at.
  const kept = new Map();
  async function look() {
    if (!answer) return;
    const [row, column] = hovered ?? now.at;
    const fields = { size: now.kernel.length, height: now.picture.length, width: now.picture[0].length, row, column,
      stride: now.stride, dilation: now.dilation, alpha: now.alpha ?? "" };
    const key = JSON.stringify(fields);
    looking?.abort();
    if (!kept.has(key)) {
      looking = new AbortController();
      try {
        const got = await floats("/api/convolution/heads", fields, looking.signal);
        if (kept.size > 60) kept.clear();
        kept.set(key, got);
      } catch (error) {
        if (error.name !== "AbortError") why.textContent = error.message;
        return;
      }
    }
    maps = kept.get(key);
    if (maps.shape[0] !== now.kernel.length ** 2) return;
    const [count, height, width] = maps.shape;
    const together = new Float64Array(height * width);
    for (let h = 0; h < count; h++) {
      const entry = now.kernel.flat()[h];
      for (let i = 0; i < together.length; i++) together[i] += entry * maps.values[h * together.length + i];
    }
    const rows = Array.from({ length: height }, (_, i) => [...together.subarray(i * width, (i + 1) * width)]);
    sum.show(rows, { largest: Math.max(...together.map(Math.abs), 1e-9) });
    sum.mark([{ row: row * now.stride + answer.before[0], column: column * now.stride + answer.before[1], colour: css("--asked"), width: 2 }]);
    sum.say(now.alpha === null ? "the kernel itself" : "the kernel, softened");
    const soft = now.alpha === null ? "each has all its weight there" : "and softly around it";
    each.show({ weights: maps.values, shape: maps.shape, kernel: now.kernel, shifts: answer.shifts, before: answer.before,
      place: [row * now.stride, column * now.stride], picture: [now.picture.length, now.picture[0].length],
      words: `Each head looks at one offset (down, right) from the query, ${soft}. Point at one to see where.` });
    root.dataset.looked = `${row},${column}`;
  }

  root.append(
    element("div", { className: "controls" },
      element("section", { className: "panel" }, element("h2", { text: "Kernel" }), element("div", { className: "bar" }, kernels, sides), written),
      element("section", { className: "panel" }, element("h2", { text: "Picture" }), element("div", { className: "bar" }, pictures, clear), drawn.canvas,
        element("p", { className: "quiet", text: "Draw on it: a stroke paints, or erases where it begins on ink." }),
        start.missing ? element("p", { className: "quiet missing", text: `No digits: ${start.missing}` }) : null),
      element("section", { className: "panel" }, element("div", { className: "bar" }, modes, strides, dilations))),
    element("div", { className: "results" },
      element("section", { className: "panel alpha" }, softness, largest, why),
      element("section", { className: "panel" }, element("div", { className: "maps" }, seen, right, found, off), readout),
      element("section", { className: "panel" }, element("h2", { text: "Heads as offsets" }), element("div", { className: "looks" }, each.box, sum), each.words),
      lines),
  );
  controls();
  const stop = state.onChange(() => { Object.assign(now, fromState()); controls(); compute(); });
  const retheme = onTheme(() => {
    for (const one of [seen, right, found, off, sum]) one.again();
    written.colour();
    drawn.again();
    mark();
    each.again();
  });
  await run();
  return () => {
    leaving.abort();
    asking?.abort();
    looking?.abort();
    lines.leave();
    stop();
    retheme();
  };
}

// A difference: its size matters, down to rounding.
function exactly(x) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 0.01 ? size.toPrecision(3) : size.toExponential(1);
  return `${x < 0 ? "−" : ""}${text.replace("e-", " · 10^−").replace(/\^−(\d+)/, (_, n) => `⁻${[...n].map((d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]).join("")}`)}`.replace(" · ", "·");
}
