import { FqvitError, messageOf } from "./errors.js";
import { checkFileSize } from "./load.js";
import type { Platform, Thread } from "./platform.js";
import WORKER from "worker-script";

/** Start the worker from a blob, because bundlers and pages opened from disk might not find a separate worker file. */
function startWorker(): Thread {
  const address = URL.createObjectURL(new Blob([WORKER], { type: "text/javascript" }));
  let worker: Worker;
  try {
    worker = new Worker(address, { name: "fqvit" });
  } catch (error) {
    throw new FqvitError(`worker: cannot be started (${messageOf(error)}). Allow "worker-src blob:" in the Content-Security-Policy.`);
  } finally {
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }
  return {
    post: (message, transfer) => worker.postMessage(message, transfer),
    listen(onMessage, onError) {
      worker.onmessage = (event) => onMessage(event.data);
      worker.onerror = (event) => onError(event.message || "it cannot be started");
      worker.onmessageerror = () => onError("a message cannot be read");
    },
    end: () => worker.terminate(),
  };
}

/** Download a file, and stop as soon as it is larger than allowed. */
export async function read(address: string | URL, name: string, maxBytes: number): Promise<Uint8Array> {
  let response: Response;
  try {
    response = await fetch(address);
  } catch (error) {
    throw new FqvitError(`${name}: cannot be loaded (${messageOf(error)}). Check the URL and the connection.`);
  }
  if (!response.ok || response.body === null) throw new FqvitError(`${name}: HTTP status ${response.status}, expected 200. Check the URL.`);
  checkFileSize(Number(response.headers.get("content-length") ?? 0), name, maxBytes);
  const parts: Uint8Array<ArrayBuffer>[] = [];
  let total = 0;
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read().catch((error: unknown) => {
      throw new FqvitError(`${name}: the download failed (${messageOf(error)}). Try again.`);
    });
    if (done) break;
    total += value.length;
    if (total > maxBytes) await reader.cancel();
    checkFileSize(total, name, maxBytes);
    parts.push(value as Uint8Array<ArrayBuffer>);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

export function browserPlatform(moduleBytes: Platform["moduleBytes"]): Platform {
  return { startWorker, read, moduleBytes, cores: () => navigator.hardwareConcurrency ?? 1 };
}
