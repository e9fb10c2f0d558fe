// The entry point that contains the WebAssembly modules: for single-file pages and bundlers that do not copy .wasm files.
import MODULES from "inline-modules";
import { fromBase64 } from "./base64.js";
import { loader } from "./load.js";
import { browserPlatform } from "./platform.browser.js";

export * from "./api.js";

export const load = loader(
  browserPlatform(async (name) => {
    const stream = new Blob([fromBase64(MODULES[name])]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }),
);
