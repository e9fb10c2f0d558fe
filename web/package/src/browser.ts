import { loader } from "./load.js";
import { browserPlatform, read } from "./platform.browser.js";

export * from "./api.js";

const MAX_BYTES = 64 * 2 ** 20;
const ADDRESSES = {
  simd128: () => new URL("./fqvit-simd128.wasm", import.meta.url),
  scalar: () => new URL("./fqvit-scalar.wasm", import.meta.url),
};

/** Load a .fqvit file from its URL, its bytes, or a file that a user has chosen. The model runs in a worker of its own. */
export const load = loader(browserPlatform((set) => read(ADDRESSES[set](), `fqvit-${set}.wasm`, MAX_BYTES)));
