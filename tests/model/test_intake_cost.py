"""Taking in an 8B module costs less than 1 GB; the seconds are printed, not asserted."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = """
import resource, time
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM
from autopiper.model import Model

config = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    vocab_size=128256, max_position_embeddings=8192,
)
torch.set_default_dtype(torch.bfloat16)
start = time.perf_counter()
with FakeTensorMode():
    module = LlamaForCausalLM(config)
    ids = torch.zeros(1, 8192, dtype=torch.long)
model = Model.from_module(module, (ids,))
print(model.parameters, model.flops, time.perf_counter() - start)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_an_8b_module() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    first, peak_kib = done.stdout.strip().splitlines()
    parameters, flops, seconds = first.split()
    print(f"8B intake: {float(seconds):.1f} s, {int(peak_kib) / 2**20:.2f} GiB")
    from autopiper.model import Model

    preset = Model.from_preset("llama-3-8b")
    assert int(parameters) == preset.parameters
    assert float(flops) == pytest.approx(preset.flops, rel=0.001)
    assert int(peak_kib) * 1024 < 1e9
