// Runs one image at a time in node for wasm.py: the WebAssembly modules of the engine, and onnxruntime-web on one thread.
//   node wasm.mjs FOLDER ONNXRUNTIME_WEB MODULES
// Reads one peer name per line from standard input, runs that peer once and prints its CPU milliseconds.
import fs from "node:fs";
import path from "node:path";
import readline from "node:readline";
import { pathToFileURL } from "node:url";
import { Module } from "../tests/wasm/module.mjs";

const [folder, library, modules] = process.argv.slice(2);
const ort = await import(pathToFileURL(path.join(library, "dist", "ort.node.min.mjs")));
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";

const SIDE = 224;
const peers = {};
for (const variant of ["simd128", "scalar"]) {
  const module = await Module.open(path.join(modules, `fqvit-${variant}.wasm`));
  const model = module.load("model", fs.readFileSync(path.join(folder, "model.fqvit")));
  const image = new Uint8Array(SIDE * SIDE * 3).map((_, i) => (i * 7919) % 251);
  peers[`fqvit ${variant}`] = () => module.runAll(model, image, 1);
}
for (const [name, file] of [["fp32", "model.onnx"], ["int8", "model.s8.onnx"]]) {
  const options = { executionProviders: ["wasm"] };
  const session = await ort.InferenceSession.create(path.join(folder, file), options);
  const images = new ort.Tensor("float32", new Float32Array(3 * SIDE * SIDE).fill(0.3), [1, 3, SIDE, SIDE]);
  peers[`onnxruntime-web ${name}`] = () => session.run({ images });
}

console.log(JSON.stringify(Object.keys(peers)));
for await (const name of readline.createInterface({ input: process.stdin })) {
  const before = process.cpuUsage();
  await peers[name]();
  const { user, system } = process.cpuUsage(before);
  console.log((user + system) / 1000);
}
