// Decode PNG files to the same pixels as Pillow: 8 bits per sample; alpha, gamma and color profiles are ignored.
// Browsers multiply by alpha and convert colors when they draw an image, so their pixels can differ.
import { FqvitError } from "./errors.js";
import type { Image } from "./types.js";

const MAX_BUSY = 30; // milliseconds of work before the thread may run other tasks
const CRITICAL = 0x20; // this bit of the first letter is 0 in the name of a critical chunk
const SAMPLES: Record<number, number> = { 0: 1, 2: 3, 3: 1, 4: 2, 6: 4 };
const DEPTHS: Record<number, readonly number[]> = { 0: [1, 2, 4, 8, 16], 2: [8, 16], 3: [1, 2, 4, 8], 4: [8, 16], 6: [8, 16] };
// Adam7 interlacing: first row, first column, row step and column step of each pass
const PASSES = [[0, 0, 8, 8], [0, 4, 8, 8], [4, 0, 8, 4], [0, 2, 4, 4], [2, 0, 4, 2], [0, 1, 2, 2], [1, 0, 2, 1]] as const;
const ONE_PASS = [[0, 0, 1, 1]] as const;

const CRC = Int32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

interface Header {
  readonly width: number;
  readonly height: number;
  readonly depth: number;
  readonly color: number;
  readonly isInterlaced: boolean;
}

interface Chunks extends Header {
  readonly palette: Uint8Array;
  readonly compressed: readonly Uint8Array<ArrayBuffer>[];
}

/** Decode a PNG file to gray or RGB. name: for messages   maxPixels: checked before anything is decoded */
export async function decodePng(file: Uint8Array | ArrayBuffer, name = "image", maxPixels = 100_000_000): Promise<Required<Image>> {
  const bytes = file instanceof Uint8Array ? file : new Uint8Array(file);
  const chunks = readChunks(bytes, name, maxPixels);
  const bits = chunks.depth * (SAMPLES[chunks.color] as number);
  const passes = (chunks.isInterlaced ? PASSES : ONE_PASS).map(([top, left, down, right]) => {
    const [width, height] = [Math.ceil((chunks.width - left) / right), Math.ceil((chunks.height - top) / down)];
    return { top, left, down, right, width, height, row: Math.ceil((width * bits) / 8) };
  }).filter(({ width, height }) => width > 0 && height > 0);
  const expected = passes.reduce((sum, { height, row }) => sum + height * (row + 1), 0);
  const raw = await inflate(chunks.compressed, expected, name);
  const channels = chunks.color === 0 || chunks.color === 4 ? 1 : 3;
  const data = new Uint8Array(chunks.width * chunks.height * channels);
  let at = 0;
  let resumed = performance.now();
  for (const pass of passes) {
    let above: Uint8Array = new Uint8Array(pass.row);
    for (let y = 0; y < pass.height; y++, at += pass.row + 1) {
      const filter = raw[at] as number;
      if (filter > 4) throw damaged(name, `row ${y} has an unknown filter`);
      const line = raw.subarray(at + 1, at + 1 + pass.row);
      unfilter(filter, line, above, Math.max(1, bits >> 3));
      const to = ((pass.top + y * pass.down) * chunks.width + pass.left) * channels;
      writeRow(chunks, line, pass.width, data, to, pass.right * channels);
      above = line;
      if (performance.now() - resumed > MAX_BUSY) {
        await new Promise((resolve) => setTimeout(resolve)); // so that a page stays responsive
        resumed = performance.now();
      }
    }
  }
  return { data, width: chunks.width, height: chunks.height, channels };
}

function damaged(name: string, found: string): FqvitError {
  return new FqvitError(`${name}: cannot be decoded (${found}). Repair it or choose another image.`);
}

function readChunks(file: Uint8Array, name: string, maxPixels: number): Chunks {
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  let header: Header | null = null;
  let palette = new Uint8Array(0);
  const compressed: Uint8Array<ArrayBuffer>[] = [];
  for (let at = 8; ; ) {
    if (at + 12 > file.length) throw damaged(name, "the file is truncated");
    const length = view.getUint32(at);
    const type = String.fromCharCode(...file.subarray(at + 4, at + 8));
    if (length > file.length - at - 12) throw damaged(name, `its chunk ${JSON.stringify(type)} is truncated`);
    const body = file.subarray(at + 8, at + 8 + length) as Uint8Array<ArrayBuffer>;
    if (((file[at + 4] as number) & CRITICAL) === 0 && crc(file.subarray(at + 4, at + 8 + length)) !== view.getInt32(at + 8 + length)) {
      throw damaged(name, `its chunk ${JSON.stringify(type)} has a wrong checksum`);
    }
    if (header === null) header = readHeader(type, body, name, maxPixels);
    else if (type === "PLTE") palette = body.slice();
    else if (type === "IDAT") compressed.push(body);
    else if (type === "eXIf") throw new FqvitError(`${name}: a PNG with EXIF data, which may rotate it. Save it without EXIF data, or use decodeImage() in a browser.`);
    else if (type === "IEND") return { ...header, palette, compressed };
    at += 12 + length;
  }
}

