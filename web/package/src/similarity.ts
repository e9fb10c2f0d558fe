// The cosine similarity of two embeddings in integer arithmetic, rounded as in `fqvit search` (src/fqvit/inference/products.py).
import { FqvitError } from "./errors.js";
import type { Tensor } from "./types.js";

const ONE = 2 ** 24;
const MAX_LENGTH = 8192; // values per vector, so that sums of products are exact in a double

interface Norm {
  readonly norm: bigint;
  readonly exponent: bigint;
}

/** Return the cosine similarity of two embeddings of the same output, an exact multiple of 2^-24. gallery: the stored embedding */
export function similarity(gallery: Tensor, query: Tensor): number {
  const { data: a } = gallery;
  const { data: b } = query;
  if (a.length !== b.length || gallery.kind !== query.kind || a.length === 0 || a.length > MAX_LENGTH || gallery.alpha || query.alpha) {
    throw new FqvitError(`similarity: ${gallery.kind} of ${a.length} and ${query.kind} of ${b.length} values, expected embeddings of the same model.`);
  }
  if (gallery.kind === "signs") {
    let different = 0;
    for (let i = 0; i < a.length; i++) different += ones((a[i] as number) ^ (b[i] as number));
    const bits = 8 * a.length;
    return Number(roundDivide(BigInt(bits - 2 * different) * BigInt(ONE), BigInt(bits))) / ONE;
  }
  const [v, w] = [values(gallery), values(query)];
  const [nv, nw] = [normOf(v), normOf(w)];
  const dot = v.reduce((sum, value, i) => sum + value * (w[i] as number), 0);
  const d = BigInt(dot) << (nv.exponent + nw.exponent);
  const t = floorDivide(d << 32n, atLeastOne(nv.norm));
  return Number(roundDivide(t << 8n, atLeastOne(nw.norm))) / ONE;
}

/** Return code - zero; i32 values are shifted right until they fit 16 bits. */
function values({ data, zeroPoint, dtype }: Tensor): number[] {
  const all = Array.from(data, (code) => code - zeroPoint);
  if (dtype !== "i32") return all;
  const largest = all.reduce((found, value) => Math.max(found, Math.abs(value)), 0);
  const shift = Math.max(0, largest.toString(2).length - 15);
  return all.map((value) => Math.min(Math.max(shift === 0 ? value : Math.floor((value + 2 ** (shift - 1)) / 2 ** shift), -32768), 32767));
}

/** norm = isqrt(2^16 * sum((2^exponent * v)^2)), where the sum is in [2^44, 2^46) unless v is 0 */
function normOf(vector: number[]): Norm {
  const squares = BigInt(vector.reduce((sum, value) => sum + value * value, 0));
  const log = (squares > 0n ? squares : 1n).toString(2).length - 1;
  const exponent = BigInt((45 - log) >> 1);
  return { norm: isqrt(squares << (16n + 2n * exponent)), exponent };
}

function isqrt(value: bigint): bigint {
  if (value < 2n) return value;
  let root = BigInt(Math.floor(Math.sqrt(Number(value))));
  while (root * root > value) root -= 1n;
  while ((root + 1n) * (root + 1n) <= value) root += 1n;
  return root;
}

function floorDivide(a: bigint, b: bigint): bigint {
  const quotient = a / b;
  return a % b < 0n ? quotient - 1n : quotient;
}

function roundDivide(a: bigint, b: bigint): bigint {
  return floorDivide(a + b / 2n, b);
}

function atLeastOne(value: bigint): bigint {
  return value > 0n ? value : 1n;
}

function ones(byte: number): number {
  let count = 0;
  for (let rest = byte; rest > 0; rest &= rest - 1) count++;
  return count;
}
