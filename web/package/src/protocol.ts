// Messages between the caller and the worker. Each request has one reply.
import type { Image, Input, Limits } from "./types.js";

export type Request =
  | {
      readonly do: "load";
      readonly module: WebAssembly.Module;
      /** of a module with threads: the memory that its threads share, and their number; the others are in "thread" */
      readonly memory: WebAssembly.Memory | null;
      readonly threads: number;
      readonly file: Uint8Array;
      readonly name: string;
      readonly limits: Limits;
    }
  /** Become thread `index` of a module with threads. The worker replies and then works for the one that loads models. */
  | { readonly do: "thread"; readonly module: WebAssembly.Module; readonly memory: WebAssembly.Memory; readonly index: number }
  | { readonly do: "preprocess"; readonly image: Image }
  | { readonly do: "run"; readonly input: Input }
  | { readonly do: "detect"; readonly image: Image; readonly masks: boolean; readonly minScore: number };

export type Numbered = Request & { readonly id: number };

/** stopped: the module has crashed and cannot be used any more. */
export type Reply = { readonly id: number } & ({ readonly value: unknown } | { readonly error: string; readonly stopped: boolean });
