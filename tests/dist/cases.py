"""Tiny models with batches, and three training steps of them on any mesh. One process without a group is the truth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from sfumato.config.parallel import ParallelConfig
from sfumato.models.diffusion import plans
from sfumato.models.lora import ADAPTER, inject_adapter
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import accumulate, parallelize
from sfumato.parallel.pipeline import Pipeline, build_pipeline
from sfumato.parallel.plan import ParallelPlan, language_plan
from sfumato.parallel.shards import gather_whole, trainable_parameters

NUM_STEPS = 3
ROWS = 4
"""Packed rows (or samples) of one step over all ranks; a micro-batch is one of them."""
DOCUMENTS = ((9, 14, 5), (21, 12), (4, 4, 17, 2), (30,), (13, 13, 13), (6, 25), (35, 3), (1, 18, 11), (40,), (7, 8, 9))
"""Lengths of the documents of packed rows."""


@dataclass
class Outcome:
    """What training gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Trained weights, whole, float32."""
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    """Trainable parameters that got no gradient in the first step."""


@dataclass
class Case:
    """A kind of model."""

    build: Callable[[], nn.Module]
    plan: Callable[[nn.Module], ParallelPlan]
    row: Callable[[int], dict[str, torch.Tensor]]
    """One packed row or sample, by its number."""
    loss: Callable[[nn.Module, dict[str, torch.Tensor], Mesh], tuple[torch.Tensor, int]]
    """Sum over what counts in a micro-batch, and the count, both of this rank's part."""
    lora_targets: tuple[str, ...]
    counts_over: str = "data"
    """The view over which losses and counts are summed: loss where each rank of a sequence has labels of its own."""


