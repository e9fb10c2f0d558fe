// One loaded file inside the worker: describes it, prepares images, runs it.
import { FqvitError } from "./errors.js";
import { checkedImage, kindOfFile, runBytesOf } from "./image.js";
import type { Library } from "./library.js";
import type { Description, Detected, Detection, Image, Input, Limits, Result, Tensor, TensorDescription } from "./types.js";

type Described = TensorDescription & { bytes: number };

const MAX_MASK_BYTES = 2 ** 29; // of all masks of one image

export class Session {
  readonly description: Description;
  private readonly kind: "model" | "detector";
  private readonly handle: number;
  private readonly input: Described | null;
  private readonly outputs: readonly Described[];

  constructor(
    private readonly library: Library,
    file: Uint8Array,
    private readonly name: string,
    private readonly limits: Limits,
  ) {
    this.kind = kindOfFile(file, name);
    try {
      this.handle = library.load(this.kind, file, runBytesOf(this.kind, limits));
    } catch (error) {
      throw error instanceof FqvitError ? new FqvitError(`${name}: ${error.message}`) : error;
    }
    this.input = this.kind === "model" ? library.tensor(this.handle, null) : null;
    const count = this.kind === "model" ? library.modelDescription(this.handle, (at) => library.pointer(at + 28)) : 0;
    this.outputs = Array.from({ length: count }, (_, i) => library.tensor(this.handle, i));
    this.description = this.kind === "model" ? this.describeModel(file.length) : this.describeDetector(file.length);
  }

  /** Resize and crop an image to the input of the model: u8 [height, width, channels]. */
  preprocess(image: Image): Uint8Array {
    const input = this.modelInput();
    const checked = checkedImage(image, this.limits.pixels);
    return this.library.with(input.bytes, (to) => {
      this.library.withImage(checked, (from) => this.library.checked("fqvit_model_preprocess", this.handle, from, to, input.bytes));
      return this.library.bytes(to, input.bytes).slice();
    });
  }

  run(given: Input): Result {
    const input = this.modelInput();
    const start = performance.now();
    const pixels = given instanceof Uint8Array ? given : this.preprocess(given);
    if (pixels.length !== input.bytes) {
      const size = input.shape.join(" x ");
      throw new FqvitError(`input: ${pixels.length} bytes, expected ${input.bytes} (${size}). Pass an image, or the result of preprocess().`);
    }
    const prepared = performance.now();
    const outputs = this.runPrepared(pixels);
    return { outputs, times: { preprocess: prepared - start, run: performance.now() - prepared } };
  }

  /** masks: whether to compute masks   minScore: leave out objects below this probability */
  detect(image: Image, masks: boolean, minScore: number): Detection {
    if (this.kind !== "detector") {
      throw new FqvitError(`${this.name}: ${this.description.model} is not a detector. Use classify(), embed() or run().`);
    }
    const library = this.library;
    const checked = checkedImage(image, this.limits.pixels);
    const start = performance.now();
    return library.with(4, (out) => {
      library.withImage(checked, (at) => library.checked("fqvit_detector_detect", this.handle, at, out));
      const found = library.pointer(out);
      try {
        const objects = this.objects(found, checked, masks, minScore);
        return { objects, times: { preprocess: 0, run: performance.now() - start } };
      } finally {
        library.call("fqvit_detections_free", found);
      }
    });
  }

  private modelInput(): Described {
    if (this.input === null) throw new FqvitError(`${this.name}: ${this.description.model} is a detector. Use detect().`);
    return this.input;
  }

  private runPrepared(pixels: Uint8Array): Tensor[] {
    const library = this.library;
    const offsets: number[] = [];
    let total = 0;
    for (const output of this.outputs) {
      offsets.push(total);
      total += Math.ceil(output.bytes / 16) * 16;
    }
    const count = this.outputs.length;
    return library.with(pixels.length, (images) =>
      library.with(total, (arrays) =>
        library.with(8 * count, (lists) => {
          library.bytes(images, pixels.length).set(pixels);
          this.outputs.forEach((output, i) => {
            library.view(lists).setUint32(4 * i, arrays + (offsets[i] as number), true);
            library.view(lists).setUint32(4 * (count + i), output.bytes, true);
          });
          library.checked("fqvit_model_run_all", this.handle, images, 1, lists, lists + 4 * count, count);
          return this.outputs.map((output, i) => withData(output, library.bytes(arrays + (offsets[i] as number), output.bytes)));
        }),
      ),
    );
  }

