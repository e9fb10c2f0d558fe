// Compare the logits of this page with a JSON file written by `fqvit classify --json --logits`.
import { FqvitError, type Tensor } from "../../package/src/inline.js";

export interface Compared {
  readonly isEqual: boolean;
  readonly text: string;
}

export interface Classified {
  readonly name: string;
  readonly logits: Tensor | null;
  /** SHA-256 of the prepared pixels in hexadecimal; null where the browser has no crypto.subtle */
  readonly pixels: string | null;
}

interface Expected {
  readonly image: string;
  readonly logits: readonly number[];
  readonly pixels: string | null;
}

interface Answers {
  readonly fingerprint: string;
  readonly results: readonly Expected[];
}

const MAX_JSON_BYTES = 64 * 2 ** 20;

/** Read the JSON file of `fqvit classify`. */
export async function readAnswers(file: File): Promise<Answers> {
  const wrong = (found: string): FqvitError =>
    new FqvitError(`${file.name}: ${found}. Write the file with fqvit classify MODEL.fqvit IMAGE.png --json --logits.`);
  if (file.size > MAX_JSON_BYTES) throw wrong(`${file.size} bytes, at most ${MAX_JSON_BYTES} are allowed`);
  let found: unknown;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw wrong("not a JSON file");
  }
  const { fingerprint, results } = (found ?? {}) as { fingerprint?: unknown; results?: unknown };
  if (!Array.isArray(results)) throw wrong("has no results");
  if (typeof fingerprint !== "string") throw wrong("has no fingerprint and no logits");
  return {
    fingerprint,
    results: results.map((one: { image?: unknown; logits?: unknown; pixels?: unknown } | null, i) => {
      const { image, logits, pixels } = one ?? {};
      if (typeof image !== "string" || !Array.isArray(logits) || !logits.every(Number.isInteger)) throw wrong(`result ${i} has no logits`);
      return { image, logits, pixels: typeof pixels === "string" ? pixels : null };
    }),
  };
}

/** Compare every image with the answer for its file name; if there is one image and one answer, their names may differ. */
export function compare(fingerprint: string, images: readonly Classified[], answers: Answers): Compared[] {
  if (answers.fingerprint !== fingerprint) {
    const text = `The models differ: this page has fingerprint ${fingerprint}, the JSON file ${answers.fingerprint}. Choose the same model file.`;
    return [{ isEqual: false, text }];
  }
  const found: Compared[] = [];
  for (const image of images) {
    const named = answers.results.find((answer) => fileName(answer.image) === image.name);
    const answer = named ?? (images.length === 1 && answers.results.length === 1 ? answers.results[0] : undefined);
    if (answer !== undefined && image.logits !== null) found.push(compareOne(image, image.logits, answer));
  }
  if (found.length > 0) return found;
  const names = answers.results.slice(0, 3).map((answer) => fileName(answer.image)).join(", ");
  return [{ isEqual: false, text: `No image of this page is in the JSON file, which has ${names}. Add one of them first.` }];
}

function compareOne(image: Classified, logits: Tensor, answer: Expected): Compared {
  const ours = Array.from(logits.data);
  if (ours.length !== answer.logits.length) {
    return { isEqual: false, text: `${image.name}: ${ours.length} logits here, ${answer.logits.length} in the JSON file.` };
  }
  const different = ours.flatMap((value, i) => (value === answer.logits[i] ? [] : [i]));
  const [first] = different;
  if (first === undefined) return { isEqual: true, text: `${image.name}: all ${ours.length} logits are equal, bit for bit.` };
  const cause =
    image.pixels === null || answer.pixels === null
      ? "Use a PNG image: JPEG decoders differ in the last bits."
      : image.pixels === answer.pixels
        ? "The pixels are equal, so this is a bug; please report it."
        : "The pixels differ already: it is another image, or the decoders differ. Use a PNG image.";
  const values = `class ${first} first: ${ours[first]} here, ${answer.logits[first]} in the JSON file`;
  return { isEqual: false, text: `${image.name}: ${different.length} of ${ours.length} logits differ (${values}). ${cause}` };
}

function fileName(path: string): string {
  return path.replace(/^.*[/\\]/, "");
}
