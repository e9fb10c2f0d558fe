// Decode image files: PNG exactly as Pillow does, other formats with the browser's decoder.
import { FqvitError } from "./errors.js";
import { checkPixels, decodePng } from "./png.js";
import type { Image } from "./types.js";

export { decodePng };

/** Type and size of an image file. */
export interface ImageFileInfo {
  readonly type: "png" | "jpeg" | "gif" | "webp" | "bmp";
  readonly width: number;
  readonly height: number;
}

const MAX_PIXELS = 100_000_000;
const MAX_IMAGE_BYTES = 256 * 2 ** 20;

/** Read type and size from the beginning of an image file without decoding it; null if the format is unknown. */
export function imageSize(file: Uint8Array): ImageFileInfo | null {
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const text = (at: number, length: number): string => String.fromCharCode(...file.subarray(at, at + length));
  try {
    if (text(0, 8) === "\x89PNG\r\n\x1a\n") return { type: "png", width: view.getUint32(16), height: view.getUint32(20) };
    if (/^GIF8[79]a/.test(text(0, 6))) return { type: "gif", width: view.getUint16(6, true), height: view.getUint16(8, true) };
    if (text(0, 2) === "BM" && view.getUint32(14, true) >= 40) {
      return { type: "bmp", width: view.getInt32(18, true), height: Math.abs(view.getInt32(22, true)) };
    }
    if (text(0, 4) === "RIFF" && text(8, 4) === "WEBP") return { type: "webp", ...webpSize(view, text(12, 4)) };
    if (text(0, 3) === "\xff\xd8\xff") return { type: "jpeg", ...jpegSize(view) };
  } catch {
    return null; // too short
  }
  return null;
}

function webpSize(view: DataView, chunk: string): { width: number; height: number } {
  const three = (at: number): number => 1 + view.getUint16(at, true) + (view.getUint8(at + 2) << 16);
  if (chunk === "VP8X") return { width: three(24), height: three(27) };
  if (chunk === "VP8L") {
    const bits = view.getUint32(21, true);
    return { width: 1 + (bits & 0x3fff), height: 1 + ((bits >> 14) & 0x3fff) };
  }
  return { width: view.getUint16(26, true) & 0x3fff, height: view.getUint16(28, true) & 0x3fff };
}

function jpegSize(view: DataView): { width: number; height: number } {
  for (let at = 2; ; ) {
    const marker = view.getUint8(at + 1);
    if (view.getUint8(at) !== 0xff) throw new RangeError("not a marker");
    if (marker === 0xff) {
      at += 1; // padding
    } else if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) {
      return { width: view.getUint16(at + 7), height: view.getUint16(at + 5) };
    } else {
      at += 2 + view.getUint16(at + 2);
    }
  }
}

/**
 * Decode an image file: PNG in every environment, other formats where the browser has a decoder. The EXIF orientation is applied
 * and color profiles are ignored, as in `fqvit`. JPEG decoders differ in the last bits: use PNG to compare results exactly.
 */
export async function decodeImage(file: Blob, { maxPixels = MAX_PIXELS }: { maxPixels?: number } = {}): Promise<Image> {
  const name = (file as { name?: string }).name || "image";
  if (file.size === 0) throw new FqvitError(`${name}: an empty file, expected an image.`);
  if (file.size > MAX_IMAGE_BYTES) throw new FqvitError(`${name}: ${file.size} bytes, at most ${MAX_IMAGE_BYTES} are allowed. Make it smaller.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const info = imageSize(bytes);
  if (info !== null) checkPixels(info.width, info.height, name, maxPixels);
  if (info?.type === "png") {
    try {
      return await decodePng(bytes, name, maxPixels);
    } catch (error) {
      if (!(error instanceof FqvitError && error.message.includes("EXIF"))) throw error;
    }
  }
  if (typeof createImageBitmap !== "function") throw new FqvitError(`${name}: only PNG files can be decoded here. Convert it to PNG, or pass pixels.`);
  return decodeInBrowser(file, name, maxPixels);
}

async function decodeInBrowser(file: Blob, name: string, maxPixels: number): Promise<Image> {
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none", premultiplyAlpha: "none" });
  } catch {
    throw new FqvitError(`${name}: cannot be decoded. Expected an image that this browser supports, such as PNG, JPEG or WebP.`);
  }
  try {
    checkPixels(bitmap.width, bitmap.height, name, maxPixels);
    const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d", { willReadFrequently: true });
    if (context === null) throw new FqvitError(`${name}: ${bitmap.width} x ${bitmap.height} pixels, too many for this browser. Make it smaller.`);
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, bitmap.width, bitmap.height);
  } finally {
    bitmap.close();
  }
}
