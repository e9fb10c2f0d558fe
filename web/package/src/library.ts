// The C interface of native/include/fqvit.h in WebAssembly memory. native/wasm/layout.cpp checks the offsets.
import { FqvitError } from "./errors.js";
import type { DType, Image, TensorDescription } from "./types.js";

type Call = (...values: number[]) => number;
type Kind = "model" | "detector";

const DTYPES: readonly DType[] = ["u8", "u16", "i32"];
const SIZE = { options: 24, tensor: 112, image: 24, model: 80, detector: 72, detection: 64 } as const;
const ABI_VERSION = 1;

/** Memory and functions of one instance of the module. Strings and structs are read as soon as they are returned. */
export class Library {
  private readonly memory: WebAssembly.Memory;
  private readonly functions: Record<string, Call>;
  private readonly text = new TextDecoder();

  /** memory: the shared memory of a module with threads, otherwise null   threads: number of threads */
  constructor(module: WebAssembly.Module, memory: WebAssembly.Memory | null, private readonly threads: number) {
    // The module imports nothing but memory: it cannot reach files or the network.
    const instance = new WebAssembly.Instance(module, memory === null ? {} : { env: { memory } });
    this.memory = memory ?? (instance.exports["memory"] as WebAssembly.Memory);
    this.functions = instance.exports as unknown as Record<string, Call>;
    this.functions["_initialize"]?.();
    if (memory !== null) this.call("fqvit_threads_reserve", threads - 1);
    const version = this.call("fqvit_abi_version");
    if (version !== ABI_VERSION) throw new FqvitError(`module: ABI version ${version}, expected ${ABI_VERSION}. Use the module of this package.`);
  }

  call(name: string, ...values: number[]): number {
    const found = this.functions[name];
    if (found === undefined) throw new FqvitError(`module: no function ${name}. Use the module of this package.`);
    return found(...values);
  }

  /** Call a function that returns a fqvit_status and throw its message if it fails. */
  checked(name: string, ...values: number[]): void {
    if (this.call(name, ...values) !== 0) throw new FqvitError(this.string(this.call("fqvit_last_error")) ?? "unknown error");
  }

  /** Allocate memory, pass it to `use`, and free it. */
  with<T>(bytes: number, use: (pointer: number) => T): T {
    const pointer = this.call("malloc", Math.max(bytes, 1)) >>> 0;
    if (pointer === 0) throw new FqvitError(`not enough memory: ${bytes} bytes cannot be allocated. Use a smaller file or image.`);
    try {
      return use(pointer);
    } finally {
      this.call("free", pointer);
    }
  }

  // Views become invalid when the memory grows, so each view is used immediately.
  bytes(pointer: number, length: number): Uint8Array {
    return new Uint8Array(this.memory.buffer, pointer, length);
  }

  view(pointer: number): DataView {
    return new DataView(this.memory.buffer, pointer);
  }

  pointer(at: number): number {
    return this.view(at).getUint32(0, true);
  }

  long(at: number): number {
    return Number(this.view(at).getBigInt64(0, true));
  }

  /** Read a UTF-8 string; null for a null pointer. */
  string(pointer: number): string | null {
    if (pointer === 0) return null;
    const from = pointer >>> 0;
    const all = new Uint8Array(this.memory.buffer);
    return this.text.decode(all.slice(from, all.indexOf(0, from)));
  }

  /** Load the bytes of a file and return its handle. */
  load(kind: Kind, file: Uint8Array, runBytes: number): number {
    return this.with(file.length, (data) => {
      this.bytes(data, file.length).set(file);
      return this.with(SIZE.options + 4, (options) => {
        this.bytes(options, SIZE.options + 4).fill(0);
        this.view(options).setUint32(0, SIZE.options, true);
        this.view(options).setUint32(4, this.threads, true);
        this.view(options).setBigUint64(16, BigInt(runBytes), true);
        this.checked(`fqvit_${kind}_load_memory`, data, file.length, options, options + SIZE.options);
        return this.pointer(options + SIZE.options);
      });
    });
  }

  /** Call a function that fills a struct, and read the struct. */
  described<T>(name: string, size: number, values: readonly number[], read: (at: number) => T): T {
    return this.with(size, (at) => {
      this.checked(name, ...values, at, size);
      return read(at);
    });
  }

  modelDescription<T>(handle: number, read: (at: number) => T): T {
    return this.described("fqvit_model_describe", SIZE.model, [handle], read);
  }

  detectorDescription<T>(handle: number, read: (at: number) => T): T {
    return this.described("fqvit_detector_describe", SIZE.detector, [handle], read);
  }

  detection<T>(found: number, i: number, read: (at: number) => T): T {
    return this.described("fqvit_detections_get", SIZE.detection, [found, i], read);
  }

  /** Describe an output of a model, or its input if `output` is null. */
  tensor(handle: number, output: number | null): TensorDescription & { bytes: number } {
    const [name, values] = output === null ? ["fqvit_model_input", [handle]] : ["fqvit_model_output", [handle, output]];
    return this.described(name as string, SIZE.tensor, values as number[], (at) => {
      const view = this.view(at);
      const shape = Array.from({ length: view.getUint32(12, true) }, (_, axis) => this.long(at + 16 + 8 * axis));
      const alpha = this.pointer(at + 104);
      return {
        name: this.string(this.pointer(at + 108)) ?? "",
        kind: this.string(this.pointer(at + 4)) ?? "",
        dtype: DTYPES[view.getUint32(8, true)] ?? "u8",
        shape,
        scale: view.getFloat64(88, true),
        zeroPoint: this.long(at + 96),
        alpha: alpha === 0 ? null : this.bytes(alpha, shape.at(-1) ?? 0).slice(),
        bytes: this.long(at + 80),
      };
    });
  }

  /** Copy an image into the memory and pass the address of its fqvit_image to `use`. */
  withImage<T>(image: Image & { channels: number }, use: (pointer: number) => T): T {
    return this.with(image.data.length, (pixels) => {
      this.bytes(pixels, image.data.length).set(image.data);
      return this.with(SIZE.image, (at) => {
        const view = this.view(at);
        [pixels, image.width, image.height, image.channels].forEach((value, i) => view.setUint32(4 * i, value, true));
        view.setBigUint64(16, 0n, true);
        return use(at);
      });
    });
  }
}
