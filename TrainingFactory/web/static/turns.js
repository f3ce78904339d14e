// A conversation: prompt, turns of the model, tool calls with their results. All texts are untrusted and only displayed.
import { h, scroller, visible } from "./dom.js";
import { counted, duration, signed } from "./format.js";
import { icon } from "./icons.js";
import { imagesOf, picture, piecesOf, tapped } from "./pictures.js";
import { tokens } from "./tokens.js";

const LONG = 1200; // characters above which a text is folded

/** The messages before the first turn. */
export function messages(list) {
  return list.map((message) => block(message.role, message.name, contentOf(message)));
}

/** The texts and images of a message or result. */
export function contentOf(message) {
  return piecesOf(message).map((piece) => (piece?.src ? picture(piece) : text(piece)));
}

/** All turns of an episode; with credit the model's own tokens are shown, coloured. */
export function conversation(view, credit, way) {
  let screen = view.prompt.flatMap(imagesOf).at(-1); // the image that the model saw last
  return view.turns.map((turn, at) => {
    const drawn = turnOf(turn, at, way === "text" ? null : credit?.turns[at]?.pieces, way, credit, { screen, view });
    screen = turn.replies.flatMap(imagesOf).at(-1) ?? screen;
    return drawn;
  });
}

function turnOf(turn, at, pieces, way, credit, { screen, view }) {
  const {
    message,
    tool_results: results,
    replies,
    step_reward: earned,
    finish,
    policy_version: version,
  } = turn;
  const facts = [
    `turn ${at + 1}`,
    turn.summary && "summary for the next prompt",
    counted(turn.tokens, "token"),
    finish === "stop" ? null : "ended by " + finish,
    version > 0 && `after ${counted(version, "update")}`,
  ]
    .filter(Boolean)
    .join(" · ");
  const gave =
    earned !== null &&
    earned !== undefined &&
    h("span", { class: "tag " + (earned < 0 ? "warn" : "accent") }, "reward " + signed(earned));
  const said = pieces ? tokens(pieces, way, credit) : [reasoning(message), text(message.content)];
  const calls = message.tool_calls ?? [];
  const answered = calls.map((call) =>
    callOf(
      call,
      results.find((result) => result.id === call.id),
      tapped(call, screen, view.thousandths),
    ),
  );
  const others = results
    .filter((result) => !calls.some((call) => call.id === result.id))
    .map((result) => resultOf(result, result.call));
  const rest = replies
    .filter((reply) => reply.role !== "tool")
    .map((reply) => block(reply.role, reply.name, contentOf(reply)));
  return [
    turn.fold && foldOf(turn),
    block("assistant", null, [h("div", { class: "facts" }, facts, gave), said, answered, others]),
    rest,
  ];
}

function foldOf({ fold, prompt_tokens: size, signals }) {
  const lost = signals?.["fold/task_lost"] && h("b", { class: "bad" }, " · the task was removed");
  const told = `folded (${fold}): another row starts with a prompt of ${counted(size, "token")}`;
  return h("div", { class: "facts fold" }, told, lost);
}

export function block(role, name, content) {
  return h(
    "div",
    { class: "message role-" + role },
    h("div", { class: "role" }, role, name && h("small", {}, visible(name))),
    h("div", { class: "said" }, content),
  );
}

export function reasoning({ reasoning_content: thought }) {
  return (
    thought &&
    h(
      "details",
      { class: "reasoning", open: thought.length < LONG },
      h("summary", {}, "Reasoning"),
      text(thought),
    )
  );
}

/** A call with its result; `touched` is the point at which the call taps. */
export function callOf(call, result, touched = null) {
  const { name, arguments: given } = call.function ?? call;
  const shown = call.error ? h("span", { class: "bad" }, visible(call.error)) : argumentsOf(given);
  return h(
    "div",
    { class: "call" },
    h(
      "div",
      { class: "asked" },
      icon("call", 14),
      h("code", {}, h("b", {}, visible(name || "unreadable call")), " ", shown),
    ),
    touched && picture(touched.image, [touched]),
    result && resultOf(result, null),
  );
}

function argumentsOf(given) {
  try {
    const read = typeof given === "string" ? JSON.parse(given) : given;
    const parts = Object.entries(read).map(([key, value]) =>
      h("span", { class: "argument" }, h("i", {}, visible(key)), "=", visible(JSON.stringify(value))),
    );
    return parts.flatMap((part, at) => (at ? [", ", part] : [part]));
  } catch {
    return visible(given);
  }
}

function resultOf(result, name) {
  const told = [
    result.ok ? null : h("b", { class: "bad" }, result.error ?? "failed"),
    result.cached && h("span", { class: "tag accent" }, icon("bolt", 12), "cache"),
    h("span", { class: "num" }, duration(result.seconds)),
    result.attachments > 0 && result.attachments + " attachments",
  ];
  return h(
    "div",
    { class: "result" + (result.ok ? "" : " failed") },
    h("div", { class: "facts" }, name && h("code", {}, visible(name)), told),
    contentOf(result),
  );
}

/** A text verbatim; a long one is folded, with its length. */
export function text(content) {
  if (content === null || content === undefined || content === "") return null;
  const shown = visible(content);
  if (shown.length <= LONG) return scroller(h("pre", {}, shown));
  const rest = scroller(h("pre", {}, shown.slice(0, LONG) + "…"));
  const more = h(
    "button",
    {
      type: "button",
      class: "small",
      onclick: () => {
        rest.textContent = shown;
        more.remove();
      },
    },
    `Show all ${shown.length.toLocaleString("en-US")} characters`,
  );
  return [rest, more];
}
