// Requests to the server, event streams, and the connection state.

const TOKEN = "paceline-token";

/** An error response: `what` is wrong, what is `allowed`, how to `fix` it. `status` 0: no response. */
export class ApiError extends Error {
  constructor(status, { what, allowed = null, fix = null, ...more }) {
    super(what);
    Object.assign(this, { name: "ApiError", status, what, allowed, fix }, more);
  }
}

/** Remove the token from the address, so that it is not in a link that a user copies. */
export function takeToken() {
  const query = new URLSearchParams(location.search);
  if (!query.has("token")) return;
  sessionStorage.setItem(TOKEN, query.get("token"));
  query.delete("token");
  const rest = query.toString();
  history.replaceState(null, "", location.pathname + (rest ? `?${rest}` : "") + location.hash);
}

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

export const get = (path, options) => request("GET", path, undefined, options);
export const post = (path, body, options) => request("POST", path, body, options);
export const put = (path, body, options) => request("PUT", path, body, options);
export const del = (path, options) => request("DELETE", path, undefined, options);

/** Return the text of a file of the server, such as a config. */
export async function getText(path, options = {}) {
  return (await answer("GET", path, undefined, options)).text();
}

async function request(method, path, body, options = {}) {
  const response = await answer(method, path, body, options);
  return response.status === 204 ? null : response.json();
}

/** `body`: an object (sent as JSON) or FormData. `options`: `{signal}`. */
async function answer(method, path, body, { signal, accept = "application/json" } = {}) {
  const headers = { Accept: accept };
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers["X-Paceline-Token"] = token;
  if (body !== undefined && !(body instanceof FormData)) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, { method, headers, body, signal, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    setConnection("lost");
    throw new ApiError(0, { what: "no-answer" });
  }
  setConnection("there");
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not a response of this server (of a proxy, for example): only the status is known.
  }
  return new ApiError(response.status, error?.what ? error : { what: `${response.status} ${response.statusText}` });
}

// --- Connection state --------------------------------------------------------------------------------------------------------

const watchers = new Set();
let connection = { state: "there", retryAt: 0 };
let wake = new Set();

/** Call `watcher({state: "there" | "lost", retryAt})` now and at each change. Return a function that ends it. */
export function onConnection(watcher) {
  watchers.add(watcher);
  watcher(connection);
  return () => watchers.delete(watcher);
}

/** Reconnect all waiting streams now. */
export function tryNow() {
  for (const one of [...wake]) one();
}

function setConnection(state, retryAt = 0) {
  if (state === connection.state && retryAt === connection.retryAt) return;
  connection = { state, retryAt };
  for (const watcher of watchers) watcher(connection);
}

// --- Streams ----------------------------------------------------------------------------------------------------------------

/**
 * Server-sent events. `path`: a text, or a function that is called at each connection. `handlers`: one for the name of each
 * event, called with its data; `open()` at each connection; `problem(ApiError)` if the server refuses (it is not retried).
 * A GET reconnects automatically and pauses while the page is hidden. With `body` it is a single POST, which ends with the
 * response: then `closed()` is called, or `problem` if it was interrupted. Return a function that ends it.
 */
export function stream(path, handlers, { body } = {}) {
  let ended = false;
  let control = null;
  const once = body !== undefined;

  async function read() {
    control = new AbortController();
    const where = typeof path === "function" ? path() : path;
    const response = await answer(once ? "POST" : "GET", where, body, { signal: control.signal, accept: "text/event-stream" });
    handlers.open?.();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done || ended) return;
      const blocks = (text + value).split(/\r?\n\r?\n/);
      text = blocks.pop();
      for (const block of blocks) hand(block, handlers);
    }
  }

  async function run() {
    let wait_s = 0.5;
    while (!ended) {
      const began = Date.now();
      try {
        await read();
        if (once) return handlers.closed?.();
      } catch (error) {
        if (ended) return undefined;
        const refused = error instanceof ApiError && error.status >= 400 && error.status < 500;
        if (refused || once)
          return handlers.problem?.(error instanceof ApiError ? error : new ApiError(0, { what: "no-answer" }));
        if (!document.hidden) setConnection("lost");
      }
      if (ended) return undefined;
      if (document.hidden) await shown();
      else {
        wait_s = Date.now() - began > 5000 ? 0.5 : Math.min(10, wait_s * 2);
        if (connection.state === "lost") setConnection("lost", Date.now() + wait_s * 1000);
        await pause(wait_s * 1000);
      }
    }
    return undefined;
  }

  // A browser keeps six connections to a server; hidden pages must not use all of them.
  const hide = () => document.hidden && control?.abort();
  if (!once) document.addEventListener("visibilitychange", hide);
  run();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", hide);
    control?.abort();
  };
}

function hand(block, handlers) {
  let name = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (data.length) handlers[name]?.(JSON.parse(data.join("\n")));
}

function pause(wait_ms) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      wake.delete(done);
      resolve();
    };
    const timer = setTimeout(done, wait_ms);
    wake.add(done);
  });
}

function shown() {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}