function readHeader(type: string, body: Uint8Array, name: string, maxPixels: number): Header {
  if (type !== "IHDR" || body.length !== 13) throw damaged(name, "it has no header");
  const view = new DataView(body.buffer, body.byteOffset);
  const [width, height] = [view.getUint32(0), view.getUint32(4)];
  const [depth, color, compression, filter, interlace] = body.subarray(8) as unknown as [number, number, number, number, number];
  if (width === 0 || height === 0) throw damaged(name, "it has no pixels");
  checkPixels(width, height, name, maxPixels);
  if (!DEPTHS[color]?.includes(depth) || compression !== 0 || filter !== 0 || interlace > 1) throw damaged(name, "its header is invalid");
  return { width, height, depth, color, isInterlaced: interlace === 1 };
}

export function checkPixels(width: number, height: number, name: string, maxPixels: number): void {
  if (width * height > maxPixels) throw new FqvitError(`${name}: ${width} x ${height} pixels, at most ${maxPixels} are allowed. Make it smaller.`);
}

function crc(bytes: Uint8Array): number {
  let value = -1;
  for (let i = 0; i < bytes.length; i++) value = (CRC[(value ^ (bytes[i] as number)) & 255] as number) ^ (value >>> 8);
  return ~value;
}

/** Decompress exactly the expected number of bytes, so that a small file cannot expand to more. */
async function inflate(parts: readonly Uint8Array<ArrayBuffer>[], expected: number, name: string): Promise<Uint8Array> {
  const raw = new Uint8Array(expected);
  const reader = new Blob([...parts]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
  let filled = 0;
  try {
    while (filled < expected) {
      const { done, value } = await reader.read();
      if (done) break;
      raw.set(value.subarray(0, expected - filled), filled);
      filled += value.length;
    }
  } catch {
    if (filled < expected) throw damaged(name, "its compressed data is damaged");
  }
  if (filled < expected) throw damaged(name, "the file is truncated");
  reader.cancel().catch(() => undefined);
  return raw;
}

/** Undo the filter of one row in place. above: the previous row, all zeros for the first row   distance: bytes per pixel */
function unfilter(filter: number, line: Uint8Array, above: Uint8Array, distance: number): void {
  const at = (row: Uint8Array, x: number): number => row[x] as number;
  const first = Math.min(distance, line.length); // bytes that have no left neighbour
  if (filter === 1) {
    for (let x = first; x < line.length; x++) line[x] = at(line, x) + at(line, x - distance);
  } else if (filter === 2) {
    for (let x = 0; x < line.length; x++) line[x] = at(line, x) + at(above, x);
  } else if (filter === 3) {
    for (let x = 0; x < first; x++) line[x] = at(line, x) + (at(above, x) >> 1);
    for (let x = first; x < line.length; x++) line[x] = at(line, x) + ((at(line, x - distance) + at(above, x)) >> 1);
  } else if (filter === 4) {
    for (let x = 0; x < first; x++) line[x] = at(line, x) + at(above, x);
    for (let x = first; x < line.length; x++) line[x] = at(line, x) + paeth(at(line, x - distance), at(above, x), at(above, x - distance));
  }
}

function paeth(left: number, up: number, corner: number): number {
  const a = Math.abs(up - corner);
  const b = Math.abs(left - corner);
  const c = Math.abs(left + up - 2 * corner);
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

/** Convert one row to 8 bits, without alpha. step: bytes from one pixel to the next in `data` */
function writeRow({ depth, color, palette }: Chunks, line: Uint8Array, width: number, data: Uint8Array, to: number, step: number): void {
  const size = SAMPLES[color] as number;
  const bytes = depth >> 3; // bytes per sample; of 16-bit samples only the first (high) byte is kept, as in Pillow
  const kept = color === 0 || color === 4 ? 1 : 3;
  const largest = (1 << depth) - 1;
  if (depth === 8 && size === kept && step === kept && color !== 3) {
    data.set(line, to); // the common case: the bytes are the pixels
    return;
  }
  for (let x = 0; x < width; x++, to += step) {
    if (color === 3 || depth < 8) {
      const bit = x * depth;
      const value = ((line[bit >> 3] as number) >> (8 - depth - (bit & 7))) & largest;
      if (color === 0) data[to] = (value * 255) / largest;
      else for (let c = 0; c < 3; c++) data[to + c] = palette[3 * value + c] ?? 0;
    } else {
      for (let c = 0; c < kept; c++) data[to + c] = line[(x * size + c) * bytes] as number;
    }
  }
}
