/** The error of a call: a wrong file, a wrong image or a limit. The message is one line that names the problem and the remedy. */
export class FqvitError extends Error {
  override readonly name = "FqvitError";
}

/** Return the message of anything that was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
