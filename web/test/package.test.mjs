// The npm package in Node.js: the same bits as Python, error messages for wrong input, limits.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { availableParallelism } from "node:os";
import { afterEach, test } from "node:test";
import { pathToFileURL } from "node:url";
import { decodeImage, decodePng, FqvitError, imageSize, load, similarity } from "fqvit";
import { ANSWERS, basename, changed, FIXTURES, GOLDEN, join, ROOT } from "./fixtures.mjs";

const TINY = join(GOLDEN, "tiny_v1.fqvit");
const DETECTOR = join(GOLDEN, "detectors/mask_rcnn_v1.fqvit");
const models = [];
const opened = async (...values) => {
  const model = await load(...values);
  models.push(model);
  return model;
};
afterEach(() => {
  for (const model of models.splice(0)) model.close();
});
const png = (path) => decodePng(readFileSync(path), basename(path));
const rejected = (promise, pattern) => assert.rejects(promise, (error) => {
  assert.ok(error instanceof FqvitError, String(error.stack));
  assert.match(error.message, pattern);
  assert.ok(!error.message.includes("\n"), error.message);
  return true;
});

const RELAXED = Uint8Array.of(...Buffer.from("AGFzbQEAAAABBQFgAAF7AwIBAAoPAQ0AQQD9D0EA/Q/9kgIL", "base64")); // uses relaxed SIMD
const FASTEST = WebAssembly.validate(RELAXED) ? "relaxed_simd" : "simd128";
const SETTINGS = [{ instructionSet: "simd128", threads: 1 }, { instructionSet: "scalar" }, { threads: 1 }, { threads: 2 }, { threads: 3 }];

for (const settings of SETTINGS) {
  const title = JSON.stringify(settings);
  test(`${title}: images of every PNG type give the same pixels and logits as fqvit classify`, async () => {
    for (const [file, expected] of Object.entries(ANSWERS.classifiers)) {
      const model = await opened(file, settings);
      assert.equal(model.description.fingerprint, expected.fingerprint);
      assert.equal(model.description.instructionSet, settings.instructionSet ?? FASTEST);
      assert.equal(model.description.threads, settings.threads ?? 1);
      assert.equal(expected.results.length, 15);
      for (const { image, logits, pixels, top } of expected.results) {
        const decoded = await png(image);
        const prepared = await model.preprocess(decoded);
        assert.equal(createHash("sha256").update(prepared).digest("hex"), pixels, `${file} ${image}`);
        const found = await model.classify(decoded);
        assert.deepEqual([...found.logits.data], logits, `${file} ${image}`);
        assert.deepEqual(found.top.map((one) => one.class), top.map((one) => one.class));
        assert.deepEqual(found.top.map((one) => one.name), top.map((one) => one.name));
        assert.deepEqual([...(await model.run(prepared)).outputs[0].data], logits);
      }
    }
  });

  test(`${title}: detectors give the same boxes, scores and masks as Python`, async () => {
    for (const [file, expected] of Object.entries(ANSWERS.detectors)) {
      const model = await opened(file, settings);
      assert.equal(model.description.kind, "detector");
      const { objects } = await model.detect(await png(expected.image), { masks: true });
      assert.deepEqual(objects.map((one) => one.box), expected.boxes);
      assert.deepEqual(objects.map((one) => one.score), expected.scores);
      assert.deepEqual(objects.map((one) => one.class), expected.labels);
      assert.deepEqual(objects.map((one) => [...one.mask]), expected.masks);
      const half = await model.detect(await png(expected.image), { minScore: expected.scores[1] });
      assert.equal(half.objects.length, expected.scores.filter((score) => score >= expected.scores[1]).length);
      assert.equal(half.objects[0].mask, null);
    }
  });
}

test("by default there is one thread per core, at most 4; given numbers are limited to 1 to 16", async () => {
  const model = await opened(TINY);
  assert.equal(model.description.threads, Math.min(availableParallelism(), 4));
  for (const [threads, used] of [[0, 1], [1.5, 1], [100, 16]]) assert.equal((await opened(TINY, { threads })).description.threads, used);
});

