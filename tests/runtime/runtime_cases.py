"""Modules, data, plans and the one-process reference that the tests of the runtime share (with their workers)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopiper import ir
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.model.spec import Model
from autopiper.plan import CostTable, Group, Pipeline, Plan, Provenance, Schedule, Stage, Strategy, Training

SEQUENCE, VOCABULARY, WIDTH = 6, 40, 16
VECTORS = ("sequential", "in_place", "kept_in_place")
"""Modules that take vectors; the others take ids."""
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Double(nn.Module):
    """Two tensors from one: a boundary behind it carries both."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.lin(x)), x


class Both(nn.Module):
    """Two tensors to two."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"left": torch.sigmoid(self.lin(pair[0])), "right": pair[1] + pair[0]}


class Join(nn.Module):
    """One tensor from two."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Mapping[str, Tensor]) -> Tensor:
        return torch.tanh(self.lin(pair["left"]) * pair["right"])


class Scale(nn.Module):
    """No parameters, so nothing before it needs a gradient: a boundary behind it sends none back."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def sequential() -> nn.Module:
    """Seven blocks with none, one and many tensors between them, two of them without parameters."""
    hidden = [Scale(), nn.Linear(WIDTH, WIDTH), Double(), Both(), Join(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*hidden)


def sequential_tied() -> nn.Module:
    """Embedding, two layers, and an output that shares the embedding's weight."""
    output = nn.Linear(WIDTH, VOCABULARY, bias=False)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    output.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), output)


def in_place() -> nn.Module:
    """Every block but the linear ones works in place, on what may just have been received."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


def kept_in_place() -> nn.Module:
    """Blocks that work in place behind blocks that keep what they put out: no graph of one process allows that."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Hardtanh(-0.3, 0.3, inplace=True), nn.Sigmoid(), nn.SiLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


class Skip(nn.Module):
    """No known structure: a skip connection around all layers, an input that every layer reads, a buffer, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def reset_parameters(self) -> None:
        self.get_buffer("scale").copy_(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, input_ids: Tensor, shift: Tensor) -> dict[str, Tensor]:
        hidden = skip = self.embedding(input_ids) * self.scale
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + shift.unsqueeze(-1)
        return {"logits": self.out(hidden + skip)}


def _llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    module: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=24, max_position_embeddings=32, tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    )  # fmt: skip
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequential,
    "sequential_tied": sequential_tied,
    "in_place": in_place,
    "kept_in_place": kept_in_place,
    "traced": Skip,
    "llama": lambda: _llama(tied=False),
    "llama_tied": lambda: _llama(tied=True),
}


def make_module(name: str, precision: str, seed: int = 7) -> nn.Module:
    """Build a module with the same weights in every process that gives the same seed."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[precision])
    try:
        return MODULES[name]()
    finally:
        torch.set_default_dtype(before)


def example(name: str, samples: int, precision: str, seed: int = 0, sequence: int = SEQUENCE) -> Any:
    """Make a batch: ids and ragged labels for language models, vectors otherwise."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if name in VECTORS:
        shape = (samples, WIDTH)
        x, y = (torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[precision]) for _ in range(2))
        return x, y
    ids = torch.randint(0, VOCABULARY, (samples, sequence), generator=generator)
    labels = torch.randint(0, VOCABULARY, (samples, sequence), generator=generator)
    ignored = torch.rand((samples, sequence), generator=generator) < torch.rand((samples, 1), generator=generator)
    batch = {"input_ids": ids, "labels": labels.masked_fill(ignored, -100)}
    if name == "traced":
        shift = torch.randn((samples, sequence), generator=generator, dtype=torch.float64)
        batch["shift"] = shift.to(DTYPES[precision])
    return batch


def inputs_of(name: str, batch: Any) -> Any:
    """The module's own inputs, as `Model.from_module` takes them."""
    if name in VECTORS:
        return (batch[0],)
    if name == "sequential_tied":
        return (batch["input_ids"],)
    return {key: value for key, value in batch.items() if key != "labels"}


def loss_mean(output: Tensor, batch: Any) -> Tensor:
    """A bare scalar: the mean over samples."""
    return functional.mse_loss(output, batch[1])