  private objects(found: number, image: Image, masks: boolean, minScore: number): Detected[] {
    const library = this.library;
    const count = library.call("fqvit_detections_count", found);
    const pixels = image.width * image.height;
    const objects: Detected[] = [];
    for (let i = 0; i < count; i++) {
      const one = library.detection(found, i, (at) => ({
        box: [0, 8, 16, 24].map((offset) => library.long(at + offset) / 256) as unknown as Detected["box"],
        score: library.long(at + 32) / 2 ** 24,
        class: library.long(at + 40),
        category: library.long(at + 48),
      }));
      if (one.score < minScore) break; // objects are sorted by score, best first
      if (masks && (objects.length + 1) * pixels > MAX_MASK_BYTES) {
        throw new FqvitError(`image: masks of ${image.width} x ${image.height} pixels need too much memory. Make it smaller, or raise minScore.`);
      }
      const mask = masks ? this.mask(found, i, pixels) : null;
      objects.push({ ...one, name: this.description.classes[one.class] ?? null, mask });
    }
    return objects;
  }

  private mask(found: number, i: number, pixels: number): Uint8Array {
    return this.library.with(pixels, (at) => {
      this.library.checked("fqvit_detections_mask", found, i, at, pixels);
      return this.library.bytes(at, pixels).slice();
    });
  }

  private describeModel(fileBytes: number): Description {
    const library = this.library;
    return library.modelDescription(this.handle, (at) => {
      const input = this.input as Described;
      const [height, width] = input.shape;
      const squash = library.pointer(at + 72) === 1;
      const resize = `${squash ? "squashed, " : ""}short side ${library.pointer(at + 64)} ${library.string(library.pointer(at + 68))}`;
      const isClassifier = this.outputs.some((output) => output.kind === "logits");
      return {
        ...this.common(at, isClassifier ? "classifier" : "features", library.pointer(at + 32), fileBytes),
        input: withoutBytes(input),
        outputs: this.outputs.map(withoutBytes),
        preprocessing: `${resize}, center crop ${height} x ${width}`,
        weightBytes: library.long(at + 48),
        runBytes: library.long(at + 56),
      };
    });
  }

  private describeDetector(fileBytes: number): Description {
    const library = this.library;
    return library.detectorDescription(this.handle, (at) => ({
      ...this.common(at, "detector", library.pointer(at + 28), fileBytes),
      input: null,
      outputs: [],
      preprocessing: `resized to ${library.pointer(at + 48)} x ${library.pointer(at + 52)} at most, aspect ratio kept`,
      weightBytes: 0,
      runBytes: 0,
    }));
  }

  /** Read the fields that model and detector descriptions have at the same offsets. */
  private common(at: number, kind: Description["kind"], classes: number, fileBytes: number) {
    const text = (offset: number): string => this.library.string(this.library.pointer(at + offset)) ?? "";
    const names: string[] = [];
    for (let i = 0; i < classes; i++) {
      const name = this.library.string(this.library.call(`fqvit_${this.kind}_class_name`, this.handle, i));
      if (name === null) break;
      names.push(name);
    }
    return {
      kind,
      model: text(0),
      source: text(4),
      fingerprint: text(16),
      instructionSet: text(20),
      threads: this.library.pointer(at + 24),
      calibrationImages: this.library.long(at + 40),
      classes: names,
      fileBytes,
    };
  }
}

function withoutBytes({ bytes: _, ...rest }: Described): TensorDescription {
  return rest;
}

function withData(output: Described, bytes: Uint8Array): Tensor {
  const copy = bytes.slice().buffer; // aligned, and independent of the module's memory
  const data = output.dtype === "u8" ? new Uint8Array(copy) : output.dtype === "u16" ? new Uint16Array(copy) : new Int32Array(copy);
  return { ...withoutBytes(output), data };
}
