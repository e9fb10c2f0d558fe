// The page in Chromium: results, comparison, wrong input, accessibility, no remote requests.
import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { after, before, describe, test } from "node:test";
import { pathToFileURL } from "node:url";
import { build } from "esbuild";
import { chromium } from "playwright-core";
import { ANSWERS, basename, FIXTURES, GOLDEN, join, ROOT } from "./fixtures.mjs";

const PAGE = join(ROOT, "src/fqvit/assets/web/index.html");
const AXE = readFileSync(join(ROOT, "web/node_modules/axe-core/axe.min.js"), "utf8");
const TINY = join(GOLDEN, "tiny_v1.fqvit");
const DETECTOR = join(GOLDEN, "detectors/mask_rcnn_v1.fqvit");
const RGB = join(FIXTURES, "rgb.png");
// The headers that give a page shared memory, as `fqvit web --serve` sends them.
const ISOLATION = [["Cross-Origin-Opener-Policy", "same-origin"], ["Cross-Origin-Embedder-Policy", "require-corp"]];
const META = '<meta name="fqvit-model" content="">';

const folder = mkdtempSync(join(tmpdir(), "fqvit-page-"));
let browser, server, address;

before(async () => {
  const html = readFileSync(PAGE, "utf8");
  writeFileSync(join(folder, "index.html"), html);
  writeFileSync(join(folder, "with-model.html"), html.replace(META, META.replace('""', '"model.fqvit"')));
  cpSync(TINY, join(folder, "model.fqvit"));
  writeFileSync(join(folder, "model.fqvit.js"), `globalThis.fqvitModel="${readFileSync(TINY).toString("base64")}"\n`);
  cpSync(join(ROOT, "web/package/dist"), join(folder, "dist"), { recursive: true });
  writeFileSync(join(folder, "user.js"), 'import { load } from "fqvit/inline"; globalThis.load = load;');
  const user = { entryPoints: [join(folder, "user.js")], bundle: true, outfile: join(folder, "bundled.js"), nodePaths: [join(ROOT, "web/node_modules")] };
  await build({ ...user, logLevel: "error" });
  writeFileSync(join(folder, "blank.html"), "<title>blank</title>");
  server = createServer((request, response) => {
    try {
      const { pathname, search } = new URL(request.url, "http://x");
      const name = pathname.slice(1) || "index.html";
      for (const [header, value] of search === "?isolated" ? ISOLATION : []) response.setHeader(header, value);
      response.setHeader("Content-Type", name.endsWith(".html") ? "text/html" : name.endsWith(".js") ? "text/javascript" : "application/octet-stream");
      response.end(readFileSync(join(folder, name)));
    } catch {
      response.statusCode = 404;
      response.end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  address = `http://127.0.0.1:${server.address().port}/`;
  const args = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream", ...(process.getuid?.() === 0 ? ["--no-sandbox"] : [])];
  browser = await chromium.launch({ executablePath: process.env.FQVIT_CHROMIUM, args });
});

after(async () => {
  await browser?.close();
  server?.close();
  rmSync(folder, { recursive: true });
});

/** Open the page, run the test, and check that the page sent no request to another origin and printed nothing to the console. */
async function onPage(url, options, use) {
  const context = await browser.newContext({ viewport: { width: 1100, height: 800 }, reducedMotion: "reduce", ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(60_000);
  const seen = { requests: [], messages: [] };
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("console", (message) => seen.messages.push(message.text()));
  page.on("pageerror", (error) => seen.messages.push(String(error)));
  await page.goto(url);
  await page.waitForFunction(() => !document.getElementById("model-state").textContent.startsWith("Loading"));
  await use(page, seen);
  assert.deepEqual(seen.messages, []);
  const origin = url.startsWith("file:") ? "file:" : new URL(url).origin;
  assert.deepEqual(seen.requests.filter((one) => !/^(data|blob):/.test(one) && !one.startsWith(origin)), []);
  await context.close();
}

const choose = (page, id, ...files) => page.setInputFiles(`#${id}`, files);
const cards = (page, count) => page.waitForFunction((n) => document.querySelectorAll("#cards table").length === n, count);
const text = (page, selector) => page.locator(selector).innerText();
const messages = async (page, pattern) => {
  await page.waitForFunction((source) => new RegExp(source).test(document.getElementById("messages").textContent), pattern.source);
};
const fileOf = (name, bytes, mimeType = "application/octet-stream") => ({ name, mimeType, buffer: Buffer.from(bytes) });

async function useModel(page, file) {
  await choose(page, "model-file", file);
  await page.waitForFunction(() => document.getElementById("model-state").textContent === "The model is ready.");
}

/** Give files to the page as if they were dropped or pasted. */
function give(page, event, files) {
  return page.evaluate(
    ([kind, given]) => {
      const data = new DataTransfer();
      for (const { name, bytes } of given) data.items.add(new File([Uint8Array.from(bytes)], name));
      const init = { bubbles: true, cancelable: true };
      document.dispatchEvent(kind === "drop" ? new DragEvent("drop", { ...init, dataTransfer: data }) : new ClipboardEvent("paste", { ...init, clipboardData: data }));
    },
    [event, files.map(({ name, buffer }) => ({ name, bytes: [...buffer] }))],
  );
}

describe("the npm package in Chromium", { concurrency: false }, () => {
  for (const [kind, script] of Object.entries({ "as a module": null, "in a bundle": "bundled.js" })) {
    test(`${kind}: gives the same logits as Python`, async () => {
      const page = await browser.newPage();
      const requests = [];
      page.on("request", (request) => requests.push(basename(new URL(request.url()).pathname)));
      await page.goto(`${address}blank.html`);
      if (script !== null) await page.addScriptTag({ url: `${address}${script}` });
      const expected = ANSWERS.classifiers[TINY].results.find(({ image }) => image === RGB);
      const png = [...readFileSync(RGB)];
      const found = await page.evaluate(async (bytes) => {
        const { decodeImage, load } = await import("/dist/browser.js");
        const model = await (globalThis.load ?? load)("/model.fqvit");
        const { logits } = await model.classify(await decodeImage(new Blob([Uint8Array.from(bytes)])));
        const wrong = await model.run(new Uint8Array(1)).catch((error) => `${error.name}: ${error.message}`);
        model.close();
        return { logits: [...logits.data], wrong };
      }, png);
      assert.deepEqual(found.logits, expected.logits);
      assert.match(found.wrong, /^FqvitError: input: 1 bytes, expected 432/);
      assert.deepEqual(requests.filter((name) => name.endsWith(".wasm")), script === null ? ["fqvit-relaxed_simd.wasm"] : []);
      await page.close();
    });

    test(`${kind}: uses threads where the page is cross-origin isolated`, async () => {
      const page = await browser.newPage();
      await page.goto(`${address}blank.html?isolated`);
      if (script !== null) await page.addScriptTag({ url: `${address}${script}` });
      const expected = ANSWERS.classifiers[TINY].results.find(({ image }) => image === RGB);
      const found = await page.evaluate(async (bytes) => {
        const { decodeImage, load } = await import("/dist/browser.js");
        const image = await decodeImage(new Blob([Uint8Array.from(bytes)]));
        const results = [];
        for (const options of [{}, { threads: 1 }, { threads: 2 }, { threads: 3, instructionSet: "simd128" }, { threads: 4, instructionSet: "scalar" }]) {
          const model = await (globalThis.load ?? load)("/model.fqvit", options);
          const { logits } = await model.classify(image);
          results.push({ logits: [...logits.data], threads: model.description.threads, set: model.description.instructionSet });
          model.close();
        }
        return { results, cores: navigator.hardwareConcurrency, isolated: crossOriginIsolated };
      }, [...readFileSync(RGB)]);
      assert.ok(found.isolated);
      assert.deepEqual(found.results.map(({ threads }) => threads), [Math.min(found.cores, 4), 1, 2, 3, 1]);
      assert.deepEqual(found.results.map(({ set }) => set), ["relaxed_simd", "relaxed_simd", "relaxed_simd", "simd128", "scalar"]);
      for (const { logits } of found.results) assert.deepEqual(logits, expected.logits);
      await page.close();
    });
  }

  test("JPEG photographs are decoded upright, without color conversion", async () => {
    const page = await browser.newPage();
    await page.goto(`${address}blank.html`);
    const found = await page.evaluate(async () => {
      const { decodeImage } = await import("/dist/browser.js");
      const canvas = new OffscreenCanvas(32, 16);
      const context = canvas.getContext("2d");
      context.fillStyle = "#f00";
      context.fillRect(0, 0, 16, 16);
      const jpeg = new Uint8Array(await (await canvas.convertToBlob({ type: "image/jpeg", quality: 1 })).arrayBuffer());
      const exif = [0xff, 0xe1, 0, 34, ...new TextEncoder().encode("Exif\0\0MM"), 0, 42, 0, 0, 0, 8, 0, 1, 1, 0x12, 0, 3, 0, 0, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0];
      const { width, height, data } = await decodeImage(new Blob([jpeg.slice(0, 2), Uint8Array.from(exif), jpeg.slice(2)]));
      return { width, height, top: data[0], bottom: data[4 * (width * height - 1)] };
    });
    assert.deepEqual([found.width, found.height], [16, 32]); // orientation 6: rotated by 90 degrees
    assert.ok(found.top > 240 && found.bottom < 15, JSON.stringify(found));
    await page.close();
  });
});

describe("the page", { concurrency: false }, () => {
  for (const protocol of ["http", "file"]) {
    test(`${protocol}: samples of the embedded model are classified and compared with each other`, async () => {
      const url = protocol === "http" ? address : pathToFileURL(PAGE).href;
      await onPage(url, {}, async (page, seen) => {
        assert.equal(await text(page, "#model-state"), "The embedded model is ready.");
        const samples = page.locator("#sample-list button");
        assert.equal(await samples.count(), 20);
        for (const i of [2, 3, 16]) await samples.nth(i).click();
        await cards(page, 3);
        assert.match(await text(page, "#cards > li:first-child table"), /Bag/);
        assert.match(await text(page, "#cards > li:last-child .neighbours li:first-child"), /Trouser 2/); // the other trouser is nearest
        assert.match(await text(page, "#cards > li:first-child"), /ms per image.*\((relaxed_simd|simd128|scalar), 1 thread\)/);
        assert.match(await text(page, "#model-facts"), /[0-9a-f]{64}/);
        assert.deepEqual(seen.requests.filter((one) => !/^(data|blob):/.test(one)), [url]); // nothing else is loaded
        await page.click("#clear");
        assert.equal(await page.locator("#cards li").count(), 0);
      });
    });

    test(`${protocol}: the model next to the page is loaded`, async () => {
      const url = protocol === "http" ? `${address}with-model.html` : pathToFileURL(join(folder, "with-model.html")).href;
      await onPage(url, {}, async (page) => {
        assert.equal(await text(page, "#model-state"), "The model is ready.");
        assert.match(await text(page, "#model-facts"), new RegExp(ANSWERS.classifiers[TINY].fingerprint));
        await page.click("#model-reset");
        await page.waitForFunction(() => document.getElementById("model-state").textContent === "The embedded model is ready.");
      });
    });
  }

  test("the logits equal those of fqvit classify for every PNG type", async () => {
    await onPage(address, {}, async (page) => {
      for (const [file, expected] of Object.entries(ANSWERS.classifiers)) {
        await useModel(page, file);
        if ((await page.locator("#cards li").count()) === 0) await choose(page, "image-files", ...expected.results.map(({ image }) => image));
        await cards(page, expected.results.length);
        await choose(page, "compare-file", fileOf("answers.json", JSON.stringify(expected)));
        await page.waitForFunction((count) => document.querySelectorAll("#comparison .good").length === count, expected.results.length);
        assert.equal(await page.locator("#comparison .error").count(), 0);
      }
    });
  });

  test("differences from a JSON file are explained", async () => {
    await onPage(address, {}, async (page) => {
      await useModel(page, TINY);
      const expected = structuredClone(ANSWERS.classifiers[TINY]);
      expected.results = expected.results.slice(0, 1);
      const compare = async (json, pattern, where = "#comparison") => {
        await choose(page, "compare-file", fileOf("answers.json", typeof json === "string" ? json : JSON.stringify(json)));
        await page.waitForFunction(([at, source]) => new RegExp(source).test(document.querySelector(at).textContent), [where, pattern.source]);
      };
      await compare(expected, /No image of this page is in the JSON file/);
      await choose(page, "image-files", RGB);
      await cards(page, 1);
      expected.results[0].logits[2] += 1;
      await compare(expected, /rgb\.png: 1 of 5 logits differ \(class 2 first.*The pixels are equal/);
      expected.results[0].pixels = "0";
      await compare(expected, /The pixels differ already/);
      await compare({ ...expected, fingerprint: "0" }, /The models differ/);
      await compare("{", /answers\.json: not a JSON file/, "#messages");
      await compare({ results: [] }, /has no fingerprint/, "#messages");
      await compare({ fingerprint: "0", results: [null] }, /result 0 has no logits/, "#messages");
    });
  });

  test("boxes and masks of a detector are drawn", async () => {
    await onPage(address, {}, async (page) => {
      await useModel(page, DETECTOR);
      await choose(page, "image-files", RGB);
      await page.waitForSelector("#cards canvas");
      const good = ANSWERS.detectors[DETECTOR].scores.filter((score) => score >= 0.3).length;
      assert.match(await page.getAttribute("#cards canvas", "aria-label"), new RegExp(`with ${good} objects`));
      assert.ok(await page.locator("#compare").isHidden());
    });
  });

  test("dropped and pasted files are handled by their type", async () => {
    await onPage(address, {}, async (page) => {
      await give(page, "drop", [fileOf("mine.fqvit", readFileSync(TINY)), fileOf("rgb.png", readFileSync(RGB))]);
      await cards(page, 1);
      assert.match(await text(page, "#model-facts"), new RegExp(ANSWERS.classifiers[TINY].fingerprint));
      await give(page, "paste", [fileOf("pasted.png", readFileSync(RGB))]);
      await cards(page, 2);
    });
  });

  test("camera pictures are classified, and the camera is released", async () => {
    await onPage(address, { permissions: ["camera"] }, async (page) => {
      await page.click("#camera-open");
      await page.waitForFunction(() => document.getElementById("camera-view").videoWidth > 0);
      await page.click("#camera-take");
      await cards(page, 1);
      assert.match(await text(page, "#cards h3"), /camera 1\.png/);
      await page.click("#camera-close");
      assert.equal(await page.evaluate(() => document.getElementById("camera-view").srcObject), null);
      assert.ok(await page.locator("#camera").isHidden());
    });
  });

  test("errors name wrong files, and the page keeps working", async () => {
    await onPage(address, {}, async (page) => {
      const png = readFileSync(RGB);
      const huge = Buffer.from(png);
      huge.writeUInt32BE(100_000, 16);
      huge.writeUInt32BE(100_000, 20);
      const jpeg = Buffer.from([0xff, 0xd8, 0xff, 0xc0, 0, 17, 8, 0xff, 0xff, 0xff, 0xff, 3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1]);
      const wrong = [
        [fileOf("cut.png", png.subarray(0, 60)), /cut\.png: cannot be decoded/],
        [fileOf("huge.png", huge), /huge\.png: (100000 x 100000 pixels|cannot be decoded)/],
        [fileOf("huge.jpg", jpeg), /huge\.jpg: 65535 x 65535 pixels, at most 40000000/],
        [fileOf("notes.txt", "hello"), /notes\.txt: cannot be decoded/],
        [fileOf("broken.jpg", Buffer.from([0xff, 0xd8, 0xff, 1, 2, 3])), /broken\.jpg: cannot be decoded/],
        [fileOf("empty.png", ""), /empty\.png: an empty file/],
      ];
      for (const [file, pattern] of wrong) {
        await choose(page, "image-files", file);
        await messages(page, pattern);
      }
      await page.locator("#messages button").first().click();
      await page.locator("#sample-list button").first().click();
      await cards(page, 1);
    });
  });

  test("hostile and wrong models give an error message, and another model can be loaded", async () => {
    await onPage(address, {}, async (page) => {
      const tiny = readFileSync(TINY);
      const bad = Buffer.from(tiny);
      bad[bad.length - 1] ^= 1;
      const long = Buffer.concat([Buffer.from([255, 255, 255, 255, 255, 255, 255, 127]), Buffer.from("{}")]);
      const deep = Buffer.from(`{"__metadata__":{"fqvit":"${"[".repeat(1_000_000)}"}}`);
      const length = Buffer.alloc(8);
      length.writeUInt32LE(deep.length);
      const wrong = [
        [fileOf("photo.fqvit", readFileSync(RGB)), /photo\.fqvit: not a \.fqvit file/],
        [fileOf("bad.fqvit", bad), /bad\.fqvit: .*fingerprint/],
        [fileOf("cut.fqvit", tiny.subarray(0, -1)), /cut\.fqvit: /],
        [fileOf("long.fqvit", long), /long\.fqvit: not a \.fqvit file/],
        [fileOf("deep.fqvit", Buffer.concat([length, deep])), /deep\.fqvit: /],
        [fileOf("empty.fqvit", ""), /empty\.fqvit: not a \.fqvit file/],
      ];
      for (const [file, pattern] of wrong) {
        await choose(page, "model-file", file);
        await messages(page, pattern);
        assert.equal(await text(page, "#model-state"), "No model is loaded.");
      }
      await useModel(page, TINY);
      assert.equal(await text(page, "#messages"), "");
    });
  });

  test("a run can be stopped, and the page keeps working", async () => {
    await onPage(address, {}, async (page) => {
      await useModel(page, DETECTOR);
      const size = 1500;
      const big = await page.evaluate(async (side) => {
        const canvas = new OffscreenCanvas(side, side);
        const context = canvas.getContext("2d");
        context.fillStyle = "#888";
        context.fillRect(9, 9, side / 2, side / 2);
        return [...new Uint8Array(await (await canvas.convertToBlob({ type: "image/jpeg" })).arrayBuffer())];
      }, size);
      await choose(page, "image-files", fileOf("big.jpg", big), fileOf("big2.jpg", big));
      await page.click("#stop");
      await page.waitForFunction(() => document.getElementById("stop").hidden);
      assert.equal(await page.locator("#cards li").count(), 0);
      await choose(page, "image-files", RGB);
      await page.waitForSelector("#cards canvas");
    });
  });

  test("hostile class names and file names stay text", async () => {
    await onPage(address, {}, async (page) => {
      const name = "<img src=x onerror=window.broken=1>.png";
      await page.evaluate(() => delete window.broken);
      await give(page, "drop", [fileOf(name, readFileSync(RGB))]);
      await cards(page, 1);
      assert.equal(await text(page, "#cards h3"), name);
      assert.equal(await page.evaluate(() => window.broken), undefined);
    });
  });

  for (const [name, options] of Object.entries({
    light: { colorScheme: "light" },
    dark: { colorScheme: "dark" },
    phone: { colorScheme: "light", viewport: { width: 360, height: 740 }, isMobile: true },
  })) {
    test(`${name}: axe finds nothing serious, and nothing is wider than the screen`, async () => {
      await onPage(address, { ...options, bypassCSP: true }, async (page) => {
        const samples = page.locator("#sample-list button");
        for (const i of [0, 1]) await samples.nth(i).click();
        await cards(page, 2);
        await choose(page, "image-files", fileOf("notes.txt", "hello"));
        await messages(page, /notes\.txt/);
        await page.addScriptTag({ content: AXE });
        const { violations } = await page.evaluate(() => globalThis.axe.run());
        const serious = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
        assert.deepEqual(serious.map(({ id, nodes }) => `${id}: ${nodes[0].html}`), []);
        assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
      });
    });
  }

  test("everything can be reached and used by keyboard", async () => {
    await onPage(address, {}, async (page) => {
      const reached = [];
      for (let i = 0; i < 8; i++) {
        await page.keyboard.press("Tab");
        reached.push(await page.evaluate(() => document.activeElement.id || document.activeElement.title));
      }
      assert.deepEqual(reached.slice(0, 4), ["model-file", "image-files", "camera-open", "T-shirt or top"]);
      await page.keyboard.press("Enter");
      await cards(page, 1);
    });
  });
});