def packed_row(index: int) -> dict[str, torch.Tensor]:
    lengths = DOCUMENTS[index % len(DOCUMENTS)]
    total = sum(lengths)
    generator = torch.Generator().manual_seed(1000 + index)
    input_ids = torch.randint(0, 64, (1, total), generator=generator)
    labels = torch.cat([functional.pad(word[1:], (0, 1), value=-100) for word in input_ids[0].split(lengths)])[None]
    labels[:, : total // 4 : 3] = -100
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def language_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    if mesh.layout.cp > 1:
        from sfumato.parallel.packed_rows import shard_sequence

        row = shard_sequence(row, mesh)
    logits = module(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
    loss = functional.cross_entropy(
        logits.flatten(0, 1).float(), row["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    return loss, int((row["labels"] != -100).sum())


def dense() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
    )


def moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            max_position_embeddings=128,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
    )


def _seeded(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=12,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=12,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )


def image_row(index: int) -> dict[str, torch.Tensor]:
    return {
        "latents": _seeded(1, 4, 10, 6, seed=2000 + index),  # 15 image tokens, 7 text tokens: nothing divides
        "noise": _seeded(1, 4, 10, 6, seed=3000 + index),
        "text": _seeded(1, 7, 16, seed=4000 + index),
        "pooled": _seeded(1, 16, seed=5000 + index),
        "sigma": torch.rand(1, generator=torch.Generator().manual_seed(6000 + index)),
    }


def _flow(velocity: torch.Tensor, row: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (velocity.float() - (row["noise"] - row["latents"])).square().mean(), 1


def _noisy(row: dict[str, torch.Tensor]) -> torch.Tensor:
    sigma = row["sigma"].reshape(-1, *[1] * (row["latents"].ndim - 1))
    return (1 - sigma) * row["latents"] + sigma * row["noise"]


def sd3_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    del mesh
    velocity = module(
        hidden_states=_noisy(row),
        timestep=row["sigma"] * 1000,
        encoder_hidden_states=row["text"],
        pooled_projections=row["pooled"],
        return_dict=False,
    )[0]
    return _flow(velocity, row)


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )


def flux_row(index: int) -> dict[str, torch.Tensor]:
    row = image_row(index)
    packed = {
        name: row[name].reshape(1, 4, 5, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 15, 16)
        for name in ("latents", "noise")
    }
    return row | packed


def flux_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    del mesh
    device = row["sigma"].device
    image_ids = torch.stack(
        [torch.zeros(15), torch.arange(5).repeat_interleave(3), torch.arange(3).repeat(5)], dim=1
    ).float()
    velocity = module(
        hidden_states=_noisy(row),
        timestep=row["sigma"],
        guidance=torch.full((1,), 3.5, device=device),
        encoder_hidden_states=row["text"],
        pooled_projections=row["pooled"],
        img_ids=image_ids.to(device),
        txt_ids=torch.zeros(7, 3, device=device),
        return_dict=False,
    )[0]
    return _flow(velocity, row)


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=32,
    )


def video_row(index: int) -> dict[str, torch.Tensor]:
    return image_row(index) | {
        "latents": _seeded(1, 4, 3, 6, 4, seed=2000 + index),  # 18 tokens
        "noise": _seeded(1, 4, 3, 6, 4, seed=3000 + index),
    }


def wan_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    del mesh
    velocity = module(
        hidden_states=_noisy(row), timestep=row["sigma"] * 1000, encoder_hidden_states=row["text"], return_dict=False
    )[0]
    return _flow(velocity, row)


def wan_pair() -> nn.Module:
    """Two transformers; of the rows' noise levels some belong to one and some to the other."""
    from sfumato.models.diffusion.families.wan_pair import WanPair

    first, second = wan(), wan()
    with torch.no_grad():
        second.proj_out.weight.mul_(-1)
    return WanPair(first, second, boundary=500)


def wan_pair_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    next(part for part in module.modules() if hasattr(part, "boundary")).mesh = mesh
    return wan_loss(module, row, mesh)


def wan_image() -> nn.Module:
    """With a first frame: its latents are further channels, and what CLIP sees in it stands before the text."""
    from diffusers import WanTransformer3DModel

    module = wan()
    settings = {"in_channels": 8, "image_dim": 16, "added_kv_proj_dim": 48}
    return WanTransformer3DModel(**{**module.config, **settings})


def wan_image_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    del mesh
    velocity = module(
        hidden_states=torch.cat([_noisy(row), row["latents"][:, :, :1].expand_as(row["latents"])], dim=1),
        timestep=row["sigma"] * 1000,
        encoder_hidden_states=functional.pad(row["text"], (0, 0, 0, 505)),  # diffusers counts 512 tokens of text
        encoder_hidden_states_image=row["text"][:, :3],
        return_dict=False,
    )[0]
    return _flow(velocity, row)


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=10,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def unet_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    del mesh
    velocity = module(_noisy(row), row["sigma"] * 999, encoder_hidden_states=row["text"], return_dict=False)[0]
    return _flow(velocity, row)


def qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        axes_dims_rope=(2, 2, 4),
        zero_cond_t=True,
    )


def qwen_image_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    """Of editing: the 15 tokens of the image made are followed by 6 of the image given; two text tokens are padding."""
    del mesh
    velocity = module(
        hidden_states=torch.cat([_noisy(row), row["latents"][:, :6]], dim=1),
        timestep=row["sigma"],
        encoder_hidden_states=row["text"],
        encoder_hidden_states_mask=torch.arange(7, device=row["text"].device)[None] < 5,
        img_shapes=[[(1, 5, 3), (1, 2, 3)]],
        return_dict=False,
    )[0]
    return _flow(velocity[:, :15], row)


def z_image() -> nn.Module:
    from diffusers import ZImageTransformer2DModel

    torch.manual_seed(0)
    module = ZImageTransformer2DModel(
        in_channels=4,
        dim=48,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=16,
        axes_dims=[4, 4, 4],
        axes_lens=[128, 32, 32],
    )
    for name in ("x_pad_token", "cap_pad_token"):
        nn.init.normal_(getattr(module, name), std=0.1)
    return module


