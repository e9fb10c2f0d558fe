// The page: files go in by drop, paste, choice, camera or sample; cards with results come out.
import EMBEDDED from "embedded-model";
import SAMPLES from "samples";
import { fromBase64 } from "../../package/src/base64.js";
import { messageOf } from "../../package/src/errors.js";
import { decodeImage, FqvitError, load, type FileSource, type Image, type Model } from "../../package/src/inline.js";
import { isVector, rank } from "../../package/src/model.js";
import { setUpCamera } from "./camera.js";
import { type Answer, type Entry, showAnswer, showNeighbours, showWaiting } from "./cards.js";
import { compare, readAnswers } from "./compare.js";
import { byId, clearErrors, formatBytes, formatThreads, make, showError } from "./dom.js";

const MAX_CARDS = 100;
const MAX_PIXELS = 40_000_000;
const MIN_SCORE = 0.3;
const BEST = 5;

let model: Model | null = null;
let source: FileSource | null = null;
let loading = 0; // number of the last load: the results of earlier loads are ignored
let isWorking = false;
const entries: Entry[] = []; // newest first

/** Show an error on the page. Anything but FqvitError is a bug, which is also reported to the console. */
function report(error: unknown): void {
  if (!(error instanceof FqvitError)) console.error(error);
  showError(messageOf(error));
}

async function use(from: FileSource, isEmbedded: boolean): Promise<void> {
  const turn = ++loading;
  model?.close();
  model = null;
  byId("model-state").textContent = "Loading …";
  byId("model-facts").hidden = true;
  try {
    const loaded = await load(from);
    if (turn !== loading) {
      loaded.close();
      return;
    }
    [model, source] = [loaded, from];
    showModel(loaded, isEmbedded);
    for (const entry of entries) entry.answer = null;
    entries.forEach(showWaiting);
    void work();
  } catch (error) {
    if (turn !== loading) return;
    byId("model-state").textContent = "No model is loaded.";
    byId("model-reset").hidden = false;
    byId("samples").hidden = true;
    report(error);
  }
}

