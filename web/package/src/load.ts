import { Connection } from "./connection.js";
import { FqvitError, messageOf } from "./errors.js";
import { kindOfFile, LIMITS } from "./image.js";
import { Model } from "./model.js";
import type { Platform } from "./platform.js";
import type { Description, Limits, Options } from "./types.js";

/** A model file: its URL or path, its bytes, or a file that a user has chosen. */
export type FileSource = string | URL | ArrayBuffer | Uint8Array | Blob;

const MAX_MODULE_BYTES = 64 * 2 ** 20;
// (module (func (result v128) i32.const 0 i8x16.splat)): valid only if the machine supports SIMD128
const SIMD_PROBE = Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 253, 15, 11);

/** Return a `load` function for a platform. Compiled modules are kept for the next call. */
export function loader(platform: Platform): (source: FileSource, options?: Options) => Promise<Model> {
  const modules = new Map<string, Promise<WebAssembly.Module>>();

  async function compiled(options: Options): Promise<WebAssembly.Module> {
    const { module } = options;
    if (module instanceof WebAssembly.Module) return module;
    if (module !== undefined) {
      const bytes = typeof module === "string" || module instanceof URL ? await platform.read(module, String(module), MAX_MODULE_BYTES) : module;
      return WebAssembly.compile(bytes as BufferSource);
    }
    const set = options.instructionSet ?? (WebAssembly.validate(SIMD_PROBE) ? "simd128" : "scalar");
    let found = modules.get(set);
    if (found === undefined) {
      found = platform.moduleBytes(set).then((bytes) => WebAssembly.compile(bytes as BufferSource));
      modules.set(set, found);
      found.catch(() => modules.delete(set));
    }
    return found;
  }

  return async function load(source, options = {}) {
    if (typeof WebAssembly === "undefined") throw new FqvitError("WebAssembly: not available here. Use a current browser, or Node.js 20 or later.");
    const limits: Limits = { ...LIMITS, ...options.limits };
    const name = nameOf(source);
    const file = await bytesOf(source, name, limits.fileBytes, platform);
    kindOfFile(file, name); // rejects a wrong file before a worker is started
    let module;
    try {
      module = await compiled(options);
    } catch (error) {
      throw error instanceof FqvitError ? error : new FqvitError(`module: cannot be compiled (${messageOf(error)}). Use a current browser, or Node.js 20 or later.`);
    }
    const connection = new Connection(platform.startWorker(), name);
    try {
      const request = { do: "load", module, file, name, limits } as const;
      const description = await connection.ask<Description>(request, limits.loadTime, "loading", [file.buffer as ArrayBuffer]);
      return new Model(connection, description, limits, name);
    } catch (error) {
      connection.end(`${name}: not loaded.`);
      throw error;
    }
  };
}

function nameOf(source: FileSource): string {
  if (source instanceof URL || typeof source === "string") return String(source).replace(/[?#].*$/, "").replace(/^.*[/\\]/, "") || "model";
  const { name } = source as { name?: unknown };
  return typeof name === "string" && name !== "" ? name : "model";
}

/** Return a copy of the bytes, which is passed on to the worker. */
async function bytesOf(source: FileSource, name: string, maxBytes: number, platform: Platform): Promise<Uint8Array> {
  if (typeof source === "string" || source instanceof URL) return platform.read(source, name, maxBytes);
  if (source instanceof ArrayBuffer || source instanceof Uint8Array) {
    checkFileSize(source.byteLength, name, maxBytes);
    return new Uint8Array(source instanceof Uint8Array ? source : source.slice(0)); // a copy in both cases
  }
  if (!(source instanceof Blob)) throw new FqvitError("load: expected a URL, a path, an ArrayBuffer, a Uint8Array or a file.");
  checkFileSize(source.size, name, maxBytes);
  try {
    return new Uint8Array(await source.arrayBuffer());
  } catch (error) {
    throw new FqvitError(`${name}: cannot be read (${messageOf(error)}). Choose it again.`);
  }
}

export function checkFileSize(bytes: number, name: string, maxBytes: number): void {
  if (bytes > maxBytes) throw new FqvitError(`${name}: ${bytes} bytes, at most ${maxBytes} are allowed. Use a smaller file or raise the limit.`);
}
