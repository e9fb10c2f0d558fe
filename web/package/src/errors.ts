/** An error of a call: an invalid file or image, or an exceeded limit. The message is one line with the problem and the remedy. */
export class FqvitError extends Error {
  override readonly name = "FqvitError";
}

/** Return the message of anything that was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
