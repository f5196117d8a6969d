"""What ``tests/forked.py`` imports once for all its processes: nothing is computed here, and no thread begins."""

import gc
import importlib

from tests.tiny import load_task

for task in ("rl_diffusion", "rl_text", "train_dit", "train_omni", "train_text"):
    load_task(task)

for module in (
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "peft",
    "tests.dist.cases",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.clip.modeling_clip",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.t5.modeling_t5",
):
    importlib.import_module(module)

gc.set_threshold(100_000, 20, 20)  # as tests/conftest.py has it
gc.freeze()  # the pages stay shared with the processes