def z_image_row(index: int) -> dict[str, torch.Tensor]:
    """Two samples, whose texts the model pads to 32 and to 64 tokens."""
    pair = [image_row(2 * index + number) for number in range(2)]
    row = {name: torch.cat([sample[name] for sample in pair]) for name in ("latents", "noise", "sigma")}
    return row | {"text": _seeded(40, 16, seed=4000 + index)}


def z_image_loss(module: nn.Module, row: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, int]:
    del mesh
    outputs = module(
        list(_noisy(row)[:, :, None].unbind()), 1 - row["sigma"], [row["text"][:7], row["text"]], return_dict=False
    )[0]
    return _flow(-torch.stack(outputs)[:, :, 0], row)


CASES = {
    "dense": Case(dense, language_plan, packed_row, language_loss, ("q_proj", "v_proj", "down_proj"), "loss"),
    "moe": Case(moe, language_plan, packed_row, language_loss, ("q_proj", "v_proj", "o_proj"), "loss"),
    "sd3": Case(sd3, lambda _: plans.SD3, image_row, sd3_loss, ("to_q", "to_v", "to_out.0", "add_q_proj")),
    "flux": Case(flux, lambda _: plans.FLUX, flux_row, flux_loss, ("to_q", "to_v", "to_out.0", "add_q_proj")),
    "wan": Case(wan, lambda _: plans.WAN, video_row, wan_loss, ("to_q", "to_v", "to_out.0", "ffn.net.2")),
    "wan_pair": Case(
        wan_pair, lambda _: plans.WAN_PAIR, video_row, wan_pair_loss, ("to_q", "to_v", "to_out.0", "ffn.net.2")
    ),
    "wan_image": Case(
        wan_image, lambda _: plans.WAN, video_row, wan_image_loss, ("to_q", "to_v", "add_k_proj", "to_out.0")
    ),
    "unet": Case(unet, lambda _: plans.UNET, image_row, unet_loss, ("to_q", "to_v", "to_out.0", "ff.net.2")),
    "qwen_image": Case(
        qwen_image, lambda _: plans.QWEN_IMAGE, flux_row, qwen_image_loss, ("to_q", "to_v", "to_out.0", "img_mlp.net.2")
    ),
    "z_image": Case(
        z_image, lambda _: plans.Z_IMAGE, z_image_row, z_image_loss, ("to_q", "to_v", "to_out.0", "feed_forward.w2")
    ),
}


def make_mesh(**config: Any) -> tuple[Mesh, ParallelConfig]:
    """The mesh of this process's group, or of one plain process."""
    parsed = ParallelConfig(**config)
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return Mesh(Layout.resolve(parsed, size), torch.device("cpu"), rank), parsed


def build(kind: str, lora: bool = False) -> nn.Module:
    """The model of a case; with adapters, their second matrices are not zero, so that all have gradients."""
    case = CASES[kind]
    module = case.build()
    if lora:
        from peft import LoraConfig

        module.requires_grad_(False)
        torch.manual_seed(1)
        inject_adapter(
            module,
            LoraConfig(r=4, lora_alpha=8, target_modules=list(case.lora_targets), init_lora_weights=False),
            ADAPTER,
        )
    return module


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()], lr=1e-2, eps=1e-4, weight_decay=0.1, foreach=False
    )


def train(kind: str, lora: bool = False, dtype: torch.dtype | None = None, **config: Any) -> Outcome:
    """Three training steps on this process's mesh.

    Args:
        kind: name of a case.
        lora: train adapters.
        dtype: torch.bfloat16 trains under autocast with bf16 weights in fsdp.
        config: fields of ParallelConfig.
    """
    mesh, parsed = make_mesh(**config)
    if mesh.layout.pp > 1:
        return train_pipeline(kind, lora, dtype, **config)
    case = CASES[kind]
    module = build(kind, lora)
    module.train()
    module = parallelize(module, mesh, parsed, case.plan(module), dtype)
    parameters = trainable_parameters(module)
    optimizer = adamw(parameters.values())
    outcome = Outcome()
    for step in range(NUM_STEPS):
        rows = [case.row(step * ROWS + index) for index in mesh.range_of_rank(ROWS)]
        losses, counts = [], 0
        num = count_all(case, rows, mesh)
        for row in accumulate(module, rows):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss, count = case.loss(module, row, mesh)
            (loss / num).backward()
            losses.append(float(loss.detach()))
            counts += count
        assert mesh.sum(counts, over=case.counts_over) == num
        if step == 0:
            outcome.without_gradient = [
                name for name, parameter in parameters.items() if parameter.grad is None and parameter.numel()
            ]
        outcome.norms.append(reduce_and_clip(module, 1.0, mesh, f"step {step + 1}"))
        outcome.losses.append(mesh.sum(sum(losses), over=case.counts_over) / num)
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights, outcome.frozen = weights_of(module)
    return outcome