test("all outputs equal those of Python, and embed returns the chosen one", async () => {
  const { file, image, outputs } = ANSWERS.outputs;
  const model = await opened(pathToFileURL(file));
  const decoded = await png(image);
  const found = await model.run(decoded);
  assert.deepEqual(found.outputs.map(({ name, kind, data }) => ({ name, kind, data: [...data] })), outputs);
  assert.ok(found.times.run > 0);
  const first = await model.embed(decoded);
  assert.equal(first.name, "embedding");
  assert.deepEqual([...(await model.embed(decoded, { output: "mean:l2" })).data], outputs.find((one) => one.name === "mean:l2").data);
  await rejected(model.embed(decoded, { output: "nothing" }), /no output "nothing", its outputs are logits \[5\]/);
});

test("similarities equal those of fqvit search", () => {
  for (const { dtype, zero, a, b, score } of ANSWERS.similarities) {
    const kinds = { u8: Uint8Array, u16: Uint16Array, i32: Int32Array, signs: Uint8Array };
    const tensor = (values) => ({ kind: dtype === "signs" ? "signs" : "embedding", dtype, zeroPoint: zero, alpha: null, data: kinds[dtype].from(values) });
    assert.equal(similarity(tensor(a), tensor(b)) * 2 ** 24, score, `${dtype} ${a.length}`);
  }
});

test("files can be given as bytes, blobs, paths and URLs, and stay usable by the caller", async () => {
  const bytes = readFileSync(TINY);
  const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  for (const source of [bytes, buffer, new Blob([bytes]), TINY, pathToFileURL(TINY)]) {
    const model = await opened(source);
    assert.equal(model.description.fileBytes, bytes.length);
  }
  assert.equal(buffer.byteLength, bytes.length);
});

test("calls run one after the other, and calls to a closed model are rejected", async () => {
  const model = await load(TINY);
  const image = await png(join(FIXTURES, "rgb.png"));
  const all = await Promise.all(Array.from({ length: 5 }, () => model.classify(image)));
  for (const one of all) assert.deepEqual(one.logits.data, all[0].logits.data);
  assert.ok(model.isOpen);
  model.close();
  model.close();
  assert.ok(!model.isOpen);
  await rejected(model.classify(image), /tiny_v1\.fqvit: the model was closed/);
});

test("wrong files are rejected before a worker starts, and the message names the file", async () => {
  await rejected(load(join(ROOT, "README.md")), /README\.md: not a \.fqvit file/);
  await rejected(load(join(FIXTURES, "rgb.png")), /rgb\.png: not a \.fqvit file/);
  await rejected(load(join(FIXTURES, "none.fqvit")), /none\.fqvit: cannot be read \(ENOENT\)/);
  await rejected(load(new Uint8Array(0)), /model: not a \.fqvit file/);
  await rejected(load(42), /load: expected a URL/);
  await rejected(load(TINY, { limits: { fileBytes: 1000 } }), /tiny_v1\.fqvit: \d+ bytes, at most 1000/);
  await rejected(load("http://127.0.0.1:9/x.fqvit"), /x\.fqvit: cannot be loaded/);
});

test("damaged programs are rejected with the message of the library", async () => {
  await rejected(load(changed(TINY, (bytes) => { bytes[bytes.length - 1] ^= 1; })), /^model: .*fingerprint/);
  await rejected(load(changed(TINY, (bytes) => bytes.slice(0, -1))), /^model: /);
  await rejected(load(changed(DETECTOR, (bytes) => bytes.slice(0, -1))), /^model: /);
  await rejected(load(TINY, { limits: { runBytes: 16 } }), /tiny_v1\.fqvit: its buffers need/);
});

