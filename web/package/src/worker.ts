// The script of the worker, a Web Worker or a thread of Node.js: loads one file and answers requests.
import { FqvitError, messageOf } from "./errors.js";
import { Library } from "./library.js";
import type { Numbered, Reply } from "./protocol.js";
import { Session } from "./session.js";

interface Port {
  postMessage(message: unknown): void;
}

let session: Session | null = null;
let thread: WebAssembly.Instance | null = null;

function answer(request: Numbered): unknown {
  if (request.do === "load") {
    session = new Session(new Library(request.module, request.memory, request.threads), request.file, request.name, request.limits);
    return session.description;
  }
  if (request.do === "thread") {
    thread = new WebAssembly.Instance(request.module, { env: { memory: request.memory } });
    return true;
  }
  if (session === null) throw new FqvitError("worker: no model is loaded.");
  if (request.do === "preprocess") return session.preprocess(request.image);
  if (request.do === "run") return session.run(request.input);
  return session.detect(request.image, request.masks, request.minScore);
}

function reply(request: Numbered): Reply {
  try {
    return { id: request.id, value: answer(request) };
  } catch (error) {
    if (error instanceof FqvitError) return { id: request.id, error: error.message, stopped: false };
    return { id: request.id, error: `the WebAssembly module stopped (${messageOf(error)}).`, stopped: true };
  }
}

/** Reply to a request. A worker that becomes a thread replies only once: it then waits for work inside the module until it is ended. */
function respond(port: Port, request: Numbered): void {
  port.postMessage(reply(request));
  if (thread !== null && request.do === "thread") (thread.exports["fqvit_thread_run"] as (index: number) => void)(request.index);
}

type Thread = Port & { on(event: "message", listener: (request: Numbered) => void): void };

// `require` is read from the global object, because bundlers replace a bare `require`. Node.js sets it for scripts passed as text.
const { require } = globalThis as { require?: (name: string) => { parentPort: Thread } };

if (typeof require === "function") {
  const { parentPort } = require("node:worker_threads");
  parentPort.on("message", (request) => respond(parentPort, request));
} else {
  const port = globalThis as unknown as Port & { onmessage: (event: MessageEvent<Numbered>) => void };
  port.onmessage = (event) => respond(port, event.data);
}
