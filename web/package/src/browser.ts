import { loader } from "./load.js";
import type { ModuleName } from "./modules.js";
import { browserPlatform, read } from "./platform.browser.js";

export * from "./api.js";

const MAX_BYTES = 64 * 2 ** 20;
// The URLs are written out, so that bundlers find the files.
const MODULE_URLS: Record<ModuleName, () => URL> = {
  scalar: () => new URL("./fqvit-scalar.wasm", import.meta.url),
  simd128: () => new URL("./fqvit-simd128.wasm", import.meta.url),
  relaxed_simd: () => new URL("./fqvit-relaxed_simd.wasm", import.meta.url),
  "simd128-threads": () => new URL("./fqvit-simd128-threads.wasm", import.meta.url),
  "relaxed_simd-threads": () => new URL("./fqvit-relaxed_simd-threads.wasm", import.meta.url),
};

/** Load a .fqvit file from its URL, its bytes, or a file that a user has chosen. The model runs in a worker of its own. */
export const load = loader(browserPlatform((name) => read(MODULE_URLS[name](), `fqvit-${name}.wasm`, MAX_BYTES)));
