// The trees of a group whose episodes fork: one line per leaf, turns from left to right, values at the forks.
import { h, svg } from "./dom.js";
import { counted, number, signed } from "./format.js";

const TURN = 64;
const ROW = 24;
const TOP = 34;
const LEFT = 14;
const RIGHT = 96;

const mean = (values) => {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

/** Returns the trees of the group. A segment is {row, from, to, value, advantage, parts}: the turns between two forks, or
 * from the last fork to the leaf. Its value is the leaf's reward, or the mean of the segments that continue it; its
 * advantage is the distance from the mean of the segments that begin where it begins. */
export function segments(rows) {
  const forks = new Map();
  for (const row of rows.filter(({ parent }) => parent !== null)) {
    if (!forks.has(row.parent)) forks.set(row.parent, []);
    forks.get(row.parent).push(row);
  }
  const segment = (row, from) => {
    const later = (forks.get(row.member) ?? []).filter(({ fork_turn }) => fork_turn > from);
    if (!later.length) return { row, from, to: row.turns, value: row.reward, parts: [] };
    const to = Math.min(...later.map(({ fork_turn }) => fork_turn));
    const others = later.filter(({ fork_turn }) => fork_turn === to);
    const parts = compared([row, ...others].map((each) => segment(each, to)));
    return { row, from, to, value: mean(parts.map(({ value }) => value)), parts };
  };
  return compared(rows.filter(({ parent }) => parent === null).map((row) => segment(row, 0)));
}

function compared(parts) {
  for (const part of parts) {
    const others = mean(parts.filter((each) => each !== part).map(({ value }) => value));
    part.advantage = part.value === null || others === null ? null : part.value - others;
  }
  return parts;
}

/** Returns the members on the path to an episode, with the turn at which the path leaves each of them. */
function pathTo(rows, member) {
  const path = new Map();
  for (let row = rows.find((each) => each.member === member), end = Infinity; row; ) {
    path.set(row.member, end);
    end = row.fork_turn;
    row = rows.find((each) => each.member === row.parent);
  }
  return path;
}

/** Draws the trees; `open(number)` opens an episode. */
export function forkTree(rows, member, open) {
  const trees = segments(rows);
  const path = pathTo(rows, member);
  const turns = Math.max(...rows.map((row) => row.turns));
  const drawing = svg("svg", {
    class: "forks",
    width: LEFT + turns * TURN + RIGHT,
    height: TOP + rows.length * ROW,
    role: "group",
    "aria-label": counted(rows.length, "episode") + " in " + counted(trees.length, "tree"),
  });
  for (let turn = 1; turn <= turns; turn++)
    drawing.append(svg("text", { class: "turn", x: LEFT + (turn - 0.5) * TURN, y: 12 }, "turn " + turn));
  let leaves = 0;
  const strongest = Math.max(1e-9, ...trees.flatMap(flat).map(({ advantage }) => Math.abs(advantage ?? 0)));
  const x = (turn) => LEFT + turn * TURN;
  const draw = (part, above) => {
    const y = above?.row === part.row ? above.y : TOP + leaves++ * ROW;
    part.y = y;
    const sign = part.advantage ? (part.advantage < 0 ? " minus" : " plus") : "";
    const here = path.has(part.row.member) && part.to <= path.get(part.row.member) ? " here" : "";
    const line = svg("path", {
      class: "path" + sign + here,
      style: { "--a": 0.25 + (0.75 * Math.abs(part.advantage ?? 0)) / strongest },
      d: above && above.y !== y ? `M${x(part.from)} ${above.y} V${y} H${x(part.to)}` : `M${x(part.from)} ${y} H${x(part.to)}`,
    });
    const told = part.advantage === null ? "" : ", advantage " + signed(part.advantage);
    line.append(svg("title", {}, `turns ${part.from + 1} to ${part.to}: value ${number(part.value)}${told}`));
    drawing.append(line);
    part.parts.forEach((next) => draw(next, part));
    drawing.append(part.parts.length ? fork(part, x(part.to), y) : leaf(part.row, x(part.to), y, member, open));
  };
  trees.forEach((tree) => draw(tree, null));
  return h(
    "section",
    { class: "fork-tree" },
    h("h3", {}, "Forks of this task"),
    h("p", { class: "soft note" }, "At a fork: the mean reward of its continuations. Colour: better or worse than the alternatives."),
    h("div", { class: "lineage-scroll", tabindex: "0", role: "region", "aria-label": "Forks" }, drawing),
  );
}

const flat = (part) => [part, ...part.parts.flatMap(flat)];

function fork({ value, to }, x, y) {
  return svg(
    "g",
    { class: "fork" },
    svg("title", {}, `fork after turn ${to}: mean reward ${number(value)}`),
    svg("circle", { cx: x, cy: y, r: 4 }),
    svg("text", { x: x - 6, y: y - 6 }, number(value, 3)),
  );
}

function leaf(row, x, y, member, open) {
  const origin = row.parent === null ? "" : `, forked from member ${row.parent} after turn ${row.fork_turn}`;
  const named = `member ${row.member}${origin}: ${row.status.replace("_", " ")}, reward ${number(row.reward)}`;
  const go = () => open(row.number);
  return svg(
    "g",
    {
      class: "leaf" + (row.member === member ? " here" : ""),
      role: "link",
      tabindex: "0",
      "aria-label": named,
      onclick: go,
      onkeydown: (event) => event.key === "Enter" && go(),
    },
    svg("title", {}, named),
    svg("circle", { cx: x, cy: y, r: 4 }),
    svg("text", { x: x + 9, y: y + 4 }, `${number(row.reward, 3)} · ${row.member}`),
  );
}