function showModel({ description: found }: Model, isEmbedded: boolean): void {
  const facts = {
    model: found.model,
    kind: found.kind,
    fingerprint: make("span", { class: "mono" }, found.fingerprint),
    "instruction set": `WebAssembly ${found.instructionSet}, ${formatThreads(found.threads)}`,
    size: formatBytes(found.fileBytes),
    images: found.preprocessing,
    ...(found.outputs.length > 0 ? { outputs: found.outputs.map((one) => `${one.name} [${one.shape.join(", ")}]`).join(", ") } : {}),
    ...(found.classes.length > 0 ? { classes: String(found.classes.length) } : {}),
  };
  byId("model-facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  byId("model-facts").hidden = false;
  byId("model-state").textContent = isEmbedded ? "The embedded model is ready." : "The model is ready.";
  byId("model-reset").hidden = isEmbedded;
  byId("samples").hidden = !isEmbedded;
  byId("compare").hidden = byId("compare-hint").hidden = found.kind !== "classifier";
  byId("comparison").replaceChildren();
}

function embeddedModel(): File {
  return new File([fromBase64(EMBEDDED.base64)], EMBEDDED.name);
}

/** Process all waiting images, oldest first. */
async function work(): Promise<void> {
  if (isWorking) return;
  isWorking = true;
  byId("stop").hidden = false;
  for (;;) {
    const current = model;
    const entry = current === null ? undefined : entries.findLast((one) => one.answer === null);
    if (current === null || entry === undefined) break;
    try {
      const image = await decodeImage(entry.file, { maxPixels: MAX_PIXELS });
      const answer = await answerOf(current, image, entry);
      if (current !== model || !entries.includes(entry)) continue; // the model or the image is gone
      entry.answer = answer;
      showAnswer(entry, answer, image, current.description);
      showNeighbours(entries);
    } catch (error) {
      if (current !== model) continue;
      remove(entry);
      report(error instanceof FqvitError && !error.message.startsWith(entry.file.name) ? new FqvitError(`${entry.file.name}: ${error.message}`) : error);
      if (!current.isOpen) await reload();
    }
  }
  isWorking = false;
  byId("stop").hidden = true;
}

async function answerOf(current: Model, image: Image, entry: Entry): Promise<Answer> {
  const { description } = current;
  const none = { classification: null, embedding: null, detection: null };
  if (description.kind === "detector") {
    const detection = await current.detect(image, { masks: true, minScore: MIN_SCORE });
    return { ...none, detection, times: detection.times };
  }
  entry.pixels = await sha256(await current.preprocess(image));
  const { outputs, times } = await current.run(image); // once for all outputs
  const logits = outputs.find((output) => output.kind === "logits");
  const embedding = outputs.find(isVector);
  return {
    ...none,
    classification: logits === undefined ? null : { top: rank(logits, description.classes, BEST), logits, times },
    embedding: embedding === undefined ? null : { ...embedding, times },
    times,
  };
}

async function sha256(pixels: Uint8Array): Promise<string | null> {
  if (globalThis.crypto?.subtle === undefined) return null; // not available on a page served by another machine over plain http
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", pixels as Uint8Array<ArrayBuffer>));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Load the same model again after its worker has ended. */
async function reload(): Promise<void> {
  const again = source;
  if (again === null) return;
  const turn = ++loading;
  model = null;
  try {
    const loaded = await load(again);
    if (turn === loading) model = loaded;
    else loaded.close();
  } catch (error) {
    byId("model-state").textContent = "No model is loaded.";
    report(error);
  }
}

function add(file: File): void {
  const entry: Entry = { file, address: URL.createObjectURL(file), element: make("li", { class: "card" }), answer: null, pixels: null };
  entries.unshift(entry);
  showWaiting(entry);
  byId("cards").prepend(entry.element);
  while (entries.length > MAX_CARDS) remove(entries[entries.length - 1] as Entry);
  showCount();
  void work();
}

function remove(entry: Entry): void {
  const at = entries.indexOf(entry);
  if (at >= 0) entries.splice(at, 1);
  URL.revokeObjectURL(entry.address);
  entry.element.remove();
  showNeighbours(entries);
  showCount();
}

function showCount(): void {
  byId("empty").hidden = entries.length > 0;
  byId("clear").hidden = entries.length === 0;
}

async function compareWith(file: File): Promise<void> {
  if (model === null) throw new FqvitError(`${file.name}: no model is loaded to compare it with. Choose a model first.`);
  const answers = await readAnswers(file);
  const images = entries.map((entry) => ({ name: entry.file.name, logits: entry.answer?.classification?.logits ?? null, pixels: entry.pixels }));
  const lines = compare(model.description.fingerprint, images, answers).map(({ isEqual, text }) => make("p", { class: `message ${isEqual ? "good" : "error"}` }, text));
  byId("comparison").replaceChildren(...lines);
}

/** Handle each file by its type: models by name or content, JSON files by name, and everything else as images. */
async function accept(files: Iterable<File>): Promise<void> {
  clearErrors();
  for (const file of files) {
    try {
      const start = new Uint8Array(await file.slice(0, 9).arrayBuffer());
      if (/\.fqvit$/i.test(file.name) || (start.length === 9 && start[7] === 0 && start[8] === 0x7b)) await use(file, false);
      else if (/\.json$/i.test(file.name)) await compareWith(file);
      else add(file);
    } catch (error) {
      report(error instanceof FqvitError ? error : new FqvitError(`${file.name}: cannot be read (${messageOf(error)}). Folders cannot be used; choose files.`));
    }
  }
}

function onFiles(id: string, handle: (files: File[]) => Promise<void>): void {
  const input = byId<HTMLInputElement>(id);
  input.addEventListener("change", () => {
    const files = [...(input.files ?? [])];
    input.value = ""; // so that the same file can be chosen again
    clearErrors();
    handle(files).catch(report);
  });
}

function setUpInputs(): void {
  onFiles("model-file", async ([file]) => (file === undefined ? undefined : use(file, false)));
  onFiles("image-files", async (files) => files.forEach(add));
  onFiles("compare-file", async ([file]) => (file === undefined ? undefined : compareWith(file)));
  byId("model-reset").addEventListener("click", () => void use(embeddedModel(), true));
  byId("clear").addEventListener("click", () => [...entries].forEach(remove));
  byId("stop").addEventListener("click", () => {
    [...entries].filter((entry) => entry.answer === null).forEach(remove);
    model?.close();
    void reload();
  });
  setUpCamera(add);
  const drop = byId("drop");
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) drop.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    void accept([...(event.dataTransfer?.files ?? [])]);
  });
  document.addEventListener("paste", (event) => void accept([...(event.clipboardData?.files ?? [])]));
}

function showSamples(): void {
  const items = SAMPLES.map(({ name, png }) => {
    const title = name.replace(/ \d+\.png$/, "");
    const button = make("button", { type: "button", title }, make("img", { src: `data:image/png;base64,${png}`, alt: `Sample: ${name.replace(".png", "")}` }));
    button.addEventListener("click", () => add(new File([fromBase64(png)], name, { type: "image/png" })));
    return make("li", {}, button);
  });
  byId("sample-list").replaceChildren(...items);
}

/**
 * Load the model file next to the page. `fqvit web` writes its name into the head of the page. Pages opened from a file: URL cannot
 * fetch files, but can run scripts.
 */
async function useFolderModel(name: string): Promise<void> {
  if (location.protocol !== "file:") {
    await use(new URL(name, location.href), false);
    return;
  }
  const script = make("script", { src: `${name}.js` });
  const isLoaded = await new Promise<boolean>((resolve) => {
    script.addEventListener("load", () => resolve(true));
    script.addEventListener("error", () => resolve(false));
    document.head.append(script);
  });
  const { fqvitModel } = globalThis as { fqvitModel?: string };
  if (isLoaded && typeof fqvitModel === "string") {
    await use(new File([fromBase64(fqvitModel)], name), false);
  } else {
    byId("model-state").textContent = "No model is loaded.";
    byId("model-reset").hidden = false;
    showError(`${name}: this browser does not load it from a file: URL. Choose it with "Choose a model file", or run fqvit web --serve.`);
  }
}

function start(): void {
  setUpInputs();
  showSamples();
  showCount();
  const name = document.querySelector<HTMLMetaElement>('meta[name="fqvit-model"]')?.content ?? "";
  void (name === "" ? use(embeddedModel(), true) : useFolderModel(name));
}

start();
