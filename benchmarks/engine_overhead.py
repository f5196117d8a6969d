"""What the parallel engine costs on one device: fsdp2 of one rank against the plain module, as ratios of one run.

    python benchmarks/engine_overhead.py [--width 512] [--layers 8] [--side 32] [--compile] [--bf16] [--repeats 7]

Both sides train an SD3 transformer with random weights on the same latents: forward, backward, gradient norm, clipping
and AdamW. The plain side calls torch alone. The sides take turns, and the ratio is taken pair by pair; losses and norms
are compared first. Prints images per second, share of the device's peak (``--peak-tflops``) and peak memory besides.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sfumato.config.parallel import ParallelConfig
from sfumato.kernels import choose_kernels
from sfumato.models.diffusion import plans
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import parallelize


def build(arguments: argparse.Namespace) -> nn.Module:
    """An SD3 transformer with random weights."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    heads = arguments.width // 64
    with torch.device(arguments.device):
        return SD3Transformer2DModel(
            sample_size=arguments.side,
            num_layers=arguments.layers,
            attention_head_dim=64,
            num_attention_heads=heads,
            caption_projection_dim=arguments.width,
            joint_attention_dim=512,
            pooled_projection_dim=512,
            pos_embed_max_size=max(arguments.side, 64),
            qk_norm="rms_norm",
        )


class Side:
    """One way to take a training step."""

    def __init__(self, arguments: argparse.Namespace, engine: bool) -> None:
        self.device = torch.device(arguments.device)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16) if arguments.bf16 else nullcontext()
        self.mesh = Mesh(Layout(), self.device) if engine else None
        self.module = build(arguments)
        if engine:
            dtype = torch.bfloat16 if arguments.bf16 else None
            config = ParallelConfig(compile=arguments.compile)
            self.module = parallelize(self.module, self.mesh, config, plans.SD3, dtype)
        elif arguments.compile:
            for block in self.module.transformer_blocks:
                block.compile()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        generator = torch.Generator().manual_seed(1)
        shapes = {"hidden_states": (16, arguments.side, arguments.side), "encoder_hidden_states": (77, 512)}
        shapes["pooled_projections"] = (512,)
        size = arguments.batch
        self.inputs = {
            name: torch.randn(size, *shape, generator=generator).to(self.device) for name, shape in shapes.items()
        }
        self.inputs["timestep"] = (torch.rand(size, generator=generator) * 1000).to(self.device)

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        with self.autocast:
            velocity = self.module(**self.inputs, return_dict=False)[0]
        loss = (velocity.float() - self.inputs["hidden_states"]).square().mean()
        loss.backward()
        if self.mesh is None:
            norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), 1.0))
        else:
            norm = reduce_and_clip(self.module, 1.0, self.mesh, "benchmark")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), norm

    def seconds(self, num_steps: int) -> float:
        """Mean time of a step."""
        self._wait()
        started = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        self._wait()
        return (time.perf_counter() - started) / num_steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    choose_kernels()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"width": 512, "layers": 8, "side": 32, "batch": 4, "repeats": 7, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    plain = Side(arguments, engine=False)
    with tempfile.NamedTemporaryFile() as rendezvous:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{rendezvous.name}", rank=0, world_size=1)
        engine = Side(arguments, engine=True)
        with FlopCounterMode(display=False) as counter:
            first = plain.step()
        print("loss and norm, plain and engine:", first, engine.step())
        for side in (plain, engine):
            side.seconds(2)
        pairs = [(plain.seconds(arguments.steps), engine.seconds(arguments.steps)) for _ in range(arguments.repeats)]
        dist.destroy_process_group()
    ratios = sorted(after / before for before, after in pairs)
    middle = statistics.median(ratios)
    print(f"engine / plain: {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) of {len(pairs)} pairs")
    fastest = min(after for _, after in pairs)
    print(f"engine: {arguments.batch / fastest:.2f} images/s, {counter.get_total_flops() / fastest / 1e12:.2f} TFLOP/s")
    if arguments.peak_tflops:
        print(f"model FLOPs utilisation: {counter.get_total_flops() / fastest / 1e12 / arguments.peak_tflops:.1%}")
    if arguments.device == "cuda":
        print(f"peak memory of both sides: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