def loss_tokens(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Sum over the tokens that count, and how many they are."""
    logits = output if isinstance(output, Tensor) else output["logits"]
    labels = batch["labels"]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


def loss_of(name: str) -> Callable[[Any, Any], Any]:
    return loss_mean if name in VECTORS else loss_tokens


def sequential_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An nn.Sequential takes ids by position."""
    return (batch["input_ids"],), {}


def optimizer_of(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def cpu_cluster(num_devices: int, platform: str = "cpu") -> Cluster:
    kind = DeviceType(
        name="core", memory_bytes=float("inf"), peak_flops={"fp32": 1e10, "fp64": 5e9, "bf16": 1e10},
        memory_bytes_per_s=1e10, platform=platform,
    )  # fmt: skip
    link = Link(bytes_per_s=1e9, latency_s=1e-5)
    node = Node(name="here", devices=("core",) * num_devices, intra=link, nic=link)
    return Cluster(name="cores", device_types=(kind,), nodes=(node,))


def make_plan(model: Model, cluster: Cluster, strategy: Strategy) -> Plan:
    """A plan as the search would write it, without predictions."""
    graph = ir.build(strategy, model, cluster)
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    return Plan(
        model=model, cluster=cluster, costs=CostTable(blocks=()), strategy=strategy, programs=programs,
        step_time_s=1.0, makespan_s=1.0, relative_error=0.0, peak_memory_bytes=(0.0,) * len(graph.devices()),
        lower_bound_s=1.0, binding="none", provenance=Provenance(autopiper_version="test"),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What a worker needs beside the plan."""

    module: str
    optimizer: str = "sgd"
    steps: int = 10
    factory: bool = False
    whole: bool = True
    sequence: int = SEQUENCE
    """Sequence length of the batches."""
    odd_rank: int | None = None
    """This rank does something else than the others: it has `odd_module`, or without one other weights."""
    odd_module: str | None = None
    module_precision: str | None = None
    samples: int | None = None
    """Samples of the batches, where not as planned."""
    world_size: int | None = None
    """Start so many ranks, whatever the plan says."""


def describe(name: str, precision: str) -> Model:
    batch = example(name, 1, precision)
    return Model.from_module(make_module(name, precision), inputs_of(name, batch), name=name)


def split(draw: random.Random, total: int, parts: int, least: int) -> list[int]:
    """Share `total` into so many numbers of at least `least`."""
    left = total - least * parts
    marks = sorted(draw.randint(0, left) for _ in range(parts - 1))
    return [b - a + least for a, b in zip([0, *marks], [*marks, left], strict=True)]


def random_strategy(draw: random.Random, num_blocks: int, precision: str, clip: float | None) -> Strategy:
    """One to three pipelines on one to four ranks: unequal cuts, slices, micro-batches; gpipe and 1f1b; recompute."""
    world = draw.choice((1, 2, 3, 4, 4, 4))
    ranks = list(range(world))
    draw.shuffle(ranks)
    pipelines, families = [], []
    square = world == 4 and draw.random() < 0.3  # two members to two members
    for size in [4] if square else split(draw, world, draw.randint(1, min(3, world)), 1):
        mine, ranks = ranks[:size], ranks[size:]
        sizes = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        groups = [2, 2] if square else split(draw, size, draw.randint(1, size), 1)
        cuts = [0, *sorted(draw.sample(range(1, num_blocks), len(groups) - 1)), num_blocks]
        stages = []
        for group, start, stop in zip(groups, cuts[:-1], cuts[1:], strict=True):
            members, mine = mine[:group], mine[group:]
            stages.append(
                Stage(
                    start=start,
                    stop=stop,
                    group=Group(
                        members=tuple((m,) for m in members),
                        slices=tuple(tuple(split(draw, s, group, 0)) for s in sizes),
                    ),
                    recompute=tuple(draw.choice(("none", "full")) for _ in range(stop - start)),
                )
            )
        pipelines.append(Pipeline(micro_batch_sizes=sizes, stages=tuple(stages)))
        families.append(draw.choice(("gpipe", "1f1b")))
    return Strategy(
        training=Training(
            global_batch_size=sum(p.share for p in pipelines), precision=precision, clip_grad_norm=clip,
            optimizer="sgd-momentum",
        ),
        pipelines=tuple(pipelines),
        schedules=tuple(Schedule(family=f, pipelines=(i,)) for i, f in enumerate(families)),
        bucket_bytes=draw.choice((600, 5000, 25 * 2**20)),
    )  # fmt: skip


def run_reference(plan: Plan, case: Case, state: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Train in one process, looping over the same micro-batches and slices."""
    precision = plan.training.precision or ""
    module = make_module(case.module, precision)
    if state is not None:
        module.load_state_dict(dict(state), strict=False)
    named = dict(module.named_parameters())
    optimizer = optimizer_of(case.optimizer, list(named.values()))
    graph = ir.build(plan.strategy, plan.model, plan.cluster)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(case.steps):
        batch = example(case.module, plan.training.global_batch_size, precision, seed=step)
        optimizer.zero_grad()
        total, weight, at = 0.0, 0.0, 0
        for pipe in graph.pipelines:
            for row in pipe.stages[-1].slices:
                for samples in filter(None, row):
                    part = _cut(batch, at, at + samples)
                    at += samples
                    loss, part_weight = _loss(case.module, module, part, samples)
                    loss.backward()  # type: ignore[no-untyped-call]
                    total, weight = total + float(loss.detach().double()), weight + float(part_weight)
        for parameter in named.values():
            assert parameter.grad is not None
            parameter.grad /= weight
        if plan.training.clip_grad_norm is not None:
            out["norms"].append(float(nn.utils.clip_grad_norm_(list(named.values()), plan.training.clip_grad_norm)))
        out["losses"].append(total / weight)
        if step == 0:
            out["gradients"] = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        optimizer.step()
    out["parameters"] = {n: p.detach().clone() for n, p in named.items()}
    return out


def _loss(name: str, module: nn.Module, batch: Any, samples: int) -> tuple[Tensor, float]:
    if name in VECTORS:
        return loss_mean(module(batch[0]), batch) * samples, samples
    inputs = inputs_of(name, batch)
    output = module(*inputs) if isinstance(inputs, tuple) else module(**inputs)
    loss, weight = loss_tokens(output, batch)
    return loss, float(weight)


def _cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {k: v[start:stop] for k, v in batch.items()}
    return tuple(v[start:stop] for v in batch)
