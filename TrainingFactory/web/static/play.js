// Play: chat with a model and an environment's tools; edit turns; compare two answers; save training rows.
import { get, job, post, url } from "./api.js";
import { answerOf, editorOf, entriesOf, entryOf, paid, screenOf, spentOf } from "./chat.js";
import { h, put, visible } from "./dom.js";
import { counted, number } from "./format.js";
import { act, button, command, empty, iconButton, pairs, toast, waiting } from "./parts.js";
import { inThousandths } from "./pictures.js";
import { PlayFrame } from "./play_frame.js";

const WRITTEN = {
  rewritten: "A turn was edited, so the whole conversation was tokenized again.",
  cut: "An answer was truncated, so the whole conversation was tokenized again.",
  template: "The chat template cannot append this to an answer, so the whole conversation was tokenized again.",
};
const ANEW = "The environment was restarted; earlier tool calls were not repeated.";
const unfolded = (limit) =>
  `The conversation is longer than ${number(limit)} tokens, at which the model's run and tfactory serve fold it. This page does not fold.`;
const ENDS = {
  truncated: "Truncated: the turn reached Max tokens, or the conversation the model's context length.",
  max_turns: "Ended: the maximum number of turns is reached.",
  stopped: "Stopped.",
  error: "Failed.",
  tool_failure: "A tool became unavailable.",
};

export async function show(place) {
  put(place.main, waiting());
  const choices = await get(url(["play"]), place.signal);
  const page = new PlayPage(place, choices);
  page.build();
  if (place.query.get("model") && page.model.value === place.query.get("model")) await page.begin();
}

class PlayPage extends PlayFrame {
  async begin(task) {
    const chosen = { model: this.model.value, environment: this.environment.value || null };
    const fresh = task === undefined;
    this.setQuery({ model: chosen.model, environment: chosen.environment });
    this.wait("Loading the model; the first time takes longer…");
    await act(this.start, async () => {
      try {
        let opened = await post(url(["play"]), { ...chosen, task: fresh ? null : task }, this.signal);
        if (fresh && opened.tasks.length) {
          opened = await post(url(["play"]), { ...chosen, task: opened.tasks[0].id }, this.signal);
          task = opened.tasks[0].id;
        }
        this.take(opened, task ?? "");
      } catch (error) {
        if (error.name === "AbortError") return;
        this.wait("");
        if (this.opened) {
          this.notes = ["Cannot start the conversation, so the earlier one stays: " + error.message];
          return void this.draw();
        }
        put(this.talk, empty("Cannot start the conversation", visible(error.message)));
      }
    });
  }

  take(opened, task) {
    this.opened = opened;
    this.entries = opened.messages.map((message) => ({ message }));
    this.notes = [];
    this.other = null;
    put(
      this.task,
      h("option", { value: "" }, "my own message"),
      opened.tasks.map(({ id, prompt }) => h("option", { value: id }, visible(prompt.slice(0, 100)))),
    );
    this.task.value = task;
    this.task.disabled = !opened.tasks.length;
    if (this.begunModel !== this.model.value) {
      this.maxTokens.value = opened.max_tokens;
      this.temperature.value = opened.temperature;
    }
    this.begunModel = this.model.value;
    this.used = "";
    this.spent = opened.endpoint?.spent;
    for (const [name, row] of Object.entries(this.settings))
      for (const part of row) part.hidden = Boolean(opened.endpoint?.ignored.includes(name));
    put(
      this.toolList,
      opened.tools.length
        ? h(
            "ul",
            { class: "tool-list" },
            opened.tools.map(({ function: { name, description, parameters } }) =>
              h(
                "li",
                {},
                h(
                  "code",
                  {},
                  h("b", {}, visible(name)),
                  " ",
                  Object.keys(parameters?.properties ?? {})
                    .map(visible)
                    .join(", "),
                ),
                h("small", {}, visible(description)),
              ),
            ),
          )
        : h("p", { class: "soft" }, "None."),
    );
    this.wait("");
    this.draw();
    this.input.focus();
  }

  wait(words) {
    put(this.state, words);
    this.busy = Boolean(words);
    for (const each of [this.sendButton, this.start, ...this.keepButtons])
      each.disabled = this.busy || (each !== this.start && !this.opened);
    this.allowWriting();
  }

