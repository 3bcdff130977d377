// The words of watching and comparing.
import { en } from "./watch-en.js";
import { zh } from "./watch-zh.js";

export const words = { en, zh };
