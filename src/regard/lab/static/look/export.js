// Files to download: the visible map (PNG, SVG), the observables of all heads (CSV, JSON), an offline page (HTML).
import { urlOf } from "../api.js";
import { download, element, showMessage } from "../dom.js";
import { mapFigure } from "./map_figure.js";

const PNG_SCALE = 3; // pixels of the PNG per pixel of the screen

export function exportMenu(view, map) {
  const items = element("div", { className: "items" });
  const menu = element("details", { className: "menu" }, element("summary", { text: "export" }), items);

  function addButton(text, title, save) {
    const button = element("button", { type: "button", text, title });
    button.addEventListener("click", () => {
      menu.open = false;
      if (map.source) save(fileName(), () => drawFigure(map, figureTitle(), view.hideSinks));
      else showMessage("There is no map to save yet.");
    });
    items.append(button);
  }

  function addLink(text, title, format) {
    const link = element("a", { text, title, download: "", href: "#" });
    link.addEventListener("click", () => {
      const fields = { recording: view.recording, format };
      // The offline page starts with the head that is shown here.
      if (view.head !== null) Object.assign(fields, { place: view.layerIndex, head: view.head });
      link.href = urlOf("/api/look/export", fields);
      menu.open = false;
    });
    items.append(link);
  }

  function fileName() {
    return mapFileName(view.description.title, view.layerIndex, view.head);
  }

  function figureTitle() {
    return `${view.description.title} · layer ${view.layerIndex} · head ${view.head}`;
  }

  addButton("map as PNG", "the visible part of the map, with labels and scale", savePng);
  addButton("map as SVG", "the visible part of the map, with labels and scale as text", saveSvg);
  addLink("heads as CSV", "the observables and types of every head", "csv");
  addLink("heads as JSON", "the observables and types of every head", "json");
  addLink("offline page (HTML)", "all heads in one file that opens in any browser", "html");
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) menu.open = false;
  });
  return menu;
}

// Letters of every script stay. A name must not begin with "-" or ".": commands would read it as an option.
export function mapFileName(title, layerIndex, head) {
  const name = title.replace(/[^\p{L}\p{M}\p{N}._-]+/gu, "-").replace(/^[-.]+|[-.]+$/g, "");
  return `${name || "map"}-${layerIndex}.${head}`;
}

// The figure of the map. Marks of the locked cell and of the pointer are not part of it.
function drawFigure(map, title, hideSinks) {
  const { marks } = map;
  map.marks = {};
  map.draw();
  const figure = mapFigure(map, title, hideSinks);
  map.marks = marks;
  map.redraw();
  const text = new XMLSerializer().serializeToString(figure.svg);
  return { ...figure, blob: new Blob([text], { type: "image/svg+xml" }) };
}

function saveSvg(name, draw) {
  download(`${name}.svg`, draw().blob);
}

// The PNG is the same figure, with enough pixels for print.
function savePng(name, draw) {
  const { blob, width, height } = draw();
  const image = new Image();
  const url = URL.createObjectURL(blob);
  image.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = width * PNG_SCALE;
    canvas.height = height * PNG_SCALE;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    URL.revokeObjectURL(url);
    canvas.toBlob((png) => download(`${name}.png`, png), "image/png");
  };
  image.onerror = () => {
    URL.revokeObjectURL(url);
    showMessage("The map could not be drawn as PNG; save it as SVG.", "error");
  };
  image.src = url;
}
