"""All that docs/REAL_MODELS.md tells of a GPU, by one command: `python -m benchmarks.real_models --data FOLDER`.

First what needs the device for itself (figures of speed, vLLM's too where it is installed), then the runs, several at
once: three seeds of GSM8K with the test set, WordNet, GSM8K without the calculator, and one run of GRPO for each factor
that is changed, from the SFT of one of the seeds. Each writes OUT/NAME.log; what has ended well is not done again, so
that the same command goes on after a break. `--list` shows the commands, `--only NAME ...` takes some, in that order.
FOLDER has gsm8k/train.jsonl, gsm8k/test.jsonl, wordnet/data.noun and wordnet/index.noun.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from TrainingFactory.apps.recipes.recipe import SMALL_OVERRIDES
from TrainingFactory.runs.folder import RunFolder, is_run

SEEDS = ("gsm8k-0", "gsm8k-1", "gsm8k-2")
CREDIT = [
    "reward.type=process_reward",
    'reward.options={"outcome":{"rule":"numeric"}}',
    'reward.step_rewards={"correct_tool":0.2}',
]
FACTORS = {
    "groups-of-8": ["training.group_size=8"],
    "rate-1e-5": ["training.learning_rate=1e-5"],
    "credit-by-turn": CREDIT,
}


def speed(data: Path, out: Path) -> dict[str, list[str]]:
    """Return what is measured alone."""
    run = ["gpu_run", "--data", str(data / "gsm8k"), "--out", str(out / "gpu-run")]
    update = ["update", "--device", "cuda", "--real", "--no-memory", "--repeats", "4"]
    asked = {
        "exactness": ["gpu_exactness"],
        "engine": ["gpu_engine"],
        "update": update,
        "update-checkpointing": [*update, "--checkpointing"],
        "run": run,
        "shapes": ["gpu_shapes", "--steps", "1"],
    }
    if find_spec("vllm") is not None:  # beside ours, on the same shapes
        asked |= {"vllm-qwen": ["vllm_alone"], "vllm-llama": ["vllm_alone", "--model", "llama"]}
    return {name: ["-m", f"benchmarks.{words[0]}", *words[1:]] for name, words in asked.items()}


def runs(data: Path, out: Path, first: Path, small: bool = False) -> dict[str, list[str]]:
    """Return what is trained; the factors begin with the SFT in the folder `first`."""
    tfactory, scale = ["-m", "TrainingFactory.cli"], ["--model", "builtin:tiny", "--scale", "small"]
    ending = ["--final", *(scale if small else [])]
    found = {
        name: [*tfactory, "recipe", "gsm8k", "--data", str(data / "gsm8k"), "--seed", str(seed),
               "--out", str(out / name), *ending]
        for seed, name in enumerate(SEEDS)
    }  # fmt: skip
    wordnet = ["--data", str(data / "wordnet"), "--out", str(out / "wordnet"), *ending]
    found["wordnet"] = [*tfactory, "recipe", "wordnet", *wordnet]
    found["plain"] = [*tfactory, "recipe", "gsm8k", "--plain", "--data", str(data / "gsm8k"), "--out",
                      str(out / "plain"), "--grpo", "training.max_steps=40", *ending[1:]]  # fmt: skip
    common = ["model.name=sft", f"logging.output_dir={first}", f"data.tasks={first / 'data' / 'tasks.jsonl'}"]
    common += [f"data.heldout={first / 'data' / 'dev.jsonl'}", "training.max_steps=40"]
    common += [f"{key}={value}" for key, value in SMALL_OVERRIDES["grpo"].items()] if small else []
    for name, options in FACTORS.items():
        config = "configs/smollm2_gsm8k_grpo.yaml"
        found[name] = [*tfactory, "train", config, "--name", name, *common, *options]
    return found


class Campaign:
    def __init__(self, out: Path, first: Path) -> None:
        self.out, self.first, self.failed, self.ended = out, first, list[str](), set[str]()
        out.mkdir(parents=True, exist_ok=True)

    def do(self, name: str, words: list[str]) -> None:
        while name in FACTORS and self.first.name not in self.ended and not self._has_sft():
            time.sleep(1)
        try:
            self._do(name, words)
        finally:
            self.ended.add(name)

    def _has_sft(self) -> bool:
        return is_run(self.first / "sft") and RunFolder(self.first / "sft").state == "finished"

    def _do(self, name: str, words: list[str]) -> None:
        done, log = self.out / f"{name}.done", self.out / f"{name}.log"
        if done.exists():
            self.say(f"{name}: done before")
            return
        if name in FACTORS and (self.first / name).exists():
            words = [*words[:2], "runs", "resume", name, "--runs", str(self.first)]
        self.say(f"{name} begins")
        started = time.monotonic()
        with log.open("a") as file:
            code = subprocess.run([sys.executable, *words], stdout=file, stderr=file).returncode
        self.say(
            f"{name}: {'ended' if not code else f'FAILED, see {log}'}, {time.monotonic() - started:.0f} s"
        )
        if code:
            self.failed.append(name)
        else:
            done.write_text(shlex.join(words) + "\n")

    def say(self, line: str) -> None:
        with (self.out / "campaign.log").open("a") as file:
            print(f"{time.strftime('%H:%M:%S')} {line}", file=file)
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/real-models"))
    parser.add_argument(
        "--at-once", type=int, default=2, help="runs that share the device; each takes up to 50 GB"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--first", choices=SEEDS, default=SEEDS[0], help="whose SFT the runs of the factors begin with"
    )
    parser.add_argument(
        "--small", action="store_true", help="a few steps of the built-in model, to try it on a CPU"
    )
    parser.add_argument("--list", action="store_true", help="show the commands")
    asked = parser.parse_args()
    first = asked.out / asked.first
    alone, together = speed(asked.data, asked.out), runs(asked.data, asked.out, first, asked.small)
    if unknown := set(asked.only) - set(alone) - set(together):
        parser.error(
            f"no such names: {', '.join(sorted(unknown))}; there are {', '.join([*alone, *together])}"
        )
    chosen = [{name: part[name] for name in asked.only or part if name in part} for part in (alone, together)]
    if asked.list:
        for name, words in (chosen[0] | chosen[1]).items():
            print(f"{name:22} python {shlex.join(words)}")
        return
    campaign = Campaign(asked.out, first)
    campaign.ended |= set(SEEDS) - set(chosen[1])
    for name, words in chosen[0].items():
        campaign.do(name, words)
    with ThreadPoolExecutor(asked.interruptible) as pool:
        list(pool.map(campaign.do, *zip(*chosen[1].items(), strict=True)) if chosen[1] else ())
    if campaign.failed:
        sys.exit(f"failed: {', '.join(campaign.failed)}")


if __name__ == "__main__":
    main()
