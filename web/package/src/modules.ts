// Which of the WebAssembly modules of this package to use. build.mjs copies all of them.
import type { Options } from "./types.js";

export const MODULE_NAMES = ["scalar", "simd128", "relaxed_simd", "simd128-threads", "relaxed_simd-threads"] as const;
export type ModuleName = (typeof MODULE_NAMES)[number];

const MAX_THREADS = 16; // as in native/core/threads_wasm.h
const DEFAULT_THREADS = 4;
// The memory of modules with threads, as native/wasm/build.py links them.
const MEMORY = { initial: 128, maximum: 32768, shared: true } as const;

const HEADER = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10];
// (func (result v128) i32.const 0 i8x16.splat): valid only if the machine supports SIMD128
const SIMD_PROBE = Uint8Array.of(...HEADER, 8, 1, 6, 0, 65, 0, 253, 15, 11);
// i32.const 0 i8x16.splat twice, then i16x8.relaxed_dot_i8x16_i7x16_s: valid only if the machine supports relaxed SIMD
const RELAXED_PROBE = Uint8Array.of(...HEADER, 15, 1, 13, 0, 65, 0, 253, 15, 65, 0, 253, 15, 253, 146, 2, 11);

/** Return the fastest instruction set that this machine supports. */
export function fastestSet(): NonNullable<Options["instructionSet"]> {
  if (!WebAssembly.validate(SIMD_PROBE)) return "scalar";
  return WebAssembly.validate(RELAXED_PROBE) ? "relaxed_simd" : "simd128";
}

/** Return the number of threads: `asked`, limited to 1 to 16, or by default one per core, at most four. cores: cores of the machine */
export function threadsFor(asked: number | undefined, cores: number): number {
  const wanted = asked ?? Math.min(cores, DEFAULT_THREADS);
  return Number.isInteger(wanted) ? Math.min(Math.max(wanted, 1), MAX_THREADS) : 1;
}

/** Return memory that workers share; null where the page is not cross-origin isolated, or the browser cannot allocate it. */
export function sharedMemory(): WebAssembly.Memory | null {
  if (typeof SharedArrayBuffer === "undefined" || (globalThis as { crossOriginIsolated?: boolean }).crossOriginIsolated === false) return null;
  try {
    return new WebAssembly.Memory(MEMORY);
  } catch {
    return null;
  }
}

/** Return the name of a module. */
export function moduleName(set: NonNullable<Options["instructionSet"]>, hasThreads: boolean): ModuleName {
  return hasThreads && set !== "scalar" ? `${set}-threads` : set;
}

/** Return whether a module was built with threads: it imports its memory. */
export function hasThreads(module: WebAssembly.Module): boolean {
  return WebAssembly.Module.imports(module).some(({ kind }) => kind === "memory");
}
