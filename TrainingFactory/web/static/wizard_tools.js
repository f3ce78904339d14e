// The wizard's tools: pasted servers are shown as commands, started when they were confirmed, and their tools picked.
import { post, url } from "./api.js";
import { h, put, visible } from "./dom.js";
import { counted } from "./format.js";
import { icon } from "./icons.js";
import { act, button, empty } from "./parts.js";

const EXAMPLE =
  '{\n  "mcpServers": {\n    "files": {\n      "command": "npx",\n      "args": ["-y", "@modelcontextprotocol/server-filesystem", "."]\n    }\n  }\n}';

/** `mark(text, done)` shows the result in the step's header; `tools` are the entries of the config. */
export class ToolsStep {
  constructor({ signal, mark, changed }) {
    Object.assign(this, { signal, mark, changed, tools: [] });
    this.servers = h("textarea", {
      rows: 9,
      spellcheck: "false",
      id: "servers",
      "aria-label": "mcpServers as JSON",
      placeholder: EXAMPLE,
      oninput: () => this.forget(),
    });
    this.shown = h("div", { class: "shown" });
    this.read = button("Show the servers", () => this.readServers(), { id: "read-servers" });
    this.element = [
      h(
        "p",
        { class: "soft" },
        "Paste the ",
        h("code", {}, "mcpServers"),
        " of another program. Nothing is started yet. Skip this step to train without tools.",
      ),
      this.servers,
      h("div", { class: "buttons" }, this.read),
      this.shown,
    ];
  }

  forget() {
    put(this.shown);
    this.tools = [];
    this.mark("none: the model answers without tools");
    this.changed();
  }

  async readServers() {
    const text = this.servers.value;
    if (!text.trim())
      return void put(this.shown, h("p", { class: "wrong", role: "alert" }, "Paste the servers first."));
    await act(this.read, async () => {
      const told = await post(url(["tools", "read"]), { text }, this.signal);
      if (this.servers.value !== text) return;
      const wrong = told.problems.map((each) => h("p", { class: "wrong", role: "alert" }, visible(each)));
      const go =
        told.problems.length === 0 &&
        button("Start the servers and list their tools", () => this.openServers(go, text, told.servers), {
          class: "main",
          id: "confirm-servers",
        });
      put(
        this.shown,
        told.servers.length > 0 &&
          h(
            "div",
            { class: "confirm", role: "region", "aria-label": "Servers to start" },
            h(
              "p",
              { class: "warn-line" },
              icon("warning"),
              h(
                "span",
                {},
                "These commands run on this machine with your permissions, now and in every run that uses them. Start only servers that you trust.",
              ),
            ),
            told.servers.map(serverOf),
            h("div", { class: "buttons" }, go),
          ),
        wrong,
      );
    });
    return undefined;
  }

  async openServers(pressed, text, servers) {
    const heard = h("p", { class: "soft", role: "status" }, "Starting the servers…");
    this.shown.append(heard);
    await act(pressed, async () => {
      try {
        const told = await post(
          url(["tools", "open"]),
          { text, confirmed: servers.map(({ digest }) => digest) },
          this.signal,
        );
        if (this.servers.value !== text) return;
        this.offered = told;
        this.drawTools(told);
      } catch (error) {
        if (error.name !== "AbortError") put(heard, h("span", { class: "wrong" }, error.message));
      }
    });
  }

  drawTools({ config, tools }) {
    const boxes = tools.map((tool) =>
      h("input", { type: "checkbox", checked: true, value: tool.name, onchange: () => take() }),
    );
    const take = () => {
      const chosen = tools.filter((_, at) => boxes[at].checked);
      const whole = [...new Set(tools.map(({ server }) => server))].filter((server) =>
        tools.every((tool) => tool.name !== server && (tool.server !== server || chosen.includes(tool))),
      );
      const single = chosen.filter(({ server }) => !whole.includes(server)).map(({ name }) => name);
      this.tools = [...whole, ...single].map((name) => ({ name, config }));
      this.mark(
        chosen.length ? `${chosen.length} of ${counted(tools.length, "tool")}` : "none selected",
        chosen.length > 0,
      );
      this.changed();
    };
    const all = (on) => {
      for (const box of boxes) box.checked = on;
      take();
    };
    const rows = tools.map((tool, at) =>
      h(
        "label",
        { class: "tool" },
        boxes[at],
        h(
          "span",
          {},
          h("b", {}, visible(tool.name)),
          h(
            "code",
            { class: "soft" },
            " " +
              Object.keys(tool.parameters?.properties ?? {})
                .map(visible)
                .join(", "),
          ),
          h("small", {}, visible(tool.description)),
        ),
        h("span", { class: "tag" }, visible(tool.server)),
      ),
    );
    put(
      this.shown,
      h(
        "div",
        { class: "buttons" },
        h("b", {}, "Tools that the model may call"),
        button("All", () => all(true), { class: "small" }),
        button("None", () => all(false), { class: "small" }),
      ),
      h("div", { class: "offered" }, rows.length ? rows : empty("The servers have no tools", "")),
    );
    take();
  }
}

/** One server with its full command or address. */
function serverOf({ name, command: parts, url: address, cwd, variables: names }) {
  const line = parts.map((part) => h("span", { class: "word" }, visible(part)));
  const more = [
    cwd && "in " + cwd,
    names.length > 0 && (parts.length ? "with the variables " : "with the headers ") + names.join(", "),
  ].filter(Boolean);
  return h(
    "div",
    { class: "server" },
    h("b", {}, visible(name)),
    h("code", { class: "line" }, parts.length ? line : visible(address)),
    more.length > 0 && h("small", {}, visible(more.join("; "))),
  );
}
