// The caller's side of a worker: assigns ids to requests, limits their time, and ends the worker if it does not answer. A worker may have
// helpers, the workers that compute as its threads. If one of them ends, all of them end.
import { FqvitError } from "./errors.js";
import type { Thread } from "./platform.js";
import type { Reply, Request } from "./protocol.js";

interface Waiting {
  resolve(value: unknown): void;
  reject(error: FqvitError): void;
  timer: ReturnType<typeof setTimeout> | null;
}

export class Connection {
  private readonly waiting = new Map<number, Waiting & { message: () => void; limit: number; what: string }>();
  private next = 0;
  private ended: string | null = null;
  private onEnd: ((message: string) => void) | null = null;

  constructor(
    private readonly thread: Thread,
    private readonly name: string,
    private readonly helpers: readonly Connection[] = [],
  ) {
    for (const helper of helpers) helper.onEnd = (message) => this.end(message);
    thread.listen(
      (data) => this.receive(data as Reply),
      (message) => this.end(`${this.name}: the worker failed (${message}). Load the model again.`),
    );
  }

  get isOpen(): boolean {
    return this.ended === null;
  }

  /** Send a request. milliseconds: time limit, counted from the start of the request in the worker   what: its name in error messages */
  ask<T>(request: Request, milliseconds: number, what: string, transfer: ArrayBuffer[] = []): Promise<T> {
    if (this.ended !== null) return Promise.reject(new FqvitError(this.ended));
    const id = this.next++;
    return new Promise<T>((resolve, reject) => {
      const message = (): void => this.thread.post({ ...request, id }, transfer);
      const entry = { resolve: resolve as (value: unknown) => void, reject, timer: null, message, limit: milliseconds, what };
      this.waiting.set(id, entry);
      if (this.waiting.size === 1) this.start();
    });
  }

  /** End the worker. Waiting requests fail with this message. */
  end(message: string): void {
    if (this.ended !== null) return;
    this.ended = message;
    this.thread.end();
    for (const helper of this.helpers) helper.end(message);
    this.onEnd?.(message);
    for (const entry of this.waiting.values()) {
      if (entry.timer !== null) clearTimeout(entry.timer);
      entry.reject(new FqvitError(message));
    }
    this.waiting.clear();
  }

  /** Send the oldest request: the worker gets one at a time, so that a time limit does not include earlier requests. */
  private start(): void {
    const [entry] = this.waiting.values();
    if (entry === undefined) return;
    const late = `${this.name}: ${entry.what} took longer than ${entry.limit} ms and was stopped. Use a smaller model or image, or raise the limit.`;
    entry.timer = setTimeout(() => this.end(late), entry.limit);
    entry.message();
  }

  private receive(reply: Reply): void {
    const entry = this.waiting.get(reply.id);
    if (entry === undefined) return;
    if (entry.timer !== null) clearTimeout(entry.timer);
    this.waiting.delete(reply.id);
    if ("error" in reply) {
      const message = reply.stopped ? `${this.name}: ${reply.error} Load the model again.` : reply.error;
      entry.reject(new FqvitError(message));
      if (reply.stopped) this.end(message);
    } else {
      entry.resolve(reply.value);
    }
    if (this.ended === null) this.start();
  }
}
