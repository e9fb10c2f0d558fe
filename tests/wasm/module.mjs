// A minimal interface to a WebAssembly module of the engine, for tests. Offsets are those of native/wasm/layout.cpp.
import fs from "node:fs";
import { Worker } from "node:worker_threads";

const decoder = new TextDecoder();

export class EngineError extends Error {}

// The script of a thread: an instance of the module on the shared memory, which waits for work.
const THREAD = `
const { parentPort, workerData: { module, memory, index } } = require("node:worker_threads");
const { exports } = new WebAssembly.Instance(module, { env: { memory } });
parentPort.postMessage("ready");
exports.fqvit_thread_run(index);
`;
const MEMORY = { initial: 128, maximum: 32768, shared: true };

export class Module {
  // threads: number of threads; 1 for modules that are built without threads
  static async open(path, threads = 1) {
    const module = new WebAssembly.Module(fs.readFileSync(path));
    const shared = WebAssembly.Module.imports(module).length > 0;
    const memory = shared ? new WebAssembly.Memory(MEMORY) : null;
    const made = new Module(new WebAssembly.Instance(module, shared ? { env: { memory } } : {}).exports, memory, threads);
    for (let index = 0; index < threads - 1; ++index) {
      const worker = new Worker(THREAD, { eval: true, workerData: { module, memory, index } });
      await new Promise((resolve, reject) => worker.once("message", resolve).once("error", reject));
      worker.unref();
    }
    if (shared) made.wasm.fqvit_threads_reserve(threads - 1);
    return made;
  }

  constructor(wasm, memory, threads) {
    [this.wasm, this.memory, this.threads] = [wasm, memory ?? wasm.memory, threads];
    this.wasm._initialize();
  }

  // The memory may have grown since the last call, so views are made for each access.
  get view() {
    return new DataView(this.memory.buffer);
  }

  bytes(at, size) {
    return new Uint8Array(this.memory.buffer, at, size);
  }

  u32(at) {
    return this.view.getUint32(at, true);
  }

  text(at) {
    if (at === 0) return null;
    const all = new Uint8Array(this.memory.buffer);
    return decoder.decode(all.slice(at, all.indexOf(0, at)));
  }

  allocate(size) {
    const at = this.wasm.malloc(size);
    if (at === 0) throw new EngineError("not enough memory");
    return at >>> 0;
  }

  // Calls use(address) with a copy of the bytes, or with zeros if `data` is a size.
  with(data, use) {
    const size = typeof data === "number" ? data : data.length;
    const at = this.allocate(Math.max(size, 1));
    try {
      if (typeof data === "number") this.bytes(at, size).fill(0);
      else this.bytes(at, size).set(data);
      return use(at);
    } finally {
      this.wasm.free(at);
    }
  }

  check(status) {
    if (status !== 0) throw new EngineError(this.text(this.wasm.fqvit_last_error()));
  }

  instructionSets() {
    const names = [];
    for (let i = 0, at; (at = this.wasm.fqvit_instruction_set(i)) !== 0; ++i) names.push(this.text(at));
    return names;
  }

  // kind: "model" or "detector". Returns the handle.
  load(kind, data, instructionSet = "") {
    const name = new TextEncoder().encode(`${instructionSet}\0`);
    return this.with(data, (file) =>
      this.with(name, (set) =>
        this.with(28, (struct) => {
          this.view.setUint32(struct, 24, true);
          this.view.setUint32(struct + 4, this.threads, true);
          this.view.setUint32(struct + 8, set, true);
          this.check(this.wasm[`fqvit_${kind}_load_memory`](file, data.length, struct, struct + 24));
          return this.u32(struct + 24);
        }),
      ),
    );
  }

  describe(kind, handle) {
    return this.with(88, (at) => {
      this.check(this.wasm[`fqvit_${kind}_describe`](handle, at, kind === "model" ? 88 : 72));
      return {
        fingerprint: this.text(this.u32(at + 16)),
        instructionSet: this.text(this.u32(at + 20)),
        threads: this.u32(at + 24),
        outputs: kind === "model" ? this.u32(at + 28) : 0,
        classes: this.u32(at + (kind === "model" ? 32 : 28)),
        macs: kind === "model" ? Number(this.view.getBigUint64(at + 80, true)) : 0,
        side: kind === "model" ? 0 : this.u32(at + 64),
      };
    });
  }

  outputBytes(model, i) {
    return this.with(112, (at) => {
      this.check(this.wasm.fqvit_model_output(model, i, at, 112));
      return Number(this.view.getBigUint64(at + 80, true));
    });
  }

  // Returns one array per output: the bytes for all images.
  runAll(model, images, count) {
    const { outputs } = this.describe("model", model);
    const sizes = Array.from({ length: outputs }, (_, i) => this.outputBytes(model, i) * count);
    const offsets = sizes.map((_, i) => sizes.slice(0, i).reduce((sum, size) => sum + size + 8 - (size % 8), 0));
    const total = offsets[outputs - 1] + sizes[outputs - 1];
    return this.with(images, (x) =>
      this.with(total, (ys) =>
        this.with(8 * outputs, (table) => {
          for (let i = 0; i < outputs; ++i) {
            this.view.setUint32(table + 4 * i, ys + offsets[i], true);
            this.view.setUint32(table + 4 * (outputs + i), sizes[i], true);
          }
          this.check(this.wasm.fqvit_model_run_all(model, x, count, table, table + 4 * outputs, outputs));
          return sizes.map((size, i) => this.bytes(ys + offsets[i], size).slice());
        }),
      ),
    );
  }

  // Calls use(address) with an fqvit_image of RGB pixels.
  withImage(pixels, width, height, use) {
    return this.with(pixels, (at) =>
      this.with(24, (image) => {
        [at, width, height, 3].forEach((value, i) => this.view.setUint32(image + 4 * i, value, true));
        return use(image);
      }),
    );
  }

  preprocess(model, pixels, width, height, size) {
    return this.withImage(pixels, width, height, (image) =>
      this.with(size, (input) => {
        this.check(this.wasm.fqvit_model_preprocess(model, image, input, size));
        return this.bytes(input, size).slice();
      }),
    );
  }

  // Returns the 64 bytes of each fqvit_detection, the probabilities and the masks.
  detect(detector, pixels, width, height) {
    const { side } = this.describe("detector", detector);
    return this.withImage(pixels, width, height, (image) =>
      this.with(64, (at) => {
        this.check(this.wasm.fqvit_detector_detect(detector, image, at));
        const found = this.u32(at);
        const objects = [];
        for (let i = 0; i < this.wasm.fqvit_detections_count(found); ++i) {
          this.check(this.wasm.fqvit_detections_get(found, i, at, 64));
          const fields = this.bytes(at, 56).slice();
          const probabilities = this.bytes(this.u32(at + 56), 4 * side * side).slice();
          const mask = this.with(width * height, (y) => {
            this.check(this.wasm.fqvit_detections_mask(found, i, y, width * height));
            return this.bytes(y, width * height).slice();
          });
          objects.push({ fields, probabilities, mask });
        }
        this.wasm.fqvit_detections_free(found);
        return objects;
      }),
    );
  }
}