  /** Enables the message field once a conversation has begun. */
  allowWriting() {
    this.input.disabled = !this.opened;
    this.input.placeholder = this.opened ? "Write to the model" : "Choose a model and press Begin first";
  }

  // the conversation

  draw() {
    const { entries, opened } = this;
    this.allowWriting();
    put(
      this.talk,
      !opened &&
        empty(
          "Choose a model and press Begin",
          "Choosing a run's checkpoint also selects the environment that it was trained in.",
        ),
      entriesOf(entries, (at) => this.actsOf(at), this.taps([])),
    );
    put(
      this.told,
      this.notes.map((note) => h("p", {}, visible(note))),
    );
    const last = entries.at(-1)?.message;
    this.sendButton.querySelector("span").textContent =
      last && last.role !== "assistant" && !this.input.value ? "Answer" : "Send";
    const ended = opened && !this.busy && last?.role === "assistant";
    for (const each of this.keepButtons) each.disabled = !ended;
    this.sendButton.disabled = !opened || this.busy || Boolean(this.other);
    this.drawEndpoint();
    this.drawPair();
  }

  /** Shows where the model is, what was paid, and what it cannot do. */
  drawEndpoint() {
    const about = this.opened?.endpoint;
    this.aboutPanel.hidden = !about;
    if (!about) return;
    const facts = [
      ["Model", `${about.model} at ${about.host}`],
      ["Key", about.key ?? "none"],
      ["Episode", paid(spentOf(this.entries))],
      ["Since start", `${counted(this.spent.requests, "request")}, ${paid(this.spent)}`],
      ...Object.entries(this.spent.limits).map(([name, value]) => [name, number(value)]),
    ];
    put(
      this.about,
      pairs(facts.map(([name, value]) => [name, visible(value)])),
      about.notes.map((note) => h("p", { class: "soft" }, visible(note))),
    );
  }

  /** What shows where calls tap, after these messages. */
  taps(messages) {
    return { thousandths: inThousandths(this.opened?.tools ?? []), screen: screenOf(messages) };
  }

  actsOf(at) {
    if (this.busy || this.other) return null;
    const { message } = this.entries[at];
    const last = message.role === "assistant" && at === this.entries.length - 1;
    return h(
      "div",
      { class: "acts" },
      message.role !== "tool" &&
        iconButton("edit", `Edit this ${message.role} message and continue from there`, () =>
          this.edit(at),
        ),
      last && iconButton("again", "Another answer, side by side (a)", () => this.another()),
    );
  }

  edit(at) {
    const place = this.talk.querySelector(`[data-at="${at}"]`);
    const { message } = this.entries[at];
    const done = (changed, go) => {
      if (changed === null) return this.draw();
      const rest = this.entries.slice(0, at);
      this.entries = [...rest, { message: changed }];
      this.notes = [];
      this.draw();
      return go ? this.answer() : undefined;
    };
    place.replaceWith(editorOf(message, done));
    return undefined;
  }

  send() {
    if (!this.opened || this.busy) return;
    const words = this.input.value.trim();
    const last = this.entries.at(-1)?.message;
    if (this.other) return void toast("Pick one of the two answers first.");
    if (!words && (!last || last.role === "assistant")) return void this.input.focus();
    if (words) this.entries.push({ message: { role: "user", content: words } });
    this.input.value = "";
    this.answer();
  }

  /** Requests an answer and appends it to the conversation. */
  async answer() {
    const found = await this.ask(
      this.entries.map(({ message }) => message),
      Number(this.seed.value) || 0,
      this.talk,
    );
    if (!found) return void this.draw();
    this.entries.push(...found.entries);
    this.notes = found.notes;
    this.draw();
  }

