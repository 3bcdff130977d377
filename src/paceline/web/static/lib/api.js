// Requests to the server, event streams, and the connection state.

import { reviveTexts } from "./messages.js";

const TOKEN = "paceline-token";
/** Identifies this page to the server: a newer plan ends an older one of the same page only. */
export const pageId = Math.random().toString(36).slice(2);
const parse = (text) => JSON.parse(text, reviveTexts);

/**
 * An error response: `what` is wrong, which values are `allowed`, and how to `fix` it. `status` 0
 * means no response.
 */
export class ApiError extends Error {
  constructor(status, record) {
    super(record.what);
    Object.assign(this, { name: "ApiError", status, allowed: null, fix: null });
    // The texts of a record follow the language of the panel: see `reviveTexts`.
    Object.defineProperties(this, Object.getOwnPropertyDescriptors(record));
  }
}

/**
 * Move the token from the address to the session storage, so that a link that a user copies does
 * not contain it.
 */
export function storeToken() {
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

/** Return the text of a file on the server, such as a config. */
export async function getText(path, options = {}) {
  return (await send("GET", path, undefined, options)).text();
}

async function request(method, path, body, options = {}) {
  const response = await send(method, path, body, options);
  return response.status === 204 ? null : parse(await response.text());
}

/** Send a request. `body`: an object, which is sent as JSON, or FormData. */
async function send(method, path, body, { signal, accept = "application/json" } = {}) {
  const headers = { Accept: accept };
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers["X-Paceline-Token"] = token;
  if (body !== undefined && !(body instanceof FormData)) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body,
      signal,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    setConnection("lost");
    throw new ApiError(0, { what: "no-answer" });
  }
  setConnection("connected");
  if (!response.ok) throw await readError(response);
  return response;
}

async function readError(response) {
  let error = null;
  try {
    error = parse(await response.text()).error;
  } catch {
    // The response is not from this server but, for example, from a proxy: only its status is
    // known.
  }
  return new ApiError(
    response.status,
    error?.what ? error : { what: `${response.status} ${response.statusText}` },
  );
}

// --- Connection state ----------------------------------------------------------------------------

const watchers = new Set();
let connection = { state: "connected", retryAt: 0 };
let pendingRetries = new Set();

/**
 * Call `watcher({state: "connected" | "lost", retryAt})` now and at each change. Return a function
 * that unsubscribes.
 */
export function onConnection(watcher) {
  watchers.add(watcher);
  watcher(connection);
  return () => watchers.delete(watcher);
}

/** Reconnect all waiting streams now. */
export function retryNow() {
  for (const retry of [...pendingRetries]) retry();
}

function setConnection(state, retryAt = 0) {
  if (state === connection.state && retryAt === connection.retryAt) return;
  connection = { state, retryAt };
  for (const watcher of watchers) watcher(connection);
}

// --- Streams -------------------------------------------------------------------------------------

/**
 * Receive server-sent events, and return a function that closes the stream.
 *
 * `path`: a string, or a function that is called at each connection. `handlers`: a function for
 * each event name, which gets the data of the event; `open()`, called at each connection;
 * `problem(ApiError)`, called if the server rejects the request, which is then not retried. A GET
 * request reconnects automatically and pauses while the page is hidden. With `body`, a single POST
 * request is sent; at its end `closed()` is called, or `problem` if it was interrupted.
 */
export function stream(path, handlers, { body } = {}) {
  let ended = false;
  let controller = null;
  const isSingleRequest = body !== undefined;

  async function read() {
    controller = new AbortController();
    const url = typeof path === "function" ? path() : path;
    const response = await send(isSingleRequest ? "POST" : "GET", url, body, {
      signal: controller.signal,
      accept: "text/event-stream",
    });
    handlers.open?.();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done || ended) return;
      const blocks = (text + value).split(/\r?\n\r?\n/);
      text = blocks.pop();
      for (const block of blocks) dispatch(block, handlers);
    }
  }

  async function run() {
    let wait_s = 0.5;
    while (!ended) {
      const startedAt = Date.now();
      try {
        await read();
        if (isSingleRequest) return handlers.closed?.();
      } catch (error) {
        if (ended) return undefined;
        const isRefused = error instanceof ApiError && error.status >= 400 && error.status < 500;
        if (isRefused || isSingleRequest)
          return handlers.problem?.(
            error instanceof ApiError ? error : new ApiError(0, { what: "no-answer" }),
          );
        if (!document.hidden) setConnection("lost");
      }
      if (ended) return undefined;
      if (document.hidden) await waitUntilVisible();
      else {
        wait_s = Date.now() - startedAt > 5000 ? 0.5 : Math.min(10, wait_s * 2);
        if (connection.state === "lost") setConnection("lost", Date.now() + wait_s * 1000);
        await waitForRetry(wait_s * 1000);
      }
    }
    return undefined;
  }

  // A browser keeps six connections to a server; hidden pages must not use all of them.
  const abortIfHidden = () => document.hidden && controller?.abort();
  if (!isSingleRequest) document.addEventListener("visibilitychange", abortIfHidden);
  run();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", abortIfHidden);
    controller?.abort();
  };
}

function dispatch(block, handlers) {
  let name = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (data.length) handlers[name]?.(parse(data.join("\n")));
}

function waitForRetry(wait_ms) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      pendingRetries.delete(done);
      resolve();
    };
    const timer = setTimeout(done, wait_ms);
    pendingRetries.add(done);
  });
}

function waitUntilVisible() {
  return new Promise((resolve) => {
    const check = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", check);
      resolve();
    };
    document.addEventListener("visibilitychange", check);
    check();
  });
}
