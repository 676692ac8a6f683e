"""What a person may hand to the verbs: a model, a cluster and a training in any form that a constructor takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopiper._data import require
from autopiper.cluster.spec import Cluster
from autopiper.errors import ClusterError, CostError, ModelError, PlanError, nearest
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.space import Space
from autopiper.plan.training import Training

if TYPE_CHECKING:
    import torch

    ModelLike = Model | torch.nn.Module | Mapping[str, Any] | str | Path
ClusterLike = Cluster | str | Path

ASSUMED_SAMPLES_PER_DEVICE = 16
"""Global batch per device where nobody says one: enough micro-batches to fill a pipeline, and a round number."""


def as_model(given: ModelLike, *, sequence_length: int | None = None, example_inputs: Any = None) -> Model:
    """Return the Model that `given` means: a Model, an nn.Module, a preset's name, a config.json (path, folder or dict).

    Raises ModelError where it is none of these, or where an argument does not belong to it.
    """
    # A torch module is known by its shape, so that plain presets never pay for importing torch.
    is_module = hasattr(given, "named_parameters") and hasattr(given, "forward")
    if is_module and example_inputs is None:
        raise ModelError(
            "an nn.Module needs example_inputs: the args tuple or kwargs dict of a batch of one sample, "
            "e.g. example_inputs={'input_ids': torch.zeros(1, 4096, dtype=torch.long)}"
        )
    if not is_module and example_inputs is not None:
        raise ModelError(f"example_inputs belongs to an nn.Module; the model given is a {type(given).__name__}")
    if isinstance(given, Model):
        return given if sequence_length is None else given.with_sequence_length(sequence_length)
    if is_module:
        described = Model.from_module(given, example_inputs)  # type: ignore[arg-type]
        return described if sequence_length is None else described.with_sequence_length(sequence_length)
    if isinstance(given, Mapping):
        return Model.from_config(given, sequence_length=sequence_length)
    if not isinstance(given, (str, Path)):
        raise ModelError(
            f"model is a {type(given).__name__}; allowed: a Model, an nn.Module, a preset's name, or a config.json as path or dict"
        )
    path = Path(given)
    if str(given) not in Model.presets():
        if os.path.isdir(path):  # unlike pathlib's, False for a name that no file can have
            return Model.from_config(path / "config.json", sequence_length=sequence_length)
        if os.path.isfile(path) or path.suffix == ".json" or isinstance(given, Path):
            return Model.from_config(path, sequence_length=sequence_length)
    return Model.from_preset(str(given), sequence_length=sequence_length)


def as_cluster(given: ClusterLike) -> Cluster:
    """Return the Cluster that `given` means: a Cluster, the path of a cluster file, or "local" (this machine).

    Raises ClusterError where there is no such file, with the nearest one beside it.
    """
    if isinstance(given, Cluster):
        return given
    if not isinstance(given, (str, Path)):
        raise ClusterError(
            f"cluster is a {type(given).__name__}; allowed: a Cluster, the path of a TOML file, or 'local'"
        )
    if str(given) == "local":
        return Cluster.local()
    path = Path(given)
    if not os.path.isfile(path):
        beside = [p.stem for p in path.parent.glob("*.toml")] if os.path.isdir(path.parent) else []
        raise ClusterError(
            f"cluster file '{given}' does not exist{nearest(path.stem, beside)}; give the path of a TOML file, or 'local'"
        )
    return Cluster.from_file(path)


def as_training(
    training: Training | None,
    global_batch_size: int | None,
    model: Model,
    cluster: Cluster,
    costs: CostTable | None = None,
    precision: str | None = None,
) -> tuple[Training, tuple[str, ...]]:
    """Return the Training with its batch settled, and notes on everything that was assumed.

    An open precision becomes the one that `costs` hold for, or stays open: it depends on which devices are used.
    Raises PlanError where two answers contradict each other.
    """
    require(PlanError, "training", training, Training | None)
    require(CostError, "costs", costs, CostTable | None)
    require(PlanError, "precision", precision, str | None)
    notes: list[str] = []
    if training is None:
        size = global_batch_size
        if size is None and model.global_batch_size is not None:
            size = model.global_batch_size
            notes.append(f"global_batch_size was not given: {size}, the published one of {model.source}")
        elif size is None:
            size = ASSUMED_SAMPLES_PER_DEVICE * cluster.num_devices
            notes.append(
                f"global_batch_size was not given and model '{model.name}' has no published one: assumed "
                f"{ASSUMED_SAMPLES_PER_DEVICE} samples x {cluster.num_devices} devices = {size}"
            )
        training = Training(global_batch_size=size, precision=precision)
    elif global_batch_size is not None and global_batch_size != training.global_batch_size:
        raise PlanError(
            f"global_batch_size is {global_batch_size}, but training says {training.global_batch_size}; give it once"
        )
    elif precision is not None and precision != training.precision:
        raise PlanError(f"precision is '{precision}', but training says '{training.precision}'; give it once")
    if costs is not None and costs.precision is not None:
        if training.precision is None:
            training = replace(
                training, precision=costs.precision, precision_reason=f"what the costs hold for ({costs.source})"
            )
        elif training.precision != costs.precision:
            raise PlanError(
                f"training asks for precision '{training.precision}', but the costs hold for '{costs.precision}'; "
                "price or profile again, or train in that precision"
            )
    return training, tuple(notes)


def length_notes(given: ModelLike, sequence_length: int | None, model: Model) -> tuple[str, ...]:
    """Return a note where the sequence length of a config.json was nobody's choice."""
    from autopiper.model.hf_config import LONGEST_DEFAULT

    if sequence_length is not None or isinstance(given, Model) or not model.source.startswith("config "):
        return ()
    return (
        f"sequence_length was not given: assumed {model.sequence_length}, the longest that the config allows, but at most "
        f"{LONGEST_DEFAULT}",
    )


def usable(cluster: Cluster, training: Training, space: Space) -> tuple[Cluster, tuple[str, ...]]:
    """Return the part of the cluster that a search may use at all, for pricing it, and notes on what is left out.

    Raises PlanError where the precision asked for is supported nowhere, or `space.devices` names no device.
    """
    allowed = range(cluster.num_devices) if space.devices is None else space.devices
    types = {cluster.device(d).type.name: cluster.device(d).type for d in allowed}
    if not types:
        raise PlanError("space.devices is empty; name at least one device, or None for all")
    able = [n for n, t in types.items() if training.precision is None or t.supports(training.precision)]
    if not able:
        training.resolve(types.values())  # raises, naming who lacks it and what all support
    notes = tuple(
        f"{name} stays idle: it does not support {training.precision}, which was asked for"
        for name in types
        if name not in able
    )
    return of_types(cluster, able), notes


def of_types(cluster: Cluster, names: Iterable[str]) -> Cluster:
    """Return the devices of these types alone, for pricing them."""
    kept = set(names)
    nodes = [replace(n, devices=tuple(d for d in n.devices if d in kept)) for n in cluster.nodes if {*n.devices} & kept]
    return replace(cluster, nodes=tuple(nodes))
