"""Make the pictures of docs/UI.md: every page of `tfactory ui` over a folder of runs, light and dark.

    python -m benchmarks.ui_shots --runs runs --run demo --model agent

Run it in the folder that has the runs, with the repository on PYTHONPATH. The browser is that of the tests
(`make servers`); a run that goes on meanwhile is shown as such. Fonts are the system's: FONTCONFIG_FILE names others.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from urllib.parse import quote

from tests.kits.browser import Browser
from tests.kits.page import Served, serving

SIZE = (1400, 900)
PHONE = (390, 844)  # of pictures whose name ends in -phone
LARGEST = 200_000  # bytes of a picture
ROOT = Path(__file__).parents[1]

# Scripts that are run on a page before its picture is taken.
PASTE = """(() => {
  const servers = document.querySelector("#servers");
  const files = { command: "sh", args: ["papers-server.sh", "--folder", "papers"] };
  servers.value = JSON.stringify({ mcpServers: { files } }, null, 2);
  servers.dispatchEvent(new Event("input"));
  document.querySelector("#read-servers").click();
})()"""
SEND = """(async () => {
  document.querySelector("#send").click();
  while (!document.querySelector(".chat .tag")) await new Promise((go) => setTimeout(go, 100));
  document.querySelector("h1").scrollIntoView();
})()"""
ANSWER = """(async () => {
  const there = (what) => document.querySelector(".chat " + what);
  document.querySelector("#send").click();
  while (!there(".role-assistant") || there(".live")) await new Promise((go) => setTimeout(go, 100));
  document.querySelector('[aria-label^="Another answer"]').click();
})()"""


def routes(
    page: Served,
    run: str,
    against: str | None,
    play: str | None,
    model: str | None,
    group: list[str],
    forked: str | None,
    endpoint: str | None,
) -> dict[str, tuple[str, str]]:
    """Return for each picture the route, and what must be there before it is taken; a script stands between bars."""
    name = quote(run)
    best, longest = (
        page.get(f"/api/runs/{name}/episodes", down=1, limit=1, **chosen)["rows"][0]["number"]
        for chosen in ({"sort": "reward", "step": 1}, {"sort": "length"})
    )
    others = [row["name"] for row in page.get("/api/runs")["runs"] if row["spark_of"] == "reward"]
    chosen = [run, against] if against else [run, *(other for other in others if other != run)][:2]
    made = {
        "runs": ("runs", ".runs tbody tr"),
        "run": (f"run/{name}", ".chart canvas"),
        "runs-phone": ("runs", ".runs tbody tr"),
        "run-phone": (f"run/{name}", ".chart canvas"),
        "episodes": (
            f"run/{name}/episodes?number={longest}&colour=logprob&sort=length&down=1",
            ".detail .tokens",
        ),
        "group": (f"run/{name}/episodes?number={best}&group=1&colour=advantage", ".member .tokens"),
        "config": (f"run/{name}/config?against={quote(chosen[-1])}", "table"),
        "start": ("start", ".told-config .right"),
    }
    made |= {
        "wizard": ("wizard", f"#servers | {PASTE} | #confirm-servers"),
        "play": (f"play?model={quote(play or run)}", f".chat .role-user | {ANSWER} | #better-1"),
        "label": (f"judges/label?run={name}", "#good"),
    }
    if group:
        picked = ",".join(map(quote, group))
        made["groups"] = (f"runs?by=config&select={picked}", ".overlay .chart canvas")
    if forked:
        row = page.get(f"/api/runs/{quote(forked)}/episodes", sort="reward", down=1, limit=1)["rows"][0]
        made["forks"] = (f"run/{quote(forked)}/episodes?number={row['number']}", ".forks .leaf")
    if endpoint:
        chosen_endpoint = f"model={quote(endpoint)}&environment=environment%3Asearch"
        made["play-endpoint"] = (f"play?{chosen_endpoint}", f".chat .role-user | {SEND} | .chat .tag")
    if page.get("/api/audits")["audits"]:
        made["judges"] = ("judges", ".plot")
    if model is not None:
        versions = page.get("/api/models")["models"]
        numbers = [
            each["number"] for found in versions if found["name"] == model for each in found["versions"]
        ]
        made["registry"] = (f"registry/{quote(model)}/{numbers[:2][-1]}", "svg.lineage")
        if len(numbers) > 1:
            pair = f"first={model}:{numbers[0]}&second={model}:{numbers[1]}"
            made["compare"] = (f"registry/compare?{pair}", ".tiles")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--run", required=True, help="the run whose pages are shown: one with episodes")
    parser.add_argument("--against", help="the run that it is compared with; one with rewards without it")
    parser.add_argument("--play", help="the run that is talked with: one whose answers differ; else --run")
    parser.add_argument("--model", help="the registered model that is shown")
    parser.add_argument("--group", nargs="*", default=[], help="runs that are shown grouped by config")
    parser.add_argument("--forked", help="a run with training.branching")
    parser.add_argument("--endpoint", help="the endpoint that plays `search`: a file of options here")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "ui")
    parser.add_argument("--only", nargs="*", help="names of pictures; all without it")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    try:
        with serving(given.runs) as page:
            for name, (route, there) in routes(
                page,
                given.run,
                given.against,
                given.play,
                given.model,
                given.group,
                given.forked,
                given.endpoint,
            ).items():
                if given.only and name not in given.only:
                    continue
                for theme in ("light", "dark"):
                    path = given.out / f"{name}-{theme}.png"
                    size = PHONE if name.endswith("-phone") else SIZE
                    with browser.tab(page.entry, *size, dark=theme == "dark") as tab:
                        tab.goto(f"{page.url}/#/{route}")
                        first, *more = there.split(" | ")
                        tab.wait(f"document.querySelector('{first}')", 120)
                        if more:
                            tab.run(more[0])
                            tab.wait(f"document.querySelector('{more[1]}')", 120)
                        time.sleep(1.0)  # what is drawn last: curves, and the rows below
                        tab.screenshot(path)
                        assert not tab.errors, tab.errors
                    written = path.stat().st_size
                    print(f"{path}  {written / 1000:.0f} kB", flush=True)
                    assert written < LARGEST, f"{path} is too large"
    finally:
        browser.close()


if __name__ == "__main__":
    main()
