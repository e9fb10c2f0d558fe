// What differs between browsers and Node.js. platform.browser.ts and platform.node.ts implement it.
import type { ModuleName } from "./modules.js";

/** A started worker. `listen` is called once, before the first message. */
export interface Thread {
  post(message: unknown, transfer: ArrayBuffer[]): void;
  listen(onMessage: (data: unknown) => void, onError: (message: string) => void): void;
  end(): void;
}

export interface Platform {
  startWorker(): Thread;
  /** Read a file from a URL or, in Node.js, a path. name: for error messages   maxBytes: maximum size of the file */
  read(address: string | URL, name: string, maxBytes: number): Promise<Uint8Array>;
  /** Return the bytes of a WebAssembly module of this package. */
  moduleBytes(name: ModuleName): Promise<Uint8Array>;
  /** Return the number of processor cores. */
  cores(): number;
}
