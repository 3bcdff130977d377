// The turns of a prompt that was written with a chat template, without its control tokens.

// The beginnings of turns in common templates: ChatML, Llama 3, Gemma, Phi and Zephyr, Mistral and
// Llama 2, DeepSeek.
const STARTS = new RegExp(
  [
    "<\\|im_start\\|>\\s*(\\w+)[ \\t]*\\n?",
    "<\\|start_header_id\\|>\\s*(\\w+)\\s*<\\|end_header_id\\|>\\s*",
    "<start_of_turn>\\s*(\\w+)[ \\t]*\\n?",
    "<\\|(system|user|assistant)\\|>\\s*",
    "(\\[/?INST\\])\\s*",
    "<[|｜](User|Assistant)[|｜]>\\s*",
  ].join("|"),
  "g",
);
const ROLES = { "[INST]": "user", "[/INST]": "assistant", "model": "assistant" };
const CONTROLS =
  /<\|[^<>|\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|<(?:bos|eos|pad|end_of_turn)>|<<\/?SYS>>/g;
const ENDS = /^\s*<s>|<\/s>\s*$/g;

/** Return `text` without control tokens, such as `<|im_end|>`, and the white space around it. */
export const withoutControls = (text) => text.replace(CONTROLS, "").replace(ENDS, "").trim();

/**
 * Return the turns of a prompt: [{role, text}]. `role` is "system", "user", "assistant", another
 * name that the template uses, or null for text that is in no turn. Turns without a text are left
 * out.
 */
export function turnsOf(prompt) {
  const turns = [];
  let role = null;
  let position = 0;
  const add = (end) => {
    const text = withoutControls(prompt.slice(position, end));
    if (text) turns.push({ role, text });
  };
  for (const match of prompt.matchAll(STARTS)) {
    add(match.index);
    const name = match.slice(1).find(Boolean);
    role = ROLES[name] ?? name.toLowerCase();
    position = match.index + match[0].length;
  }
  add(prompt.length);
  return turns;
}
