// Checks of images and files. They do not need the WebAssembly module.
import { FqvitError } from "./errors.js";
import type { Image, Limits } from "./types.js";

const MAX_SIDE = 4194304;
const MAX_HEADER = 100_000_000;

export const LIMITS: Limits = { fileBytes: 512 * 2 ** 20, runBytes: 0, pixels: 100_000_000, loadTime: 30_000, runTime: 120_000 };
const RUN_BYTES = { model: 512 * 2 ** 20, detector: 2 ** 30 };

/** Return the image with its number of channels, or throw if its size and data do not match. */
export function checkedImage(image: Image, maxPixels: number): Image & { channels: 1 | 3 | 4 } {
  const { data, width, height } = image;
  if (![width, height].every((side) => Number.isInteger(side) && side >= 1 && side <= MAX_SIDE)) {
    throw new FqvitError(`image: ${width} x ${height}, expected sides of 1 to ${MAX_SIDE} pixels.`);
  }
  if (width * height > maxPixels) {
    throw new FqvitError(`image: ${width} x ${height} pixels, at most ${maxPixels} are allowed. Make it smaller.`);
  }
  if (!(data instanceof Uint8Array || data instanceof Uint8ClampedArray)) {
    throw new FqvitError("image: expected its data as Uint8Array or Uint8ClampedArray.");
  }
  const channels = image.channels ?? data.length / (width * height);
  if (![1, 3, 4].includes(channels) || data.length !== channels * width * height) {
    throw new FqvitError(`image: ${data.length} bytes for ${width} x ${height} pixels, expected 1, 3 or 4 bytes per pixel.`);
  }
  return { data, width, height, channels: channels as 1 | 3 | 4 };
}

/** Return the kind of a file according to its metadata, without loading it. The library checks everything else. */
export function kindOfFile(file: Uint8Array, name: string): "model" | "detector" {
  const wrong = new FqvitError(`${name}: not a .fqvit file. Choose a file that fqvit quantize wrote.`);
  if (file.length < 16) throw wrong;
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const length = view.getBigUint64(0, true);
  if (length > BigInt(Math.min(file.length - 8, MAX_HEADER)) || file[8] !== 0x7b) throw wrong;
  const header = new TextDecoder().decode(file.subarray(8, 8 + Number(length)));
  if (!header.includes('"__metadata__"')) throw wrong;
  if (/"fqvit_detector"\s*:/.test(header)) return "detector";
  if (/"fqvit"\s*:/.test(header)) return "model";
  throw wrong;
}

/** Return the memory limit of a run. */
export function runBytesOf(kind: "model" | "detector", limits: Limits): number {
  return limits.runBytes > 0 ? limits.runBytes : RUN_BYTES[kind];
}
