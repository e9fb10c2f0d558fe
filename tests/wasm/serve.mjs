// Runs a WebAssembly module of the engine for tests/wasm/node.py: one JSON request per line of the standard input, one JSON
// answer per line of the standard output. Bytes are base64. Usage: node serve.mjs MODULE [THREADS]
import readline from "node:readline";
import { EngineError, Module } from "./module.mjs";

const bytes = (text) => Buffer.from(text, "base64");
const text = (data) => Buffer.from(data).toString("base64");
const [path, threads] = process.argv.slice(2);
const open = () => Module.open(path, Number(threads ?? 1));
let module = await open();

const COMMANDS = {
  sets: () => module.instructionSets(),
  load: ({ kind, file, set }) => {
    const handle = module.load(kind, bytes(file), set);
    return { handle, ...module.describe(kind, handle) };
  },
  free: ({ kind, handle }) => module.wasm[`fqvit_${kind}_free`](handle),
  run: ({ handle, images, count }) => module.runAll(handle, bytes(images), count).map(text),
  preprocess: ({ handle, pixels, width, height, size }) =>
    text(module.preprocess(handle, bytes(pixels), width, height, size)),
  detect: ({ handle, pixels, width, height }) =>
    module.detect(handle, bytes(pixels), width, height).map(({ fields, probabilities, mask }) => ({
      fields: text(fields),
      probabilities: text(probabilities),
      mask: text(mask),
    })),
  pages: () => module.memory.buffer.byteLength / 65536,
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  let answer;
  try {
    answer = { result: COMMANDS[request.command](request) ?? null };
  } catch (error) {
    if (!(error instanceof EngineError)) module = await open(); // a trap leaves the module in an unknown state
    answer = { error: error.message, trap: !(error instanceof EngineError) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
