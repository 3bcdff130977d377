// Texts for watching and comparing runs.
import { en } from "./watch-en.js";
import { zh } from "./watch-zh.js";

export const words = { en, zh };
