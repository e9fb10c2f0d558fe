// One card per image: picture, classes, neighbours or objects.
import type { Classification, Description, Detected, Detection, Embedding, Image, Times } from "../../package/src/inline.js";
import { similarity } from "../../package/src/similarity.js";
import { formatThreads, formatTime, make } from "./dom.js";

export interface Answer {
  readonly classification: Classification | null;
  readonly embedding: Embedding | null;
  readonly detection: Detection | null;
  readonly times: Times;
}

/** An image of the page. answer: null while it waits for the model */
export interface Entry {
  readonly file: File;
  readonly address: string;
  readonly element: HTMLElement;
  answer: Answer | null;
  pixels: string | null;
}

const NEIGHBOURS = 5;
const SMALL = 128; // pixels: pictures up to this size are enlarged without smoothing
const CANVAS_SIDE = 1200; // pixels: the longer side of drawn images, so that labels are legible on small and large images
const COLORS = ["#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000"];

/** Show a card while its image waits. */
export function showWaiting(entry: Entry): void {
  entry.element.className = "card";
  entry.element.replaceChildren(picture(entry), make("div", {}, make("h3", {}, entry.file.name), make("p", {}, "Waiting …")));
}

/** Show the answer of the model. */
export function showAnswer(entry: Entry, answer: Answer, image: Image, description: Description): void {
  const { classification, detection } = answer;
  const { preprocess, run } = answer.times;
  const time = `${formatTime(run)} per image${preprocess > 0 ? `, preprocessing ${formatTime(preprocess)}` : ""} (${description.instructionSet}, ${formatThreads(description.threads)})`;
  const about = make("div", {}, make("h3", {}, entry.file.name), make("p", { class: "hint" }, `${image.width} x ${image.height} pixels, ${time}`));
  if (classification !== null) about.append(classes(classification));
  if (answer.embedding !== null) about.append(make("div", { class: "near" }));
  if (classification === null && answer.embedding === null && detection === null) about.append(outputs(description));
  if (detection !== null) about.append(objects(detection.objects));
  const view = detection === null ? picture(entry) : drawn(image, detection.objects, entry.file.name);
  entry.element.className = `card${detection === null ? "" : " wide"}${Math.max(image.width, image.height) <= SMALL ? " small" : ""}`;
  entry.element.replaceChildren(view, about);
}

function picture(entry: Entry): HTMLElement {
  return make("img", { class: "picture", src: entry.address, alt: entry.file.name });
}

function classes(classification: Classification): HTMLElement {
  const rows = classification.top.map((one) => {
    const bar = make("th", { scope: "row", class: "bar", style: `--share: ${one.probability.toFixed(4)}` }, make("span", {}, one.name ?? `class ${one.class}`));
    return make("tr", {}, bar, cell(`${(100 * one.probability).toFixed(1)} %`), cell(one.logit.toFixed(2)), cell(String(one.integer)));
  });
  const head = make("tr", {}, make("th", { scope: "col" }, "class"), head_("probability"), head_("logit"), head_("integer"));
  return make("table", {}, make("caption", {}, `Best ${rows.length} of ${classification.logits.data.length} classes`), make("thead", {}, head), make("tbody", {}, ...rows));
}

function cell(text: string): HTMLElement {
  return make("td", { class: "number" }, text);
}

function head_(text: string): HTMLElement {
  return make("th", { scope: "col", class: "number" }, text);
}

function outputs(description: Description): HTMLElement {
  const names = description.outputs.map((output) => `${output.name} ${output.dtype} [${output.shape.join(", ")}]`).join("; ");
  return make("p", {}, `Outputs: ${names}`);
}

function objects(found: readonly Detected[]): HTMLElement {
  if (found.length === 0) return make("p", {}, "No objects found.");
  const rows = found.map((one, i) => {
    const box = one.box.map((value) => value.toFixed(0)).join(", ");
    const mark = make("span", { style: `color: ${colorOf(i)}`, "aria-hidden": "true" }, "■ ");
    return make("tr", {}, make("th", { scope: "row" }, mark, one.name ?? `class ${one.class}`), cell(`${(100 * one.score).toFixed(1)} %`), cell(box));
  });
  const head = make("tr", {}, make("th", { scope: "col" }, "object"), head_("score"), head_("box in pixels"));
  return make("table", {}, make("caption", {}, `${found.length} objects`), make("thead", {}, head), make("tbody", {}, ...rows));
}

