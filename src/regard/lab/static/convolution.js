// The Convolution page: heads that each attend to one offset compute a convolution, exactly in the limit of large α.
import { get, getFloats, post } from "./api.js";
import { ALPHAS, createErrorChart } from "./convolution/error_chart.js";
import { createImageEditor, imageFromText, imageToText } from "./convolution/image_editor.js";
import { createKernelGrid, isEntry, NAMES, namedKernel, resizedKernel, SIDES } from "./convolution/kernel_editor.js";
import { createOffsetHeads } from "./convolution/offset_heads.js";
import { createValueMap, cssColour } from "./convolution/value_maps.js";
import { debounce, element, formatNumber, sameNames, select, showMessage, slider } from "./dom.js";
import { onTheme } from "./theme.js";

const MODES = ["zeros", "reflect", "replicate", "circular"];
const STEPS = [1, 2, 3]; // of stride and dilation
const SLIDER_ALPHAS = [...ALPHAS, null]; // null means ∞
const CACHE_SIZE = 60;

// The field of the address if it is one of `choices`, else `otherwise`.
function numberFrom(state, name, choices, otherwise) {
  const value = state.number(name, otherwise);
  return choices.includes(value) ? value : otherwise;
}

function largestSize(values, smallest) {
  let largest = smallest;
  for (const value of values) largest = Math.max(largest, Math.abs(value));
  return largest;
}

