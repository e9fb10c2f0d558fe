import { readFile, stat } from "node:fs/promises";
import { availableParallelism } from "node:os";
import { fileURLToPath } from "node:url";
import { Worker } from "node:worker_threads";
import { FqvitError, messageOf } from "./errors.js";
import { checkFileSize } from "./load.js";
import type { Platform, Thread } from "./platform.js";
import { read as download } from "./platform.browser.js";
import WORKER from "worker-script";

/** Start a thread. It does not keep the process alive while no call is waiting. */
function startWorker(): Thread {
  const worker = new Worker(WORKER, { eval: true, name: "fqvit" });
  let waiting = 0;
  const count = (change: number): void => {
    waiting += change;
    if (waiting > 0) worker.ref();
    else worker.unref();
  };
  return {
    post(message, transfer) {
      count(1);
      worker.postMessage(message, transfer);
    },
    listen(onMessage, onError) {
      worker.on("message", (data) => {
        count(-1);
        onMessage(data);
      });
      worker.on("error", (error) => onError(messageOf(error)));
      worker.unref();
    },
    end: () => void worker.terminate(),
  };
}

async function read(address: string | URL, name: string, maxBytes: number): Promise<Uint8Array> {
  const url = address instanceof URL ? address : /^[a-z]+:\/\//i.test(address) ? new URL(address) : null;
  if (url !== null && url.protocol !== "file:") return download(url, name, maxBytes);
  const path = url === null ? String(address) : fileURLToPath(url);
  try {
    checkFileSize((await stat(path)).size, name, maxBytes);
    return new Uint8Array(await readFile(path)); // a separate copy, because the worker takes over its memory
  } catch (error) {
    if (error instanceof FqvitError) throw error;
    throw new FqvitError(`${path}: cannot be read (${(error as NodeJS.ErrnoException).code ?? messageOf(error)}). Check the path.`);
  }
}

export const nodePlatform: Platform = {
  startWorker,
  read,
  moduleBytes: (name) => readFile(new URL(`./fqvit-${name}.wasm`, import.meta.url)).then((bytes) => new Uint8Array(bytes)),
  cores: availableParallelism,
};
