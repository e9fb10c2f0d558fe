// Runs a test program of native/test that was compiled to WebAssembly: node program.mjs FILE.wasm THREADS [ARGUMENT]...
// Implements the system calls that such programs make: arguments, printing, exit.
import fs from "node:fs";
import { Worker } from "node:worker_threads";

const MEMORY = { initial: 128, maximum: 32768, shared: true };
const NOT_SUPPORTED = 52;
const THREAD = `
const { parentPort, workerData: { module, memory, index } } = require("node:worker_threads");
const none = new Proxy({}, { get: () => () => 52 });
const { exports } = new WebAssembly.Instance(module, { env: { memory }, wasi_snapshot_preview1: none });
parentPort.postMessage("ready");
exports.fqvit_thread_run(index);
`;

class Exit extends Error {
  constructor(code) {
    super(`exit ${code}`);
    this.code = code;
  }
}

const [path, threads, ...rest] = process.argv.slice(2);
const module = new WebAssembly.Module(fs.readFileSync(path));
const isShared = WebAssembly.Module.imports(module).some(({ kind }) => kind === "memory");
const shared = isShared ? new WebAssembly.Memory(MEMORY) : null;
const program = ["test", ...rest].map((text) => Buffer.from(`${text}\0`));
const bytes = () => new Uint8Array((shared ?? exports.memory).buffer);
const view = () => new DataView((shared ?? exports.memory).buffer);

const calls = {
  args_sizes_get(count, size) {
    view().setUint32(count, program.length, true);
    view().setUint32(size, Buffer.concat(program).length, true);
    return 0;
  },
  args_get(pointers, to) {
    let at = to;
    program.forEach((text, i) => {
      view().setUint32(pointers + 4 * i, at, true);
      bytes().set(text, at);
      at += text.length;
    });
    return 0;
  },
  fd_write(file, parts, count, written) {
    let total = 0;
    for (let i = 0; i < count; ++i) {
      const [at, length] = [view().getUint32(parts + 8 * i, true), view().getUint32(parts + 8 * i + 4, true)];
      fs.writeSync(file, bytes().slice(at, at + length));
      total += length;
    }
    view().setUint32(written, total, true);
    return 0;
  },
  proc_exit(code) {
    throw new Exit(code);
  },
};
const system = new Proxy(calls, { get: (known, name) => known[name] ?? (() => NOT_SUPPORTED) });
const { exports } = new WebAssembly.Instance(module, { wasi_snapshot_preview1: system, ...(shared && { env: { memory: shared } }) });
for (let index = 0; index < Number(threads) - 1; ++index) {
  const worker = new Worker(THREAD, { eval: true, workerData: { module, memory: shared, index } });
  await new Promise((resolve, reject) => worker.once("message", resolve).once("error", reject));
  worker.unref();
}
if (shared) exports.fqvit_threads_reserve(Number(threads) - 1);
try {
  exports._start();
} catch (error) {
  if (!(error instanceof Exit)) throw error;
  process.exitCode = error.code;
}
