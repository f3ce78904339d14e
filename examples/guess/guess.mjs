// An environment in Node: the model guesses a number from 1 to 20. Protocol: docs/ENVIRONMENTS.md.
//   tfactory rollout "process:node examples/guess/guess.mjs"
import { createInterface } from "node:readline";

const episodes = new Map();

// A number that depends on seed and index alone, so that the same seed gives the same tasks.
function secret(seed, index) {
  let x = (seed * 2654435761 + index * 40503 + 12345) >>> 0;
  x = Math.imul(x ^ (x >>> 15), 2246822519) >>> 0;
  return (((x ^ (x >>> 13)) >>> 0) % 20) + 1;
}

const methods = {
  version({ protocol }) {
    if (protocol !== 1) throw new Error(`this program speaks protocol 1, not ${protocol}`);
    return { protocol: 1, name: "guess", versions: { node: process.version }, actions: "text" };
  },

  tasks({ split, seed, count }) {
    const first = split === "heldout" ? 1000000 : 0;
    const task = (i) => ({ id: `guess-${split}-${seed}-${i}`, metadata: { number: secret(seed, first + i) } });
    return { tasks: Array.from({ length: count }, (_, i) => task(i)) };
  },

  reset({ episode, task }) {
    episodes.set(episode, { number: task.metadata.number, guesses: 0, won: false });
    return { messages: [{ role: "user", content: "Guess my number from 1 to 20. Answer with a number." }] };
  },

  step({ episode, message }) {
    const state = episodes.get(episode);
    state.guesses += 1;
    const guess = parseInt(message.content.match(/\d+/)?.[0] ?? "", 10);
    const done = state.won = guess === state.number;
    const reply = Number.isNaN(guess) ? "Answer with a number." : guess < state.number ? "Higher." : "Lower.";
    return {
      messages: done ? [] : [{ role: "user", content: reply }],
      done,
      stop_reason: done ? "guessed" : null,
      metrics: { guesses: state.guesses },
    };
  },

  score({ episode }) {
    const { won, guesses } = episodes.get(episode);
    return { reward: won ? 1 : 0, parts: { quick: won && guesses <= 5 ? 1 : 0 } };
  },

  close({ episode }) { episodes.delete(episode); return {}; },
};

createInterface({ input: process.stdin }).on("line", (line) => {
  const { id, method, ...fields } = JSON.parse(line);
  let answer;
  try { answer = { id, result: methods[method](fields) }; }
  catch (error) { answer = { id, error: { message: error.message } }; }
  process.stdout.write(JSON.stringify(answer) + "\n");
});
