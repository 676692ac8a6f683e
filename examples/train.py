"""Train a small Llama on the sources of Python's standard library: `autopiper launch plan.json examples/train.py`.

On several machines: `torchrun --nnodes … --nproc-per-node … examples/train.py plan.json`.
"""

import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autopiper as ap

CONFIG = LlamaConfig.from_json_file(Path(__file__).with_name("small-llama.json"))


def read_text(length=256):  # every sample: `length` bytes of text and, for each place, the byte that follows
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(s.read_bytes() for s in sources)), dtype=torch.uint8).long()
    return [{"input_ids": w[:-1], "labels": w[1:]} for w in text.unfold(0, length + 1, length)]


def loss_fn(output, batch):
    labels = batch["labels"]
    return cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


if __name__ == "__main__":
    plan, data = ap.load_plan(os.environ.get("AUTOPIPER_PLAN") or sys.argv[1]), read_text()
    engine = ap.runtime.Engine(plan, lambda: LlamaForCausalLM(CONFIG), loss_fn=loss_fn, optimizer=torch.optim.AdamW)
    for step, batch in enumerate(DataLoader(data, batch_sampler=engine.batch_sampler(data, shuffle=True))):
        result = engine.step(batch)
        if engine.rank == 0:
            print(f"step {step}: loss {result.loss:.3f}, {result.step_time_s:.2f} s", flush=True)
