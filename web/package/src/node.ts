import { loader } from "./load.js";
import { nodePlatform } from "./platform.node.js";

export * from "./api.js";

export const load = loader(nodePlatform);
