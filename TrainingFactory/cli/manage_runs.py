"""`tfactory runs delete`, `archive`, `rename`, `tag` and `note`."""

from __future__ import annotations

import sys
from pathlib import Path

from TrainingFactory.apps.manage import runs as manage
from TrainingFactory.cli import show
from TrainingFactory.cli.options import RunName, RunsFolder
from TrainingFactory.runs.annotations import annotate_run, parse_tags, read_annotations
from TrainingFactory.runs.folder import RunFolder


def delete(*names: RunName, yes: bool = False, force: bool = False, runs: RunsFolder = "runs") -> int:
    """Delete runs with their checkpoints, episodes and logs, after a confirmation.

    A running run is never deleted. A run whose files another run needs, to resume or as the base of an adapter, is
    deleted only with --force. Registered models keep their own copy of the weights.

    ```
    tfactory runs delete grpo-search-1
    tfactory runs delete grpo-search-1 grpo-search-2 --yes
    ```

    Args:
        yes: Do not ask for confirmation.
        force: Delete a run although other runs need its files.
    """
    if not names:
        raise ValueError("no run to delete. Name at least one: tfactory runs delete NAME")
    folder = Path(runs).expanduser()
    for run in [RunFolder.find(name, folder) for name in names]:
        references = manage.find_references(run, folder)
        for warning in (*references.needed_by, *references.copies):
            show.note(f"note: {warning}")
        if not yes and not _confirm(f"Delete run {run.name} ({references.size / 1e6:.1f} MB)?"):
            show.note(f"kept {run.name}")
            return 1
        manage.delete_run(run, folder, force)
        print(f"deleted {run.name}; freed {references.size / 1e6:.1f} MB")
    return 0


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ValueError("deleting needs a confirmation, but the input is not a terminal. Use --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def archive(*names: RunName, undo: bool = False, runs: RunsFolder = "runs") -> None:
    """Hide runs from the list. Their files stay, and they can be used like others.

    ```
    tfactory runs archive grpo-search-1
    tfactory runs archive grpo-search-1 --undo
    tfactory runs list --archived
    ```

    Args:
        undo: Show the runs in the list again.
    """
    for run in [RunFolder.find(name, runs) for name in names]:
        annotate_run(run, archived=not undo)
        print(f"{'unarchived' if undo else 'archived'} {run.name}")


def rename(name: RunName, new_name: str, *, runs: RunsFolder = "runs") -> None:
    """Rename a run that is not running. A run whose files another run needs keeps its name.

    ```
    tfactory runs rename grpo-search-1 baseline
    ```

    Args:
        new_name: New name of the run's folder.
    """
    folder = Path(runs).expanduser()
    renamed_run = manage.rename_run(RunFolder.find(name, folder), new_name, folder)
    print(f"renamed to {renamed_run.name}: {renamed_run.path}")


def tag(name: RunName, *tags: str, remove: list[str] | None = None, runs: RunsFolder = "runs") -> None:
    """Set, remove or print the tags of a run.

    ```
    tfactory runs tag grpo-search-1 baseline team=search
    tfactory runs tag grpo-search-1 --remove team
    tfactory runs tag grpo-search-1
    ```

    Args:
        tags: Tags as name or name=value.
        remove: Name of a tag to remove; repeat it for several.
    """
    run = RunFolder.find(name, runs)
    if tags or remove:
        annotate_run(run, tags=parse_tags(tags), removed_tags=remove or ())
    for tag_name, value in read_annotations(run).tags.items():
        print(f"{tag_name}={value}" if value else tag_name)


def note(name: RunName, text: str | None = None, *, runs: RunsFolder = "runs") -> None:
    """Set or print the note of a run. An empty text removes it.

    ```
    tfactory runs note grpo-search-1 "reward fixed in step 40, compare with baseline"
    tfactory runs note grpo-search-1
    ```

    Args:
        text: New note. Default: print the present one.
    """
    run = RunFolder.find(name, runs)
    if text is not None:
        annotate_run(run, note=text)
    elif current_note := read_annotations(run).note:
        print(current_note)


MANAGE_COMMANDS = (delete, archive, rename, tag, note)
