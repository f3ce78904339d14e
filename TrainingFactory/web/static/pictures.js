// Images in messages: thumbnails between the texts, enlarged by a click, with the points at which a model tapped.
import { h } from "./dom.js";
import { dialog } from "./parts.js";

/** The texts and images of a message in order; images are {src, width, height}. */
export function piecesOf({ content, images }) {
  if (Array.isArray(content))
    return content.map((part) => (part.image_url ? { src: part.image_url.url, ...sizeOf(part.image_url.url) } : part.text));
  if (!images?.length) return [content];
  const letters = Array.from(content ?? ""); // places count characters, not UTF-16 units
  const pieces = [];
  let start = 0;
  for (const image of images) {
    pieces.push(letters.slice(start, image.place).join(""), image);
    start = image.place;
  }
  return [...pieces, letters.slice(start).join("")].filter((piece) => piece !== "");
}

/** The size in the header of a PNG file in a data: URL. */
function sizeOf(url) {
  const start = "data:image/png;base64,";
  if (!url.startsWith(start)) return {};
  const header = new DataView(Uint8Array.from(atob(url.slice(start.length, start.length + 32)), (c) => c.charCodeAt(0)).buffer);
  return { width: header.getUint32(16), height: header.getUint32(20) };
}

export const imagesOf = (message) => piecesOf(message).filter((piece) => piece?.src);

/** A thumbnail; `taps` are points {x, y} in pixels of the image. */
export function picture(image, taps = []) {
  const name = image.width ? `image ${image.width}×${image.height}` : "image";
  const large = () => dialog(name, h("div", { class: "picture large" }, shown(image, name, taps)));
  return h("button", { type: "button", class: "picture", title: "Enlarge", onclick: large }, shown(image, name, taps));
}

function shown(image, name, taps) {
  const percent = (value, size) => (100 * value) / size + "%";
  return [
    h("img", { src: image.src, alt: name, loading: "lazy", width: image.width, height: image.height }),
    taps.map(({ x, y }) =>
      h("span", { class: "tap", style: { left: percent(x, image.width), top: percent(y, image.height) } }),
    ),
  ];
}

/** The names of tools whose points x, y are in thousandths of an image. */
export const inThousandths = (tools) =>
  tools
    .map((tool) => tool.function)
    .filter(({ parameters }) =>
      ["x", "y"].every((name) => {
        const { maximum, exclusiveMaximum } = parameters?.properties?.[name] ?? {};
        return (maximum ?? exclusiveMaximum) === 1000;
      }),
    )
    .map(({ name }) => name);

/** The point {x, y, image} at which a call taps, if its arguments are within the image; else null. `thousandths`: the names of
 *  tools whose points are in thousandths of the image; those of others are in pixels. */
export function tapped(call, image, thousandths = []) {
  try {
    const { name, arguments: given } = call.function ?? call;
    let { x, y } = typeof given === "string" ? JSON.parse(given) : given;
    if (thousandths.includes(name)) [x, y] = [(x * image.width) / 1000, (y * image.height) / 1000];
    const inside = [x, y].every(Number.isFinite) && x >= 0 && y >= 0 && x <= image?.width && y <= image?.height;
    return inside ? { x, y, image } : null;
  } catch {
    return null;
  }
}
