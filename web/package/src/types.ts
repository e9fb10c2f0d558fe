/** An image with 8 bits per sample, rows from top to bottom. The `ImageData` of a canvas is such an image; its alpha is ignored. */
export interface Image {
  readonly data: Uint8Array | Uint8ClampedArray;
  readonly width: number;
  readonly height: number;
  /** 1 gray, 3 RGB, 4 RGBA; derived from the length of `data` if omitted */
  readonly channels?: 1 | 3 | 4;
}

/** An image, or already preprocessed pixels: u8 [height, width, channels], as `preprocess` returns them. */
export type Input = Image | Uint8Array;

export type DType = "u8" | "u16" | "i32";

/** Name, shape and meaning of an array: value = (integer - zeroPoint) * scale * 2^alpha[c] in channel c. */
export interface TensorDescription {
  /** what `fqvit quantize --output` calls it, such as "logits" or "tokens@9" */
  readonly name: string;
  /** "pixels" for an input; "logits", "embedding", "signs", "tokens", "pooled", "map", "scores" or "deltas" for an output */
  readonly kind: string;
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly scale: number;
  readonly zeroPoint: number;
  /** one exponent per channel; null if all are 0 */
  readonly alpha: Uint8Array | null;
}

/** One output of a run: its integers and what they mean. */
export interface Tensor extends TensorDescription {
  readonly data: Uint8Array | Uint16Array | Int32Array;
}

/** What a loaded file is. */
export interface Description {
  readonly kind: "classifier" | "features" | "detector";
  /** name of the architecture */
  readonly model: string;
  /** where the float weights came from */
  readonly source: string;
  /** SHA-256 of the contents, in hexadecimal: equal programs have equal fingerprints */
  readonly fingerprint: string;
  /** instruction set in use: "relaxed_simd", "simd128" or "scalar" */
  readonly instructionSet: string;
  readonly threads: number;
  /** number of images that the model was calibrated with */
  readonly calibrationImages: number;
  /** class names in order; empty if the file has none */
  readonly classes: readonly string[];
  /** the input of a model; null for detectors, which take images of any size */
  readonly input: TensorDescription | null;
  /** the outputs of a model; empty for detectors */
  readonly outputs: readonly TensorDescription[];
  /** how images are resized, as human-readable text */
  readonly preprocessing: string;
  /** bytes of the file */
  readonly fileBytes: number;
  /** bytes of the packed weights; 0 for detectors */
  readonly weightBytes: number;
  /** bytes of the buffers of one image; 0 for detectors */
  readonly runBytes: number;
}

/** Milliseconds inside the worker. */
export interface Times {
  readonly preprocess: number;
  readonly run: number;
}

/** The result of a run: all outputs in the order of the description. */
export interface Result {
  readonly outputs: readonly Tensor[];
  readonly times: Times;
}

/** One class of a classification. */
export interface Ranked {
  readonly class: number;
  /** null if the file has no class names */
  readonly name: string | null;
  /** the integer of the program, equal on every machine */
  readonly integer: number;
  /** integer * scale, as `fqvit classify` prints it */
  readonly logit: number;
  /** softmax over all classes, in floating point */
  readonly probability: number;
}

export interface Classification {
  /** best first */
  readonly top: readonly Ranked[];
  readonly logits: Tensor;
  readonly times: Times;
}

export interface Embedding extends Tensor {
  readonly times: Times;
}

/** One object of a detection. */
export interface Detected {
  /** x1, y1, x2, y2 in pixels of the image; exact multiples of 1/256 */
  readonly box: readonly [number, number, number, number];
  /** probability; an exact multiple of 2^-24 */
  readonly score: number;
  readonly class: number;
  readonly name: string | null;
  /** COCO category */
  readonly category: number;
  /** [height, width] of the image, 1 for pixels of the object; null if masks were not requested */
  readonly mask: Uint8Array | null;
}

export interface Detection {
  /** best first */
  readonly objects: readonly Detected[];
  readonly times: Times;
}

/** Limits that are checked before work starts, and time limits after which the worker is ended. */
export interface Limits {
  /** bytes of the model file; default 512 MiB */
  readonly fileBytes: number;
  /** bytes of memory for the buffers of one image; default 512 MiB, for detectors 1 GiB */
  readonly runBytes: number;
  /** width * height of an image; default 100,000,000 */
  readonly pixels: number;
  /** milliseconds to load and verify a file; default 30,000 */
  readonly loadTime: number;
  /** milliseconds for one call; default 120,000 */
  readonly runTime: number;
}

export interface Options {
  readonly limits?: Partial<Limits>;
  /** "scalar" uses no SIMD; default: the fastest set that this machine supports. All sets give the same bits. */
  readonly instructionSet?: "relaxed_simd" | "simd128" | "scalar";
  /** number of threads, where memory can be shared; default: one per core, at most 4. The bits do not depend on it. */
  readonly threads?: number;
  /** the WebAssembly module, if it is not next to the script: its URL, its bytes or the compiled module */
  readonly module?: string | URL | ArrayBuffer | Uint8Array | WebAssembly.Module;
}