def summed_loss(logits: torch.Tensor, row: dict[str, torch.Tensor], num: float) -> torch.Tensor:
    labels = row["labels"].flatten()
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum") / num


def merged(mesh: Mesh, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of all stages."""
    results: dict[str, torch.Tensor] = {}
    for part in mesh.gather(weights, over="pp"):
        assert not results.keys() & part.keys()
        results |= part
    return results


def train_steps(pipeline: Pipeline, mesh: Mesh, kind: str, dtype: torch.dtype | None = None) -> Outcome:
    case = CASES[kind]
    optimizer = adamw(trainable_parameters(pipeline.module).values())
    outcome = Outcome()
    for step in range(NUM_STEPS):
        rows = [case.row(step * ROWS + index) for index in mesh.range_of_rank(ROWS)]
        num = count_all(case, rows, mesh)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            losses = pipeline.train_step(rows, functools.partial(summed_loss, num=num))
        assert len(losses) == len(rows)
        outcome.norms.append(reduce_and_clip(pipeline.module, 1.0, mesh, f"step {step + 1}"))
        outcome.losses.append(mesh.sum(sum(losses), over="loss"))
        optimizer.step()
        optimizer.zero_grad()
    trained, frozen = weights_of(pipeline.module)
    outcome.weights, outcome.frozen = merged(mesh, trained), merged(mesh, frozen)
    return outcome


def train_pipeline(
    kind: str, lora: bool = False, dtype: torch.dtype | None = None, multiple: int = 64, **config: Any
) -> Outcome:
    """What ``tests.dist.cases.train`` does, through a pipeline."""
    mesh, parsed = make_mesh(**config)
    module = build(kind, lora)
    module.train()
    pipeline = build_pipeline(module, mesh, parsed, CASES[kind].plan(module), dtype, length_multiple=multiple)
    return train_steps(pipeline, mesh, kind, dtype)


def count_all(case: Case, rows: list[dict[str, torch.Tensor]], mesh: Mesh) -> float:
    """What counts in a step, over all ranks."""
    mine = sum(int((row["labels"] != -100).sum()) if "labels" in row else 1 for row in rows)
    return mesh.sum(mine, over="data")


def weights_of(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trained and frozen weights, whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            actual = {
                name.replace("_fsdp_wrapped_module.", ""): (parameter.requires_grad, parameter.detach().clone())
                for name, parameter in module.named_parameters()
            }
    else:
        actual = {
            name: (parameter.requires_grad, gather_whole(parameter.detach()).clone())
            for name, parameter in module.named_parameters()
        }
    return tuple(
        {name: weight for name, (trained, weight) in actual.items() if trained is wanted} for wanted in (True, False)
    )


def difference(outcome: Outcome, truth: Outcome) -> float:
    """The largest relative difference of losses, norms and weights (of each tensor, by its norm)."""
    assert outcome.weights.keys() == truth.weights.keys()
    pairs = [*zip(outcome.losses, truth.losses, strict=True), *zip(outcome.norms, truth.norms, strict=True)]
    scalars = [abs(left - right) / abs(right) for left, right in pairs]
    tensors = [
        float((outcome.weights[name].float() - weight.float()).norm() / weight.float().norm().clamp_min(1e-6))
        for name, weight in truth.weights.items()
    ]
    return max(scalars + tensors)
