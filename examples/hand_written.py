"""A strategy by hand: DualPipeV's main phase on two ranks, from the annotated module to trained weights.

    python examples/hand_written.py

Rank 0 holds stages 0 and 3, rank 1 stages 1 and 2. Groups of two filters may overlap: the forward of one stage with the
backward of the other.
"""

import torch
from torch import nn

import autopiper as ap


class Layers(nn.Module):
    """Eight residual layers in four stages, tagged as for Piper."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8))

    def forward(self, x):
        for stage in range(4):
            with ap.annotate("PP"):
                for layer in self.layers[2 * stage : 2 * stage + 2]:
                    x = x + layer(x)
        return x


def row(text):
    """Write an order: "0F0 3F0+0B1" = stage 0's forward of micro-batch 0, then two passes that may overlap."""
    return ap.order(
        [[{"PP": int(t[0]), "MB": int(t[-1]), "PASS": t[1:-1]} for t in group.split("+")] for group in text.split()]
    )


STRATEGY = [
    ap.place({"PP": 0}, [0]), ap.place({"PP": 3}, [0]),
    ap.place({"PP": 1}, [1]), ap.place({"PP": 2}, [1]),
    ap.split({}, num_microbatches=4),
    row("0F0 0F1 0F2 3F0 3BI0 3BW0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0BI2 0BW2 0BI3 0BW3"),
    row("1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2BI3 1BI3 2BW3 1BW3"),
]  # fmt: skip


def train(plan):
    """Train on one rank; return the loss of every step."""
    torch.manual_seed(0)
    data = [(x, x.roll(1)) for x in torch.randn(64, 64)]
    engine = ap.runtime.Engine(
        plan,
        Layers,
        loss_fn=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    loader = torch.utils.data.DataLoader(data, batch_sampler=engine.batch_sampler(data))
    return [engine.step(batch).loss for _ in range(5) for batch in loader]


if __name__ == "__main__":
    model = ap.Model.from_module(Layers(), (torch.zeros(1, 64),))
    cluster = ap.Cluster.local(num_devices=2)
    strategy = ap.Strategy.from_directives(STRATEGY, ap.Training(global_batch_size=16, precision="fp32"))
    timeline = ap.simulate(strategy, model, cluster)
    print(f"simulated: {timeline.step_time_s * 1e3:.2f} ms a step, bubble {timeline.bubble_fraction:.0%}")
    plan = ap.make_plan(strategy, model, cluster)
    for line in ap.verify(plan):
        print("proved:", line)
    losses, *others = ap.runtime.run_local(plan, train)
    assert all(each == losses for each in others)
    print(f"trained: loss {losses[0]:.3f} -> {losses[-1]:.3f}, the same on every rank")
