// Modules that build.mjs generates.
declare module "worker-script" {
  const script: string;
  export default script;
}
declare module "inline-modules" {
  /** gzip-compressed and in base64 */
  const modules: Record<import("./modules.js").ModuleName, string>;
  export default modules;
}
declare module "embedded-model" {
  const model: { readonly name: string; readonly base64: string };
  export default model;
}
declare module "samples" {
  /** PNG files in base64 */
  const samples: readonly { readonly name: string; readonly png: string }[];
  export default samples;
}
