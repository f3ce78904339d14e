"""Export of a trained model into a folder that other programs load: without training state, and merged on request."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.models.names import BUILTIN, resolve_model_name
from TrainingFactory.registry.store import TRAINING
from TrainingFactory.resolve.model_names import ADAPTER, TrainedBy, find_model, with_original_model

Kind = Literal["model", "adapter", "merged"]
Dtype = Literal["float32", "bfloat16", "float16"]
HEAD = ("scalar_head.safetensors", "reward_model.json")  # of a reward model


@dataclass(slots=True)
class ExportedModel:
    path: Path
    kind: Kind
    source: Path  # the checkpoint
    base: str | None = None  # what an adapter needs
    reward_model: bool = False
    notes: list[str] = field(default_factory=list)


def export(
    name: str,
    out: str | Path,
    merge: bool = False,
    dtype: Dtype | None = None,
    runs: str | Path = "runs",
    registry: str | Path | None = None,
) -> ExportedModel:
    """Write a model into a new folder: a run's last checkpoint, a given checkpoint, or a registered version. `merge`
    merges an adapter into its base model. `dtype` is the number format of the weights, by default the model's."""
    model = find_model(name, runs, registry)
    if (checkpoint := model.folder) is None:
        raise ValueError(f"{name!r} is neither a run in {runs} nor a folder with a model or an adapter")
    target = Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} already exists; name a new folder")
    adapter = (checkpoint / ADAPTER).is_file()
    if merge and not adapter:
        raise ValueError(f"{checkpoint} holds a whole model, not an adapter: there is nothing to merge")
    if dtype is not None and adapter and not merge:
        raise ValueError("dtype is for whole models; export the adapter without dtype, or with merge")
    done = ExportedModel(target, "merged" if merge else "adapter" if adapter else "model", checkpoint)
    done.reward_model = (checkpoint / HEAD[1]).is_file()
    if adapter:
        done.base = model.name
    if done.kind == "adapter" and resolve_model_name(str(done.base)) == BUILTIN:
        raise ValueError(
            f"the adapter in {checkpoint} belongs to {BUILTIN}, which other programs cannot load: export it merged"
        )
    with _written_aside(target) as part:
        if merge or dtype is not None:
            _convert(done, model.maker, dtype, part)
        else:
            _copy(done, part)
        for file in HEAD if done.reward_model else ():
            shutil.copyfile(checkpoint / file, part / file)
    return done


@contextmanager
def _written_aside(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` when it is complete."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted export
    part.mkdir(parents=True)
    try:
        yield part
        os.rename(part, target)  # over an empty folder too
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _copy(done: ExportedModel, part: Path) -> None:
    for path in done.source.iterdir():
        if path.is_file() and path.name not in TRAINING + HEAD:
            shutil.copyfile(path, part / path.name)
    if done.kind == "adapter":
        about = json.loads((part / ADAPTER).read_text(encoding="utf-8"))
        about["base_model_name_or_path"] = resolve_model_name(str(done.base))
        (part / ADAPTER).write_text(json.dumps(about, indent=2), encoding="utf-8")


def _convert(done: ExportedModel, run: TrainedBy | None, dtype: Dtype | None, part: Path) -> None:
    """Save the model in another number format, or with its adapter merged."""
    from TrainingFactory.models import load_model
    from TrainingFactory.models.loading import pick_dtype, stored_dtype

    if done.kind == "model":
        loaded = load_model(str(done.source), dtype=dtype or "auto", device="cpu")
        model = loaded.model
    else:
        options: dict[str, Any] = {}
        if run is not None:
            section = with_original_model(run).model
            options = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
            if section.quantization != "none":
                done.notes.append(
                    f"the adapter was trained over {section.quantization} weights and is merged into full-precision "
                    "ones: outputs differ by the rounding"
                )
        base = str(done.base)
        # Merged in float32 and cast afterwards, because bfloat16 sums would lose small changes.
        loaded = load_model(base, dtype="float32", device="cpu", adapter=str(done.source), **options)
        kind = stored_dtype(base, **options) if dtype is None else pick_dtype(dtype)
        model = loaded.model.merge_and_unload().to(kind)
    model.save_pretrained(part)
    loaded.tokenizer.save_pretrained(part)