test("prefixes and random mutations of a file give an error message or a model", { timeout: 600_000 }, async () => {
  const bytes = new Uint8Array(readFileSync(join(GOLDEN, "fraction_v1.fqvit")));
  const files = Array.from({ length: 12 }, (_, i) => bytes.slice(0, Math.floor((i * bytes.length) / 12)));
  let state = 1;
  const random = (below) => (state = (state * 48271) % 2147483647) % below;
  for (let i = 0; i < 60; i++) {
    const copy = bytes.slice();
    for (let k = 0; k <= random(4); k++) copy[random(copy.length)] = random(256);
    files.push(copy);
  }
  for (const file of files) {
    try {
      const model = await opened(file, { limits: { loadTime: 20_000 } });
      await model.run({ data: new Uint8Array(3 * 9 * 9), width: 9, height: 9 });
    } catch (error) {
      assert.ok(error instanceof FqvitError, String(error.stack));
      assert.doesNotMatch(error.message, /module stopped/);
    }
  }
});

test("the seeds of the fuzzer load and run in WebAssembly", { timeout: 600_000 }, async () => {
  const folder = join(ROOT, "native/fuzz/seeds");
  for (const name of readdirSync(folder)) {
    try {
      const model = await opened(join(folder, name));
      const { input } = model.description;
      await model.run(new Uint8Array(input.shape.reduce((a, b) => a * b, 1)));
    } catch (error) {
      assert.ok(error instanceof FqvitError, String(error.stack));
      assert.doesNotMatch(error.message, /module stopped/);
    }
  }
});

test("wrong images are rejected with the reason", async () => {
  const model = await opened(TINY);
  const detector = await opened(DETECTOR);
  const data = new Uint8Array(12);
  await rejected(model.run({ data, width: 2, height: 3 }), /image: 12 bytes for 2 x 3 pixels/);
  await rejected(model.run({ data, width: 0, height: 3 }), /image: 0 x 3, expected sides/);
  await rejected(model.run({ data, width: 1.5, height: 8 }), /image: 1\.5 x 8/);
  await rejected(model.run({ data, width: 20000, height: 20000 }), /400000000|20000 x 20000 pixels, at most/);
  await rejected(model.run({ data: "x", width: 1, height: 1 }), /image: expected its data/);
  await rejected(model.run(null), /image: expected an object/);
  await rejected(model.run(data), /input: 12 bytes, expected 432 \(12 x 12 x 3\)/);
  await rejected(model.detect({ data, width: 2, height: 2 }), /is not a detector/);
  await rejected(detector.classify({ data, width: 2, height: 2 }), /has no logits, its outputs are boxes and masks. Use detect/);
  await rejected(detector.run({ data, width: 2, height: 2 }), /is a detector. Use detect/);
  await rejected(detector.embed({ data, width: 2, height: 2 }), /no embedding/);
});

test("a call that takes too long is stopped with a message", async () => {
  const model = await load(DETECTOR, { limits: { runTime: 1 } });
  const image = { data: new Uint8Array(3 * 500 * 500), width: 500, height: 500 };
  const [first, second] = [model.detect(image), model.detect(image)];
  await rejected(first, /mask_rcnn_v1\.fqvit: detection took longer than 1 ms and was stopped/);
  await rejected(second, /was stopped/);
  await rejected(model.detect(image), /was stopped/);
  await rejected(load(TINY, { limits: { loadTime: 0 } }), /tiny_v1\.fqvit: loading took longer than 0 ms/);
});

test("damaged and huge PNG files are rejected, and the message names the file", async () => {
  const bytes = readFileSync(join(FIXTURES, "rgb.png"));
  await rejected(decodePng(bytes.subarray(0, 100), "cut.png"), /cut\.png: cannot be decoded \(.*truncated/);
  const flipped = Buffer.from(bytes);
  flipped[60] ^= 1;
  await rejected(decodePng(flipped, "bad.png"), /bad\.png: cannot be decoded \(its chunk "IDAT" has a wrong checksum/);
  await rejected(decodePng(bytes, "large.png", 100), /large\.png: 97 x 61 pixels, at most 100/);
  await rejected(decodeImage(new File(["GIF89a.........."], "x.gif")), /x\.gif: only PNG files can be decoded here|at most/);
  await rejected(decodeImage(new File([], "empty.png")), /empty\.png: an empty file/);
  assert.deepEqual(imageSize(bytes), { type: "png", width: 97, height: 61 });
  assert.equal(imageSize(new TextEncoder().encode("hello")), null);
});
