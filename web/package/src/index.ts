// The types of every entry point.
export * from "./browser.js";
