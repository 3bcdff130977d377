// Texts of the pages that show and compare runs.
import { en } from "./watch-en.js";
import { zh } from "./watch-zh.js";

export const texts = { en, zh };
