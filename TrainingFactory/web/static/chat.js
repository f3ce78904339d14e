// The messages of a live conversation: with their tool calls and results, or in an editor.
import { counted, number, signed } from "./format.js";
import { h, visible } from "./dom.js";
import { button } from "./parts.js";
import { imagesOf, piecesOf, tapped } from "./pictures.js";
import { block, callOf, contentOf, reasoning, text } from "./turns.js";

/** The entries of an answer: each message, with the data of its turn. */
export function entryOf({ messages, turns, reward }) {
  const left = [...turns];
  return messages.map((message) =>
    message.role === "assistant"
      ? { message, turn: left.shift(), reward: left.length ? null : reward }
      : { message },
  );
}

const SPENT = ["input_tokens", "output_tokens", "cost"];

/** What the turns of a conversation cost at an endpoint; cost is null where no price is known. */
export function spentOf(entries) {
  const told = entries.map(({ turn }) => turn?.signals ?? {});
  const sum = (name) => told.reduce((so_far, signals) => so_far + (signals["endpoint/" + name] ?? 0), 0);
  const total = Object.fromEntries(SPENT.map((name) => [name, sum(name)]));
  return { ...total, cost: told.some((signals) => "endpoint/cost" in signals) ? total.cost : null };
}

/** 300 tokens in, 30 out, cost 0.0006. */
export function paid({ input_tokens: input, output_tokens: output, cost, estimated }) {
  const price = cost === null ? "" : ", cost " + (cost && cost < 1e-3 ? cost.toFixed(6).replace(/0+$/, "") : number(cost));
  return `${number(input)} tokens in, ${number(output)} out${estimated ? " (estimated)" : ""}${price}`;
}

/** The image that the model saw last in messages. */
export const screenOf = (messages) => messages.flatMap(imagesOf).at(-1);

/** All messages; tool replies are shown with their calls. The last argument: the names of tools whose points are in thousandths, and the
 *  image that the model saw before the messages. */
export function entriesOf(entries, actsOf, { thousandths, screen }) {
  return entries.map(({ message, turn, reward }, at) => {
    if (
      message.role === "tool" &&
      entries.some((each) => each.message.tool_calls?.some((call) => call.id === message.tool_call_id))
    )
      return null;
    const shown =
      message.role === "assistant"
        ? answerOf(message, resultsOf(message, turn, entries.slice(at + 1)), {
            turn,
            reward,
            thousandths,
            screen: screenOf(entries.slice(0, at).map((each) => each.message)) ?? screen,
          })
        : block(message.role, message.name, contentOf(message));
    shown.dataset.at = at;
    const acts = actsOf(at);
    if (acts) shown.append(acts);
    return shown;
  });
}

/** Tool results: from the turn, with times, or from the messages after it. */
function resultsOf(message, turn, after) {
  if (turn?.tool_results.length) return turn.tool_results;
  return after
    .filter((each) => each.message.role === "tool")
    .map(({ message: reply }) => ({
      id: reply.tool_call_id,
      content: reply.content,
      images: reply.images,
      ok: true,
      cached: false,
      seconds: null,
      error: null,
    }));
}

export function answerOf(message, results, { turn = null, reward = null, thousandths, screen }) {
  const calls = (message.tool_calls ?? []).map((call) =>
    callOf(
      call,
      results.find((result) => result.id === call.id),
      tapped(call, screen, thousandths),
    ),
  );
  const facts =
    turn &&
    h(
      "div",
      { class: "facts" },
      "endpoint/output_tokens" in turn.signals ? paid(spentOf([{ turn }])) : counted(turn.tokens, "token"),
      turn.finish === "stop" ? null : h("span", { class: "tag warn" }, "truncated"),
      tagOf("step reward", turn.step_reward),
      tagOf("reward", reward),
    );
  return block("assistant", null, [reasoning(message), text(message.content), calls, facts]);
}

function tagOf(name, reward) {
  if (reward === null || reward === undefined) return null;
  return h("span", { class: "tag " + (reward < 0 ? "warn" : "accent") }, `${name} ${signed(reward)}`);
}

/** The edited text of a message, after its images. */
function withImages(message, words) {
  if (!Array.isArray(message.content) || !imagesOf(message).length) return words;
  return [...message.content.filter((part) => part.image_url), { type: "text", text: words }];
}

/** An editor of a message; `done(message, go)` gets the edited message, or null if cancelled. */
export function editorOf(message, done) {
  const before = piecesOf(message)
    .filter((piece) => !piece?.src)
    .join("");
  const words = h("textarea", {
    rows: Math.min(12, 2 + before.split("\n").length),
    "aria-label": "Text",
    class: "edit-text",
  });
  words.value = before;
  const calls = (message.tool_calls ?? []).map((call) => {
    const input = h("textarea", {
      rows: 2,
      spellcheck: "false",
      "aria-label": "Arguments of " + call.function.name,
    });
    input.value = call.function.arguments;
    return { call, input };
  });
  const wrong = h("p", { class: "wrong", role: "alert" });
  const changed = () => {
    const made = { ...message, content: withImages(message, words.value) };
    delete made.reasoning_content; // thoughts belong to the text that was written
    if (before === words.value && message.reasoning_content)
      made.reasoning_content = message.reasoning_content;
    if (calls.length)
      made.tool_calls = calls.map(({ call, input }) => ({
        ...call,
        function: { ...call.function, arguments: input.value },
      }));
    return made;
  };
  const end = (go) => {
    for (const { input } of calls) {
      try {
        JSON.parse(input.value);
      } catch (error) {
        wrong.textContent = "The arguments are not valid JSON: " + error.message;
        return input.focus();
      }
    }
    return done(changed(), go);
  };
  const runs = message.role !== "assistant" || calls.length > 0;
  const foot = h(
    "div",
    { class: "buttons" },
    runs &&
      button(calls.length ? "Run the calls and continue" : "Answer from here", () => end(true), {
        class: "small main edit-go",
      }),
    button("Save without answering", () => end(false), { class: "small edit-only" }),
    button("Cancel", () => done(null, false), { class: "small" }),
  );
  const editor = h(
    "div",
    { class: "editor", onkeydown: (event) => event.key === "Escape" && done(null, false) },
    words,
    calls.map(({ call, input }) => [h("code", {}, visible(call.function.name)), input]),
    wrong,
    h("p", { class: "soft" }, "All messages after this one will be deleted."),
    foot,
  );
  requestAnimationFrame(() => words.focus());
  return block(message.role, message.name, editor);
}