  /** Requests an answer and shows it in `place` while it is sampled; returns null on failure. */
  async ask(messages, seed, place) {
    const live = h("div", { class: "message live role-assistant" });
    const said = h("pre", {});
    let asked = null; // the turn whose tool calls are running
    let taps = this.taps(messages);
    put(live, h("div", { class: "role" }, "assistant"), h("div", { class: "said" }, said));
    const heard = ({ text: words, message, results }) => {
      if (words !== undefined) said.textContent = visible(words);
      if (message) {
        asked = message;
        live.before(answerOf(message, [], taps));
        said.textContent = "";
      }
      if (results?.length) {
        live.previousElementSibling?.replaceWith(answerOf(asked, results, taps));
        taps = { ...taps, screen: screenOf(results) ?? taps.screen };
      }
      live.scrollIntoView({ block: "nearest" });
    };
    put(this.told);
    this.wait(this.opened.endpoint ? "Waiting for the endpoint…" : "Sampling…");
    this.writing = true;
    this.stopButton.hidden = false;
    place.append(live);
    const body = {
      messages,
      seed,
      temperature: Number(this.temperature.value),
      max_tokens: Number(this.maxTokens.value),
    };
    try {
      const told = await job(url(["play", this.opened.id, "say"]), body, heard);
      const end =
        told.status === "done"
          ? null
          : (ENDS[told.status] ?? told.status) + (told.error ? " " + told.error : "");
      if (told.spent) this.spent = told.spent;
      else this.used = `${number(told.tokens)} of ${number(this.opened.max_length)} tokens`;
      const unscored = told.unscored && "No reward: " + told.unscored;
      return {
        entries: entryOf(told),
        notes: [WRITTEN[told.written], told.anew && ANEW, told.unfolded && unfolded(told.unfolded), unscored, end].filter(Boolean),
      };
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message, "error");
      return null;
    } finally {
      this.writing = false;
      this.stopButton.hidden = true;
      this.wait("");
      put(this.state, this.used ?? "");
    }
  }

  async stop() {
    if (this.writing) await act(this.stopButton, () => post(url(["play", this.opened.id, "stop"])));
  }

  // another answer

  /** Returns the index at which the last answer starts: after the last user or system message. */
  answerStart() {
    return (
      this.entries.findLastIndex(({ message }) => message.role === "user" || message.role === "system") + 1
    );
  }

  async another() {
    const start = this.answerStart();
    if (this.busy || !this.opened || this.other || start >= this.entries.length) return;
    const before = this.entries.slice(0, start);
    const columns = [this.entries.slice(start), []];
    this.entries = before;
    this.other = { columns, before };
    const place = h("div", { class: "talk-of" });
    this.draw();
    this.pair.querySelector(".two > section:last-child").append(place);
    this.seed.value = String((Number(this.seed.value) || 0) + 1);
    const found = await this.ask(
      before.map(({ message }) => message),
      Number(this.seed.value),
      place,
    );
    if (!found) return void this.choose(0, false);
    columns[1] = found.entries;
    this.notes = found.notes;
    this.draw();
  }

  drawPair() {
    if (!this.other) return void put(this.pair);
    const { columns } = this.other;
    const names = ["First answer", "Other answer"];
    const whole = columns.every((each) => each.length);
    put(
      this.pair,
      h(
        "div",
        { class: "two" },
        columns.map((column, at) =>
          h(
            "section",
            { "aria-label": names[at] },
            h(
              "header",
              {},
              h("b", {}, names[at]),
              whole &&
                !this.busy &&
                button("Better", () => this.choose(at, true), { class: "small main", id: "better-" + at }),
              whole &&
                !this.busy &&
                button("Continue with it", () => this.choose(at, false), { class: "small" }),
            ),
            entriesOf(column, () => null, this.taps(this.other.before.map(({ message }) => message))),
          ),
        ),
      ),
    );
  }

  /** Continues with one of the two answers; `keep`: save it as a preference over the other one. */
  async choose(at, keep) {
    const { columns, before } = this.other;
    const whole = (column) => [...before, ...column].map(({ message }) => message);
    this.other = null;
    this.entries = [...before, ...columns[at]];
    this.notes = [];
    this.draw();
    if (keep)
      await this.keep(this.keepButtons[0], {
        kind: "preference",
        messages: whole(columns[at]),
        other: whole(columns[1 - at]),
      });
  }

  // rows for training

  async keep(pressed, row) {
    const body = {
      messages: this.entries.map(({ message }) => message),
      dataset: this.dataset.value.trim(),
      ...row,
    };
    await act(pressed, async () => {
      const told = await post(url(["play", this.opened.id, "keep"]), body);
      toast(`Saved: ${counted(told.rows, "row")} in ${told.path.split("/").at(-1)}.`, "good");
      put(
        this.kept,
        h("p", { class: "soft" }, h("b", {}, counted(told.rows, "row")), " in ", h("code", {}, told.path)),
        command(told.command),
      );
    });
  }
}