export async function open(root, state) {
  const control = new AbortController(); // aborted when the page is left
  const start = await get("/api/convolution", {}, control.signal);
  const images = start.pictures;
  const settings = settingsFromAddress();
  let result = null;
  let hovered = null; // the output pixel under the pointer, as [row, column]
  let request = null;
  let headsRequest = null;
  const headsCache = new Map();

  // Controls

  const kernelList = select("kernel", [...sameNames(NAMES), ["own", "your own"]], "own", (name) => {
    if (name !== "own") change({ kernelName: name, kernel: namedKernel(name, settings.kernel.length) });
  });
  const sideList = select("side K", SIDES.map((side) => [String(side), `${side} × ${side}`]), "3", (text) => {
    const side = Number(text);
    const { kernelName, kernel } = settings;
    change({ kernel: kernelName === "own" ? resizedKernel(kernel, side) : namedKernel(kernelName, side) });
  });
  const kernelGrid = createKernelGrid((kernel) => change({ kernel, kernelName: "own" }));
  const imageList = select("image", [...sameNames(Object.keys(images)), ["own", "your own"]], "own", (name) => {
    if (name !== "own") change({ imageName: name, image: images[name] });
  });
  const imageEditor = createImageEditor((image) => change({ image, imageName: "own" }));
  const clearButton = element("button", { type: "button", text: "clear" });
  clearButton.addEventListener("click", () => {
    change({ image: settings.image.map((row) => row.map(() => 0)), imageName: "own" });
  });
  const modeList = select("padding", sameNames(MODES), settings.mode, (mode) => change({ mode }));
  const strideList = select("stride", sameNames(STEPS), "1", (stride) => change({ stride: Number(stride) }));
  const dilationList = select("dilation", sameNames(STEPS), "1", (dilation) => change({ dilation: Number(dilation) }));
  const formatAlpha = (alpha) => (alpha === null ? "∞, exact" : String(alpha));
  const alphaIndex = SLIDER_ALPHAS.indexOf(settings.alpha);
  const alphaSlider = slider("α, soft to hard", SLIDER_ALPHAS, alphaIndex, formatAlpha, (alpha) => change({ alpha }));

  // Results

  const inputMap = createValueMap("image, padded", { name: "input" });
  const convolutionMap = createValueMap("convolution", { name: "convolution", onSelect: selectPixel });
  const attentionMap = createValueMap("attention", { name: "attention", onSelect: selectPixel });
  const differenceMap = createValueMap("difference", { name: "difference", onSelect: selectPixel });
  const outputMaps = [convolutionMap, attentionMap, differenceMap];
  const sumMap = createValueMap("all heads together: Σ W·A", { name: "together" });
  const heads = createOffsetHeads((head) => showMarks(head));
  const errorChart = createErrorChart();
  const readout = element("p", { className: "readout", role: "status" });
  const largestDifference = element("p", { className: "largest", role: "status" });
  const errorText = element("p", { className: "error", role: "alert" });

  function settingsFromAddress() {
    const settingsRead = {
      mode: MODES.includes(state.get("mode")) ? state.get("mode") : "zeros",
      stride: numberFrom(state, "stride", STEPS, 1),
      dilation: numberFrom(state, "dilation", STEPS, 1),
      alpha: state.get("alpha", "1") === "inf" ? null : numberFrom(state, "alpha", ALPHAS, 1),
      pixel: [3, 3], // the locked output pixel
    };

    // The kernel is a name, or its entries.
    const kernelText = state.get("kernel", "edge across");
    const entries = kernelText.split(",").map(Number);
    const side = Math.sqrt(entries.length);
    if (SIDES.includes(side) && entries.every(isEntry)) {
      settingsRead.kernelName = state.get("from") === "random" ? "random" : "own";
      settingsRead.kernel = [];
      for (let i = 0; i < side; i++) settingsRead.kernel.push(entries.slice(i * side, (i + 1) * side));
    } else {
      settingsRead.kernelName = NAMES.includes(kernelText) ? kernelText : "edge across";
      settingsRead.kernel = namedKernel(settingsRead.kernelName, numberFrom(state, "k", SIDES, 3));
    }

    // The image is a name, or its pixels.
    const defaultImage = Object.keys(images)[3];
    const imageText = state.get("picture", defaultImage);
    const pixels = imageFromText(imageText);
    if (pixels) {
      settingsRead.imageName = "own";
      settingsRead.image = pixels;
    } else {
      settingsRead.imageName = Object.hasOwn(images, imageText) ? imageText : defaultImage;
      settingsRead.image = images[settingsRead.imageName];
    }

    const [row, column] = state.get("at", "3,3").split(",").map(Number);
    if (Number.isInteger(row) && Number.isInteger(column)) settingsRead.pixel = [row, column];
    return settingsRead;
  }

  // Fields with their initial value are left out of the address.
  function writeAddress() {
    const { kernelName, kernel, imageName, image, mode, stride, dilation, alpha, pixel } = settings;
    const hasEntries = kernelName === "own" || kernelName === "random";
    state.set({
      kernel: hasEntries ? kernel.flat().join(",") : kernelName,
      from: kernelName === "random" ? "random" : "",
      k: kernel.length,
      picture: imageName === "own" ? imageToText(image) : imageName,
      mode: mode === "zeros" ? "" : mode,
      stride: stride === 1 ? "" : stride,
      dilation: dilation === 1 ? "" : dilation,
      alpha: alpha === null ? "inf" : alpha,
      at: pixel.join(","),
    });
  }

  function change(values) {
    Object.assign(settings, values);
    if (!isPossible(settings.mode)) {
      showMessage(`Padding is now zeros: ${whyImpossible(settings.mode)}.`);
      settings.mode = "zeros";
    }
    showControls();
    writeAddress();
    computeLater();
  }

  function paddedPixels() {
    const total = settings.dilation * (settings.kernel.length - 1);
    return settings.stride === 1 ? Math.ceil(total / 2) : Math.floor(total / 2);
  }

  function shorterSide() {
    return Math.min(settings.image.length, settings.image[0].length);
  }

  // Reflected and circular padding copy pixels of the image, which must be large enough.
  function isPossible(mode) {
    if (mode === "reflect") return paddedPixels() < shorterSide();
    return mode !== "circular" || paddedPixels() <= shorterSide();
  }

  function whyImpossible(mode) {
    return `${mode} would copy ${paddedPixels()} pixels per side from an image of ${shorterSide()}`;
  }

  function showControls() {
    kernelList.querySelector("select").value = settings.kernelName;
    sideList.querySelector("select").value = String(settings.kernel.length);
    kernelGrid.show(settings.kernel);
    imageList.querySelector("select").value = settings.imageName;
    imageEditor.show(settings.image);
    modeList.querySelector("select").value = settings.mode;
    for (const option of modeList.querySelectorAll("option")) {
      option.disabled = !isPossible(option.value);
      // A disabled option shows no tooltip on phones, so its text has the reason.
      option.textContent = option.disabled ? `${option.value} (image too small)` : option.value;
    }
    strideList.querySelector("select").value = String(settings.stride);
    dilationList.querySelector("select").value = String(settings.dilation);
    alphaSlider.put(settings.alpha);
  }

  function selectPixel(row, column, lock) {
    hovered = row === null ? null : [row, column];
    if (lock) {
      settings.pixel = [row, column];
      writeAddress();
    }
    showMarks();
    showHeads();
  }

  // Everything but α.
  function requestFields() {
    const { kernel, image, mode, stride, dilation } = settings;
    return { kernel, picture: image, mode, stride, dilation };
  }

  async function compute() {
    request?.abort();
    request = new AbortController();
    const fields = requestFields();
    if (settings.alpha !== null) fields.alpha = settings.alpha;
    try {
      result = await post("/api/convolution/both", fields, request.signal);
      errorText.textContent = "";
      showResult();
      await showHeads();
      const shown = { k: settings.kernel.length, ...fields, picture: settings.imageName, alpha: settings.alpha ?? "inf" };
      root.dataset.shown = JSON.stringify(shown);
      showErrorsLater();
    } catch (error) {
      if (error.name !== "AbortError") errorText.textContent = error.message;
    }
  }
  const computeLater = debounce(compute, 60);

  // The chart waits until nothing changes, because it costs fifteen computations.
  const showErrorsLater = debounce(() => {
    if (control.signal.aborted) return;
    errorChart.show(requestFields(), settings.alpha).catch((error) => {
      errorText.textContent = error.message;
    });
  }, 250);

  function showResult() {
    const { convolution, attention, difference, padded, largest } = result;
    const maximum = largestSize([...convolution.flat(), ...attention.flat()], 1e-9);
    const [row, column] = settings.pixel;
    settings.pixel = [Math.min(row, convolution.length - 1), Math.min(column, convolution[0].length - 1)];
    hovered = null;
    inputMap.show(padded, largestSize(padded.flat(), 1));
    convolutionMap.show(convolution, maximum);
    attentionMap.show(attention, maximum);
    differenceMap.show(difference, largest || 1);
    convolutionMap.setCaption(`−${formatNumber(maximum)} … ${formatNumber(maximum)}`);
    attentionMap.setCaption("the same colours");
    const range = `−${formatDifference(largest)} … ${formatDifference(largest)}`;
    differenceMap.setCaption(largest ? range : "0 everywhere");

    const value = element("strong", { dataset: { value: largest }, text: formatDifference(largest) });
    largestDifference.replaceChildren("Largest difference ", value);
    if (settings.alpha === null) {
      largestDifference.append(": each head has all its weight at its offset.");
    } else {
      const bound = element("strong", { dataset: { bound: result.bound }, text: formatDifference(result.bound) });
      largestDifference.append(", at most ", bound, " by the bound.");
    }
    showMarks();
  }

  // Mark the selected pixel, and on the image the pixels that the heads attend to. `head` is under the pointer.
  function showMarks(head = null) {
    if (!result) return;
    const { stride, kernel, image } = settings;
    const [row, column] = hovered ?? settings.pixel;
    const [top, left] = result.before;
    const halo = cssColour("--ground");
    const pixelMark = { row, column, colour: cssColour("--asked"), width: 2, halo };
    for (const map of outputMaps) map.mark([pixelMark], [row, column]);

    const imageFrame = {
      row: top, column: left, rows: image.length, columns: image[0].length,
      colour: cssColour("--quiet"), width: 1, dash: true,
    };
    const queryMark = { ...pixelMark, row: row * stride + top, column: column * stride + left };
    const taps = kernel.flat();
    const tapMarks = [];
    let pointedMark = null;
    for (const [index, [down, right]] of result.shifts.entries()) {
      const isPointed = index === head;
      const mark = {
        row: queryMark.row + down, column: queryMark.column + right, halo, dash: taps[index] === 0,
        colour: cssColour(isPointed ? "--asked" : "--good"), width: isPointed ? 3 : 1.5,
      };
      if (isPointed) pointedMark = mark;
      else tapMarks.push(mark);
    }
    const marks = [imageFrame, ...tapMarks, queryMark];
    if (pointedMark) marks.push(pointedMark); // above the others
    inputMap.mark(marks);

    const count = result.shifts.length === 1 ? "1 head attends" : `${result.shifts.length} heads attend`;
    inputMap.setCaption(`${count} from pixel ${row * stride + 1}, ${column * stride + 1}`);
    const convolution = formatNumber(result.convolution[row][column]);
    const attention = formatNumber(result.attention[row][column]);
    const difference = formatDifference(result.difference[row][column]);
    const values = `convolution ${convolution}, attention ${attention}, difference ${difference}`;
    readout.textContent = `Output ${row + 1}, ${column + 1}: ${values}.`;
  }

  // The weights of the heads from an output pixel; null if another pixel was selected meanwhile.
  async function loadHeadWeights(row, column) {
    const { kernel, image, stride, dilation, alpha } = settings;
    const fields = {
      size: kernel.length, height: image.length, width: image[0].length, row, column, stride, dilation, alpha: alpha ?? "",
    };
    const key = JSON.stringify(fields);
    headsRequest?.abort();
    if (headsCache.has(key)) return headsCache.get(key);
    headsRequest = new AbortController();
    try {
      const weights = await getFloats("/api/convolution/heads", fields, headsRequest.signal);
      if (headsCache.size > CACHE_SIZE) headsCache.clear();
      headsCache.set(key, weights);
      return weights;
    } catch (error) {
      if (error.name !== "AbortError") errorText.textContent = error.message;
      return null;
    }
  }

  async function showHeads() {
    if (!result) return;
    const [row, column] = hovered ?? settings.pixel;
    const weights = await loadHeadWeights(row, column);
    if (!weights || weights.shape[0] !== settings.kernel.length ** 2) return; // the kernel was changed meanwhile

    // The sum of the heads' weights, each multiplied by its tap, is the softened kernel.
    const [, height, width] = weights.shape;
    const sum = new Float64Array(height * width);
    for (const [head, tap] of settings.kernel.flat().entries()) {
      for (let i = 0; i < sum.length; i++) sum[i] += tap * weights.values[head * sum.length + i];
    }
    const sumRows = [];
    for (let i = 0; i < height; i++) sumRows.push([...sum.subarray(i * width, (i + 1) * width)]);
    const [top, left] = result.before;
    const query = [row * settings.stride, column * settings.stride];
    sumMap.show(sumRows, largestSize(sum, 1e-9));
    sumMap.mark([{ row: query[0] + top, column: query[1] + left, colour: cssColour("--asked"), width: 2 }]);
    const isHard = settings.alpha === null;
    sumMap.setCaption(isHard ? "the kernel itself" : "the kernel, softened");

    const spread = isHard ? "with all its weight there" : "and to pixels near it";
    const explanation = `Each head attends to one offset (down, right) from the query, ${spread}.`;
    heads.show({
      weights: weights.values, shape: weights.shape, kernel: settings.kernel, shifts: result.shifts,
      before: result.before, query, imageSize: [settings.image.length, settings.image[0].length],
      description: `${explanation} Point at a head to see its offset.`,
    });
    root.dataset.looked = `${row},${column}`;
  }

  const imagePanel = element("section", { className: "panel" },
    element("h2", { text: "Image" }),
    element("div", { className: "bar" }, imageList, clearButton),
    imageEditor.canvas,
    element("p", { className: "quiet", text: "Draw on it: a stroke paints, or erases if it starts on a painted pixel." }));
  if (start.missing) {
    imagePanel.append(element("p", { className: "quiet missing", text: `There are no digits: ${start.missing}` }));
  }
  root.append(
    element("div", { className: "controls" },
      element("section", { className: "panel" },
        element("h2", { text: "Kernel" }), element("div", { className: "bar" }, kernelList, sideList), kernelGrid),
      imagePanel,
      element("section", { className: "panel" },
        element("div", { className: "bar" }, modeList, strideList, dilationList))),
    element("div", { className: "results" },
      element("section", { className: "panel alpha" }, alphaSlider, largestDifference, errorText),
      element("section", { className: "panel" },
        element("div", { className: "maps" }, inputMap, ...outputMaps), readout),
      element("section", { className: "panel" },
        element("h2", { text: "Heads as offsets" }),
        element("div", { className: "looks" }, heads.box, sumMap), heads.description),
      errorChart));
  showControls();
  const stopListening = state.onChange(() => {
    Object.assign(settings, settingsFromAddress());
    showControls();
    computeLater();
  });
  const stopTheme = onTheme(() => {
    for (const map of [inputMap, ...outputMaps, sumMap]) map.redraw();
    kernelGrid.colour();
    imageEditor.redraw();
    showMarks();
    heads.redraw();
  });
  await compute();
  return () => {
    control.abort();
    request?.abort();
    headsRequest?.abort();
    errorChart.leave();
    stopListening();
    stopTheme();
  };
}

// A difference may be as small as rounding errors: 1.2·10⁻⁷.
function formatDifference(difference) {
  if (difference === 0) return "0";
  const sign = difference < 0 ? "−" : "";
  const size = Math.abs(difference);
  if (size >= 0.01) return sign + size.toPrecision(3);
  const [digits, exponent] = size.toExponential(1).split("e-");
  const superscript = [...exponent].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  return `${sign}${digits}·10⁻${superscript}`;
}
