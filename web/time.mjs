// Print the median time per image of model files with the built npm package, in one worker on one thread.
//
//     node time.mjs FILE.fqvit... [--runs N]
//
// Runs alternate between the instruction sets, so that a busy machine slows all of them down alike.
import { parseArgs } from "node:util";
import { load } from "fqvit";

const { values, positionals } = parseArgs({ allowPositionals: true, options: { runs: { type: "string", default: "9" } } });
const runs = Number(values.runs);
if (positionals.length === 0 || !Number.isInteger(runs) || runs < 1) {
  console.error("usage: node time.mjs FILE.fqvit... [--runs N]");
  process.exit(2);
}
const SETS = ["simd128", "scalar"];
const median = (times) => times.sort((a, b) => a - b)[times.length >> 1].toFixed(1);

for (const file of positionals) {
  const models = [];
  for (const instructionSet of SETS) {
    const start = performance.now();
    const model = await load(file, { instructionSet });
    models.push({ model, loaded: performance.now() - start, times: [] });
  }
  const pixels = new Uint8Array(models[0].model.description.input.shape.reduce((a, b) => a * b, 1)).map((_, i) => (i * 151) & 255);
  for (let run = 0; run < runs; run++) {
    for (const { model, times } of models) times.push((await model.run(pixels)).times.run);
  }
  for (const { model, loaded, times } of models) {
    const { model: name, instructionSet } = model.description;
    console.log(`${name}: ${instructionSet} ${median(times)} ms per image (median of ${runs}), loaded in ${loaded.toFixed(0)} ms`);
    model.close();
  }
}
