// The files that tests/web/fixtures.py writes; `pytest tests/web` sets FQVIT_FIXTURES.
import { readFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

export const ROOT = join(dirname(fileURLToPath(import.meta.url)), "../..");
export const GOLDEN = join(ROOT, "tests/golden");
export const FIXTURES = process.env.FQVIT_FIXTURES;
if (FIXTURES === undefined) throw new Error("FQVIT_FIXTURES: not set. Run `.venv/bin/python -m pytest tests/web`.");
export const ANSWERS = JSON.parse(readFileSync(join(FIXTURES, "answers.json"), "utf8"));
export { basename, join };

/** Return the bytes of a program file after `change`, which makes loading or running it fail. */
export function changed(path, change) {
  const bytes = new Uint8Array(readFileSync(path));
  return change(bytes) ?? bytes;
}