function colorOf(i: number): string {
  return COLORS[i % COLORS.length] as string;
}

/** Draw the image with its masks and boxes. */
function drawn(image: Image, found: readonly Detected[], name: string): HTMLElement {
  const scale = CANVAS_SIDE / Math.max(image.width, image.height);
  const [width, height] = [Math.max(1, Math.round(image.width * scale)), Math.max(1, Math.round(image.height * scale))];
  const canvas = make("canvas", { class: "picture", role: "img", "aria-label": `${name} with ${found.length} objects` }) as HTMLCanvasElement;
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  if (context === null) return canvas;
  const full = new OffscreenCanvas(image.width, image.height);
  full.getContext("2d")?.putImageData(colored(image, found), 0, 0);
  context.imageSmoothingEnabled = scale < 2;
  context.drawImage(full, 0, 0, width, height);
  const size = CANVAS_SIDE / 60;
  context.lineWidth = CANVAS_SIDE / 400;
  context.font = `${size}px system-ui, sans-serif`;
  found.forEach(({ box: [x1, y1, x2, y2], name: label, class: number, score }, i) => {
    context.strokeStyle = context.fillStyle = colorOf(i);
    context.strokeRect(x1 * scale, y1 * scale, (x2 - x1) * scale, (y2 - y1) * scale);
    const text = `${label ?? `class ${number}`} ${(100 * score).toFixed(0)} %`;
    const top = Math.max(0, y1 * scale - size - 6);
    context.fillRect(x1 * scale, top, context.measureText(text).width + 8, size + 6);
    context.fillStyle = "#ffffff";
    context.fillText(text, x1 * scale + 4, top + size);
  });
  return canvas;
}

/** Return the pixels as RGBA, with the masks blended in. */
function colored(image: Image, found: readonly Detected[]): ImageData {
  const pixels = image.width * image.height;
  const channels = image.data.length / pixels;
  const out = new ImageData(image.width, image.height);
  for (let i = 0; i < pixels; i++) {
    for (let c = 0; c < 3; c++) out.data[4 * i + c] = image.data[channels * i + (channels === 1 ? 0 : c)] as number;
    out.data[4 * i + 3] = 255;
  }
  found.forEach(({ mask }, number) => {
    const color = [1, 3, 5].map((at) => parseInt(colorOf(number).slice(at, at + 2), 16));
    for (let i = 0; mask !== null && i < pixels; i++) {
      for (let c = 0; mask[i] === 1 && c < 3; c++) out.data[4 * i + c] = ((out.data[4 * i + c] as number) + (color[c] as number)) >> 1;
    }
  });
  return out;
}

/** For every image with an embedding, show the other images that are most similar to it. */
export function showNeighbours(entries: readonly Entry[]): void {
  const embedded = entries.filter((entry) => entry.answer?.embedding);
  for (const entry of embedded) {
    const box = entry.element.querySelector(".near");
    const query = entry.answer?.embedding;
    if (box === null || !query) continue;
    const near = embedded
      .filter((other) => other !== entry)
      .map((other) => ({ other, cosine: similarity(other.answer?.embedding ?? query, query) }))
      .sort((a, b) => b.cosine - a.cosine)
      .slice(0, NEIGHBOURS);
    if (near.length === 0) {
      box.replaceChildren(make("p", { class: "hint" }, `Embedding: ${query.data.length} values. Add more images to see the most similar ones.`));
      continue;
    }
    const items = near.map(({ other, cosine }) =>
      make("li", {}, make("img", { src: other.address, alt: "" }), `${cosine.toFixed(3)} ${other.file.name}`));
    box.replaceChildren(make("h4", { class: "hint" }, "Most similar images, by cosine similarity of their embeddings"), make("ol", { class: "neighbours" }, ...items));
  }
}
