// Print the median time per image of model files with the built npm package, in Node.js or in Chromium.
//
//     node time.mjs FILE.fqvit... [--runs N] [--threads N] [--chromium PATH]
//
// Instruction sets and numbers of threads take turns, so that a busy machine slows all of them down alike. A turn is one run
// without timing, which wakes the threads, and three timed runs.
import { existsSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const DIST = join(dirname(fileURLToPath(import.meta.url)), "package/dist");
const ISOLATION = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };
const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { runs: { type: "string", default: "9" }, threads: { type: "string", default: "2" }, chromium: { type: "string" } },
});
const [runs, threads] = [Number(values.runs), Number(values.threads)];
if (positionals.length === 0 || ![runs, threads].every((number) => Number.isInteger(number) && number >= 1)) {
  console.error("usage: node time.mjs FILE.fqvit... [--runs N] [--threads N] [--chromium PATH]");
  process.exit(2);
}

/** Return one line per setting. Runs in Node.js or, as text, in a page. */
async function measure(load, file, runs, threads) {
  const settings = [{ threads: 1 }, { instructionSet: "simd128", threads: 1 }, { instructionSet: "scalar" }, { threads }];
  const models = [];
  for (const setting of settings) {
    const start = performance.now();
    const model = await load(file, setting);
    models.push({ model, loaded: performance.now() - start, times: [] });
  }
  const pixels = new Uint8Array(models[0].model.description.input.shape.reduce((a, b) => a * b, 1)).map((_, i) => (i * 151) & 255);
  for (let run = 0; run < runs; run++) {
    for (const { model, times } of models) {
      await model.run(pixels);
      for (let i = 0; i < 3; i++) times.push((await model.run(pixels)).times.run);
    }
  }
  const lines = models.map(({ model, loaded, times }) => {
    const { model: name, instructionSet, threads: used } = model.description;
    const median = times.sort((a, b) => a - b)[times.length >> 1].toFixed(1);
    return `${name}: ${instructionSet}, ${used} thread(s): ${median} ms per image (median of ${times.length}, least ${times[0].toFixed(1)}), loaded in ${loaded.toFixed(0)} ms`;
  });
  for (const { model } of models) model.close();
  return lines;
}

/** Open an isolated page in Chromium and return the function that measures a file there. */
async function inChromium(executablePath) {
  const { chromium } = await import("playwright-core");
  const server = createServer((request, response) => {
    const name = request.url.slice(1);
    for (const [header, value] of Object.entries(ISOLATION)) response.setHeader(header, value);
    response.setHeader("Content-Type", name.endsWith(".js") ? "text/javascript" : name === "" ? "text/html" : "application/octet-stream");
    const path = name.startsWith("model/") ? positionals[Number(name.slice(6))] : join(DIST, name);
    response.end(existsSync(path) && name !== "" ? readFileSync(path) : "<title>time</title>");
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const browser = await chromium.launch({ executablePath, args: process.getuid?.() === 0 ? ["--no-sandbox"] : [] });
  const page = await browser.newPage();
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  const script = `(${measure})((await import("/browser.js")).load, `;
  return {
    measure: (i) => page.evaluate(`(async () => ${script}"/model/${i}", ${runs}, ${threads}))()`),
    close: () => browser.close().then(() => server.close()),
  };
}

if (values.chromium === undefined) {
  const { load } = await import("fqvit");
  for (const file of positionals) console.log((await measure(load, file, runs, threads)).join("\n"));
} else {
  const browser = await inChromium(values.chromium);
  for (const i of positionals.keys()) console.log((await browser.measure(i)).join("\n"));
  await browser.close();
}
