// Messages between the caller and the worker. Each request has one reply.
import type { Image, Input, Limits } from "./types.js";

export type Request =
  | {
      readonly do: "load";
      readonly module: WebAssembly.Module;
      /** memory: shared by the threads of a module with threads; null without threads   threads: their number, including this worker */
      readonly memory: WebAssembly.Memory | null;
      readonly threads: number;
      readonly file: Uint8Array;
      readonly name: string;
      readonly limits: Limits;
    }
  /** Become thread `index` of a module with threads. The worker replies and then computes for the worker that loaded the model. */
  | { readonly do: "thread"; readonly module: WebAssembly.Module; readonly memory: WebAssembly.Memory; readonly index: number }
  | { readonly do: "preprocess"; readonly image: Image }
  | { readonly do: "run"; readonly input: Input }
  | { readonly do: "detect"; readonly image: Image; readonly masks: boolean; readonly minScore: number };

export type Numbered = Request & { readonly id: number };

/** stopped: the module has crashed and cannot be used any more. */
export type Reply = { readonly id: number } & ({ readonly value: unknown } | { readonly error: string; readonly stopped: boolean });
