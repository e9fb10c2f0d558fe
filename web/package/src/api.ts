// What every entry point exports besides `load`.
export { FqvitError } from "./errors.js";
export { decodeImage, decodePng, imageSize } from "./decode.js";
export { similarity } from "./similarity.js";
export type { Model } from "./model.js";
export type { FileSource } from "./load.js";
export type * from "./types.js";
