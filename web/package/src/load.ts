import { Connection } from "./connection.js";
import { FqvitError, messageOf } from "./errors.js";
import { kindOfFile, LIMITS } from "./image.js";
import { Model } from "./model.js";
import { fastestSet, hasThreads, moduleName, sharedMemory, threadsFor } from "./modules.js";
import type { Platform } from "./platform.js";
import type { Description, Limits, Options } from "./types.js";

/** A model file: its URL or path, its bytes, or a file that a user has chosen. */
export type FileSource = string | URL | ArrayBuffer | Uint8Array | Blob;

const MAX_MODULE_BYTES = 64 * 2 ** 20;
const THREAD_TIME = 10_000; // milliseconds in which threads must start; otherwise models run on one thread

interface Engine {
  readonly module: WebAssembly.Module;
  readonly memory: WebAssembly.Memory | null;
  readonly helpers: readonly Connection[];
}

/** Return a `load` function for a platform. Compiled modules are kept for the next call. */
export function loader(platform: Platform): (source: FileSource, options?: Options) => Promise<Model> {
  const modules = new Map<string, Promise<WebAssembly.Module>>();

  async function compiled(options: Options, withThreads: boolean): Promise<WebAssembly.Module> {
    const { module } = options;
    if (module instanceof WebAssembly.Module) return module;
    if (module !== undefined) {
      const bytes = typeof module === "string" || module instanceof URL ? await platform.read(module, String(module), MAX_MODULE_BYTES) : module;
      return WebAssembly.compile(bytes as BufferSource);
    }
    const name = moduleName(options.instructionSet ?? fastestSet(), withThreads);
    let found = modules.get(name);
    if (found === undefined) {
      found = platform.moduleBytes(name).then((bytes) => WebAssembly.compile(bytes as BufferSource));
      modules.set(name, found);
      found.catch(() => modules.delete(name));
    }
    return found;
  }

  /** Compile the module and start its threads. Without shared memory, or if the threads do not start, one thread is used. */
  async function engine(options: Options): Promise<Engine> {
    const threads = threadsFor(options.threads, platform.cores());
    const memory = threads > 1 || options.module !== undefined ? sharedMemory() : null;
    const module = await compiled(options, memory !== null);
    if (!hasThreads(module)) return { module, memory: null, helpers: [] };
    if (memory === null) throw new FqvitError("module: has threads, but the page cannot share memory. Use another module, or isolate the page (COOP and COEP).");
    const helpers = Array.from({ length: threads - 1 }, () => new Connection(platform.startWorker(), "thread"));
    try {
      await Promise.all(helpers.map((helper, index) => helper.ask({ do: "thread", module, memory, index }, THREAD_TIME, "starting")));
      return { module, memory, helpers };
    } catch (error) {
      for (const helper of helpers) helper.end("not started.");
      if (options.module !== undefined) throw error;
      return { module: await compiled(options, false), memory: null, helpers: [] };
    }
  }

  return async function load(source, options = {}) {
    if (typeof WebAssembly === "undefined") throw new FqvitError("WebAssembly: not available here. Use a current browser, or Node.js 20 or later.");
    const limits: Limits = { ...LIMITS, ...options.limits };
    const name = nameOf(source);
    const file = await bytesOf(source, name, limits.fileBytes, platform);
    kindOfFile(file, name); // rejects a wrong file before a worker is started
    let found: Engine;
    try {
      found = await engine(options);
    } catch (error) {
      throw error instanceof FqvitError ? error : new FqvitError(`module: cannot be compiled (${messageOf(error)}). Use a current browser, or Node.js 20 or later.`);
    }
    const { module, memory, helpers } = found;
    const connection = new Connection(platform.startWorker(), name, helpers);
    try {
      const request = { do: "load", module, memory, threads: helpers.length + 1, file, name, limits } as const;
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
