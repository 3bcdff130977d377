// What was typed into the form of a new run, until that run has started.

const KEY = "paceline-draft";

/** Return `{yaml, name}`, or null. */
export function readDraft() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY));
  } catch {
    return null;
  }
}

export const writeDraft = (draft) => sessionStorage.setItem(KEY, JSON.stringify(draft));
export const removeDraft = () => sessionStorage.removeItem(KEY);
