import type { Connection } from "./connection.js";
import { FqvitError } from "./errors.js";
import { checkedImage } from "./image.js";
import type {
  Classification, Description, Detection, Embedding, Image, Input, Limits, Ranked, Result, Tensor, TensorDescription,
} from "./types.js";

/** A loaded model or detector, which runs in a worker of its own. Calls run one after the other. */
export class Model {
  /** What the file is: fingerprint, classes, outputs, instruction set in use. */
  readonly description: Description;
  private readonly connection: Connection;
  private readonly limits: Limits;
  private readonly name: string;

  /** Use `load` instead. */
  constructor(connection: Connection, description: Description, limits: Limits, name: string) {
    [this.connection, this.description, this.limits, this.name] = [connection, description, limits, name];
  }

  /** Whether the model can be used: it was not closed, and no time limit or crash has ended its worker. */
  get isOpen(): boolean {
    return this.connection.isOpen;
  }

  /** Resize and crop an image as `fqvit` does in Python, bit for bit: u8 [height, width, channels]. */
  preprocess(image: Image): Promise<Uint8Array> {
    return this.guarded(() => this.connection.ask({ do: "preprocess", image: this.checked(image) }, this.limits.runTime, "preprocessing"));
  }

  /** Run the model on an image and return all its outputs as integers. */
  run(input: Input): Promise<Result> {
    return this.guarded(() => {
      const checked = input instanceof Uint8Array ? input : this.checked(input);
      return this.connection.ask({ do: "run", input: checked }, this.limits.runTime, "a run");
    });
  }

  /** Return the best classes of an image. top: number of classes to return */
  async classify(input: Input, { top = 5 }: { top?: number } = {}): Promise<Classification> {
    const at = this.description.outputs.findIndex((output) => output.kind === "logits");
    if (at < 0) throw new FqvitError(`${this.name}: has no logits, its outputs are ${this.outputNames()}. Use ${this.otherCall()}.`);
    const { outputs, times } = await this.run(input);
    const logits = outputs[at] as Tensor;
    return { top: rank(logits, this.description.classes, top), logits, times };
  }

  /** Return the embedding of an image. output: name of the output; default: the first vector that is not logits */
  async embed(input: Input, { output }: { output?: string } = {}): Promise<Embedding> {
    const at = this.description.outputs.findIndex((one) => (output === undefined ? isVector(one) : one.name === output));
    if (at < 0) {
      const wanted = output === undefined ? "no embedding" : `no output ${JSON.stringify(output)}`;
      const remedy = this.description.kind === "detector" ? "Use detect()." : "Quantize with --output embedding, or choose another output.";
      throw new FqvitError(`${this.name}: has ${wanted}, its outputs are ${this.outputNames()}. ${remedy}`);
    }
    const { outputs, times } = await this.run(input);
    return { ...(outputs[at] as Tensor), times };
  }

  /** Find the objects in an image. masks: also compute masks   minScore: leave out objects below this probability */
  detect(image: Image, { masks = false, minScore = 0 }: { masks?: boolean; minScore?: number } = {}): Promise<Detection> {
    return this.guarded(() => this.connection.ask({ do: "detect", image: this.checked(image), masks, minScore }, this.limits.runTime, "detection"));
  }

  /** Free the model and end its worker. Later calls fail. */
  close(): void {
    this.connection.end(`${this.name}: the model was closed. Load it again.`);
  }

  private checked(image: Image): Image {
    if (image === null || typeof image !== "object") throw new FqvitError("image: expected an object with data, width and height, such as ImageData.");
    return checkedImage(image, this.limits.pixels);
  }

  /** Return a rejected promise if a call throws before it asks the worker. */
  private async guarded<T>(call: () => Promise<T>): Promise<T> {
    return call();
  }

  private outputNames(): string {
    return this.description.outputs.map((output) => `${output.name} [${output.shape.join(", ")}]`).join(", ") || "boxes and masks";
  }

  private otherCall(): string {
    return this.description.kind === "detector" ? "detect()" : "embed() or run()";
  }
}

/** Return whether an output is an embedding: a single vector, not logits, whose channels share one scale. */
export function isVector(output: TensorDescription): boolean {
  return output.kind !== "logits" && output.shape.length === 1 && output.alpha === null;
}

/** Rank classes by their integer logits. Ties are broken by the lower class index, as in `fqvit classify`. */
export function rank(logits: Tensor, names: readonly string[], count: number): Ranked[] {
  const { scale } = logits;
  const data = Array.from(logits.data);
  const largest = data.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = data.map((value) => Math.exp((value - largest) * scale));
  const sum = weights.reduce((a, b) => a + b, 0);
  const order = Array.from(data.keys()).sort((a, b) => (data[b] as number) - (data[a] as number) || a - b);
  return order.slice(0, count).map((i) => ({
    class: i,
    name: names[i] ?? null,
    integer: data[i] as number,
    logit: (data[i] as number) * scale,
    probability: (weights[i] as number) / sum,
  }));
}
