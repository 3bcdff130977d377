// The images of a question in the chat: chosen files, or an image from the clipboard, as data URLs.

import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { icon } from "../lib/ui.js";

// A request to the server has at most 8 MiB. Data URLs take a third more than their files.
const MAX_CHARACTERS = 7 * 2 ** 20;

/**
 * Return a field for images.
 * @param {() => number} sentCharacters length of the images that the chat already has
 */
export function imageField(sentCharacters) {
  let urls = [];
  const list = h("div", { class: "chat-images" });
  const problem = h("p", { class: "bad small", role: "alert", hidden: true });
  const input = h("input", {
    type: "file",
    id: "chat-image",
    class: "sr",
    accept: "image/*",
    multiple: true,
    on: {
      change: async () => {
        await add([...input.files]);
        input.value = "";
      },
    },
  });
  const label = h("label", { class: "button", for: "chat-image" }, icon("plus"), t("chat.image"));

  async function add(files) {
    problem.hidden = true;
    for (const file of files.filter((each) => each.type.startsWith("image/"))) {
      const url = await dataUrl(file);
      const total = urls.reduce((sum, each) => sum + each.length, sentCharacters());
      if (total + url.length > MAX_CHARACTERS) {
        put(problem, t("chat.image.too_large", { name: file.name }));
        problem.hidden = false;
      } else {
        urls.push(url);
      }
    }
    draw();
  }

  function draw() {
    put(
      list,
      urls.map((url, index) =>
        h(
          "button",
          {
            type: "button",
            class: "quiet",
            title: t("chat.image.remove"),
            "aria-label": t("chat.image.remove"),
            on: {
              click: () => {
                urls = urls.filter((_, number) => number !== index);
                draw();
              },
            },
          },
          picture(url),
        ),
      ),
    );
  }

  return {
    button: h("span", {}, input, label),
    list: h("div", {}, list, problem),
    paste: (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length) add(files);
    },
    take() {
      const taken = urls;
      urls = [];
      draw();
      return taken;
    },
  };
}

/** Return an image of the chat. */
export const picture = (url) => h("img", { src: url, alt: t("chat.image.alt") });

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
