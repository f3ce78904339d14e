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

from TrainingFactory.models.names import TINY_IDS, resolve_model_name
from TrainingFactory.registry.store import EXCLUDED
from TrainingFactory.resolve.model_names import ADAPTER, TrainedBy, find_model, with_original_model

ExportKind = Literal["model", "adapter", "merged"]
Dtype = Literal["float32", "bfloat16", "float16"]
REWARD_HEAD_FILES = ("scalar_head.safetensors", "reward_model.json")  # of a reward model


@dataclass(slots=True)
class ExportedModel:
    path: Path
    kind: ExportKind
    source: Path  # the checkpoint
    base: str | None = None  # what an adapter needs
    reward_model: bool = False
    auto_class: str = "AutoModelForCausalLM"  # class of transformers that loads it
    notes: list[str] = field(default_factory=list)


def export(
    model_name: str,
    out: str | Path,
    merge: bool = False,
    dtype: Dtype | None = None,
    runs: str | Path = "runs",
    registry: str | Path | None = None,
) -> ExportedModel:
    """Write a model into a new folder: a run's last checkpoint, a given checkpoint, or a registered version. `merge`
    merges an adapter into its base model. `dtype` is the number format of the weights, by default the model's."""
    model = find_model(model_name, runs, registry)
    if (checkpoint := model.folder) is None:
        raise ValueError(f"{model_name!r} is neither a run in {runs} nor a folder with a model or an adapter")
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists; name a new folder")
    is_adapter = (checkpoint / ADAPTER).is_file()
    if merge and not is_adapter:
        raise ValueError(f"{checkpoint} holds a whole model, not an adapter: there is nothing to merge")
    if dtype is not None and is_adapter and not merge:
        raise ValueError("dtype is for whole models; export the adapter without dtype, or with merge")
    result = ExportedModel(folder, "merged" if merge else "adapter" if is_adapter else "model", checkpoint)
    result.reward_model = (checkpoint / REWARD_HEAD_FILES[1]).is_file()
    if is_adapter:
        result.base = model.name
    if result.kind == "adapter" and resolve_model_name(str(result.base)) in TINY_IDS:
        raise ValueError(
            f"the adapter in {checkpoint} belongs to a built-in model, which other programs cannot load: "
            "export it merged"
        )
    with _write_atomically(folder) as partial_folder:
        if merge or dtype is not None:
            _convert_checkpoint(result, model.run, dtype, partial_folder)
        else:
            _copy_checkpoint(result, partial_folder)
        if result.kind == "adapter":
            _fit_to_composite_base(result, model.run, partial_folder)
        for file in REWARD_HEAD_FILES if result.reward_model else ():
            shutil.copyfile(checkpoint / file, partial_folder / file)
    return result


@contextmanager
def _write_atomically(final_folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `final_folder` when it is complete."""
    partial_folder = final_folder.with_name(f".{final_folder.name}.part")
    shutil.rmtree(partial_folder, ignore_errors=True)  # left by an interrupted export
    partial_folder.mkdir(parents=True)
    try:
        yield partial_folder
        os.rename(partial_folder, final_folder)  # over an empty folder too
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise


def _copy_checkpoint(exported_model: ExportedModel, partial_folder: Path) -> None:
    for path in exported_model.source.iterdir():
        if path.is_file() and path.name not in EXCLUDED + REWARD_HEAD_FILES:
            shutil.copyfile(path, partial_folder / path.name)
    if exported_model.kind == "adapter":
        adapter_config = json.loads((partial_folder / ADAPTER).read_text(encoding="utf-8"))
        adapter_config["base_model_name_or_path"] = resolve_model_name(str(exported_model.base))
        (partial_folder / ADAPTER).write_text(json.dumps(adapter_config, indent=2), encoding="utf-8")


def _fit_to_composite_base(target: ExportedModel, run: TrainedBy | None, partial_folder: Path) -> None:
    """Rename the modules of an adapter that was trained on the text part of a composite model."""
    from TrainingFactory.models.composite import rename_adapter
    from TrainingFactory.models.loading import read_composite_config

    config = read_composite_config(str(target.base), **_get_base_options(run))
    if config is None:
        return
    rename_adapter(partial_folder, config)
    target.auto_class = "AutoModelForImageTextToText"
    target.notes.append(
        f"the adapter was trained on the text part of {target.base}; its modules are renamed to fit the whole model, "
        "as transformers (AutoModelForImageTextToText) and vLLM load it"
    )


def _get_base_options(run: TrainedBy | None) -> dict[str, Any]:
    """Return the options with which the base of a run's adapter was loaded."""
    if run is None:
        return {}
    section = with_original_model(run).model
    return {"revision": section.revision, "trust_remote_code": section.trust_remote_code}


def _convert_checkpoint(
    exported_model: ExportedModel, run: TrainedBy | None, dtype: Dtype | None, partial_folder: Path
) -> None:
    """Save the model in another number format, or with its adapter merged."""
    from TrainingFactory.models import load_model
    from TrainingFactory.models.dtypes import pick_dtype
    from TrainingFactory.models.loading import read_stored_dtype

    if exported_model.kind == "model":
        loaded_model = load_model(str(exported_model.source), dtype=dtype or "auto", device="cpu")
        model = loaded_model.model
    else:
        options = _get_base_options(run)
        quantization = "none" if run is None else with_original_model(run).model.quantization
        if quantization != "none":
            exported_model.notes.append(
                f"the adapter was trained over {quantization} weights and is merged into full-precision ones: outputs "
                "differ by the rounding"
            )
        base_model = str(exported_model.base)
        # Merged in float32 and cast afterwards, because bfloat16 sums would lose small changes.
        loaded_model = load_model(
            base_model, dtype="float32", device="cpu", adapter=str(exported_model.source), **options
        )
        torch_dtype = read_stored_dtype(base_model, **options) if dtype is None else pick_dtype(dtype)
        model = loaded_model.model.merge_and_unload().to(torch_dtype)
    exported_model.notes += loaded_model.notes
    model.save_pretrained(partial_folder)
    loaded_model.save_preprocessors(partial_folder)
