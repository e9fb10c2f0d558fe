// Build the npm package into package/dist and the page into one file: node build.mjs [--wasm DIR] [--assets DIR] [--page FILE]
//
// --wasm    folder of the modules fqvit-*.wasm (make wasm); default ../build/wasm
// --assets  folder of the embedded model and the samples (scripts/web_assets.py); default ../build/web
// --page    where to write the page; default ../src/fqvit/assets/web/index.html, from where `fqvit web` copies it
import { execFileSync } from "node:child_process";
import { copyFileSync, existsSync, mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
const PACKAGE = join(HERE, "package");
const DIST = join(PACKAGE, "dist");
const MODEL = "fmnist_swin.fqvit";
const MODULES = ["scalar", "simd128", "relaxed_simd", "simd128-threads", "relaxed_simd-threads"]; // as in package/src/modules.ts

const { values: options } = parseArgs({
  options: {
    wasm: { type: "string", default: join(HERE, "../build/wasm") },
    assets: { type: "string", default: join(HERE, "../build/web") },
    page: { type: "string", default: join(HERE, "../src/fqvit/assets/web/index.html") },
  },
});

function read(folder, name, remedy) {
  const path = join(folder, name);
  if (!existsSync(path)) {
    console.error(`${path}: not found. Run \`${remedy}\` first.`);
    process.exit(2);
  }
  return readFileSync(path);
}

/** Resolve the generated modules that package/src/globals.d.ts declares. */
function generated(modules) {
  return {
    name: "generated",
    setup(bundler) {
      for (const [name, make] of Object.entries(modules)) {
        bundler.onResolve({ filter: new RegExp(`^${name}$`) }, () => ({ path: name, namespace: "generated" }));
        bundler.onLoad({ filter: new RegExp(`^${name}$`), namespace: "generated" }, () => ({
          contents: `export default ${JSON.stringify(make())};`,
          loader: "js",
        }));
      }
    },
  };
}

async function bundle(entry, settings) {
  const done = await build({
    absWorkingDir: HERE,
    entryPoints: [entry],
    bundle: true,
    write: false,
    minify: true,
    target: "es2022",
    legalComments: "none",
    logLevel: "warning",
    ...settings,
  });
  return done.outputFiles[0].text;
}

const wasm = Object.fromEntries(MODULES.map((name) => [name, read(options.wasm, `fqvit-${name}.wasm`, "make wasm")]));
const worker = await bundle("package/src/worker.ts", { format: "iife" });
const inline = Object.fromEntries(MODULES.map((name) => [name, gzipSync(wasm[name], { level: 9 }).toString("base64")]));
const modules = { "worker-script": () => worker, "inline-modules": () => inline };

rmSync(DIST, { recursive: true, force: true });
mkdirSync(DIST, { recursive: true });
for (const [name, platform] of [["browser", "browser"], ["inline", "browser"], ["node", "node"]]) {
  const text = await bundle(`package/src/${name}.ts`, { format: "esm", platform, plugins: [generated(modules)] });
  writeFileSync(join(DIST, `${name}.js`), text);
}
for (const name of MODULES) writeFileSync(join(DIST, `fqvit-${name}.wasm`), wasm[name]);
const tsc = join(HERE, "node_modules/typescript/bin/tsc");
execFileSync(process.execPath, [tsc, "-p", join(PACKAGE, "tsconfig.json")], { stdio: "inherit" });
copyFileSync(join(HERE, "../LICENSE"), join(PACKAGE, "LICENSE"));

const assets = {
  "embedded-model": () => ({ name: MODEL, base64: read(options.assets, MODEL, "make web").toString("base64") }),
  samples: () => JSON.parse(read(options.assets, "samples.json", "make web")),
};
const script = await bundle("page/src/main.ts", { format: "iife", plugins: [generated({ ...modules, ...assets })] });
const style = await bundle("page/src/style.css", {});
const template = readFileSync(join(HERE, "page/index.html"), "utf8");
const html = template
  .replace("<!-- style -->", () => `<style>${style.trim()}</style>`)
  .replace("<!-- script -->", () => `<script>${script.trim().replaceAll("</script", "<\\/script")}</script>`);
const target = resolve(options.page);
mkdirSync(dirname(target), { recursive: true });
writeFileSync(`${target}.new`, html);
renameSync(`${target}.new`, target);
const kilobytes = (text) => `${(Buffer.byteLength(text) / 1000).toFixed(0)} kB (${(gzipSync(text, { level: 9 }).length / 1000).toFixed(0)} kB compressed)`;
console.log(`package: ${DIST}; modules ${MODULES.map((name) => `${name} ${kilobytes(wasm[name])}`).join(", ")}`);
console.log(`page:    ${target}, ${kilobytes(html)}`);
