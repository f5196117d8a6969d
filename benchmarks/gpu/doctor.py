"""What ``sfumato doctor`` says of this machine, and how one block of a language model compiles."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.gpu.cells import Bound, Cell, Setting, relative_error
from benchmarks.gpu.results import ROOT
from benchmarks.gpu.sft import QWEN3_1_7B, TINY
from benchmarks.gpu.watched import compiled_for
from sfumato.config.sections import TrainConfig
from sfumato.parallel.memory import apply_memory_savings

BOUNDS = (
    Bound(
        "broken", 0, "each finding brings its remedy: see findings in results.jsonl; mend these before anything else"
    ),
    Bound(
        "first_pass_s", 60, "set TORCHINDUCTOR_CACHE_DIR to a folder that is kept, or train.compile false", real=True
    ),
    Bound("graphs", 1, "a block breaks into several graphs: TORCH_LOGS=graph_breaks names the lines"),
    Bound("recompiled", 1, "a second length should compile once more and a third not at all: TORCH_LOGS=recompiles"),
    Bound("output", 0.02, "compiled code is wrong, or rounds too much: train.compile false until it is known why"),
    Bound("gradient", 0.03, "as output"),
    Bound("of_eager", 0.9, "compiling gains nothing here: train.compile false spares its start", real=True),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {"doctor": run_doctor, "one compiled block": compile_block}


def run_doctor(setting: Setting) -> dict[str, Any]:
    """Findings of ``sfumato doctor``; what is optional and missing does not count."""
    command = [sys.executable, "-m", "sfumato.cli", "doctor", "--json"]
    limit = max(setting.left_s - 5, 10)
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert process.stdout.strip(), f"sfumato doctor said nothing: {process.stderr[-400:]}"
    findings = json.loads(process.stdout)
    broken = {f"{entry['group']}, {entry['name']}": entry["detail"] for entry in findings if is_broken(entry)}
    missing = [entry["name"] for entry in findings if entry["state"] == "missing"]
    return {"broken": len(broken), "findings": broken, "missing": ", ".join(missing), "looked_at": len(findings)}


def is_broken(finding: dict[str, Any]) -> bool:
    """Whether a finding stops something; the suite runs from its folder, so that sfumato itself need not be installed,
    and what pins of packages say stands above the table."""
    return finding["state"] == "broken" and finding["name"] != "sfumato"


def compile_block(setting: Setting) -> dict[str, Any]:
    """A block of the 1.7 B model by ``apply_memory_savings``: seconds, graphs, distance from the eager one."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    block, rotary = make_block(setting)
    lengths = setting.size((2048, 3072, 4096), (32, 48, 64))
    inputs = [make_inputs(length, setting) for length in lengths]
    eager = [run_block(block, rotary, hidden) for hidden in inputs]
    eager_s = setting.seconds(lambda: run_block(block, rotary, inputs[-1]), setting.size(20, 1), 2)
    torch._dynamo.reset()
    counters.clear()
    with compiled_for(setting):
        config = TrainConfig(output_dir="unused", compile=True)
        apply_memory_savings(block, config, {"block": block}, device=torch.device(setting.device).type)
    started = time.perf_counter()
    run_block(block, rotary, inputs[0])
    setting.wait()
    first_s = time.perf_counter() - started
    graphs = counters["stats"]["unique_graphs"]
    compiled = [run_block(block, rotary, hidden) for hidden in inputs]
    errors = [
        [relative_error(*pair) for pair in zip(*pairs, strict=True)] for pairs in zip(compiled, eager, strict=True)
    ]
    compiled_s = setting.seconds(lambda: run_block(block, rotary, inputs[-1]), setting.size(20, 1), 2)
    return {
        "first_pass_s": first_s,
        "graphs": graphs,
        "recompiled": counters["stats"]["unique_graphs"] - graphs,
        "output": max(error[0] for error in errors),
        "gradient": max(error[1] for error in errors),
        "of_eager": compiled_s / eager_s,
        "eager_ms": eager_s * 1e3,
    }


def make_block(setting: Setting) -> tuple[nn.Module, nn.Module]:
    """A decoder layer in bf16 with random weights, and the module of its rotary positions."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    description = {name: value for name, value in setting.size(QWEN3_1_7B, TINY).items() if name != "model_type"}
    config = Qwen3Config(**description, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(setting.device):
        block, rotary = Qwen3DecoderLayer(config, layer_idx=0), Qwen3RotaryEmbedding(config)
        for parameter in block.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
    return block.to(torch.bfloat16), rotary


def make_inputs(length: int, setting: Setting) -> Tensor:
    width = setting.size(QWEN3_1_7B, TINY)["hidden_size"]
    hidden = torch.randn(1, length, width, generator=torch.Generator().manual_seed(length))
    return hidden.to(setting.device, torch.bfloat16)


def run_block(block: nn.Module, rotary: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward: the output, and the gradient of the input."""
    hidden = hidden.detach().requires_grad_()
    places = torch.arange(hidden.shape[1], device=hidden.device)[None]
    output = block(hidden, position_embeddings=rotary(hidden, places), attention_mask=None, position_ids=places)
    output = output[0] if isinstance(output, tuple) else output
    output.float().square().mean().backward()
    return output.detach(), cast("Tensor", hidden.grad)
