"""Predicted memory against that of real models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils._pytree import tree_leaves

from sfumato.commands.check_model import check_model, needed_bytes
from sfumato.config.load import load_config, merge
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.config.text import LanguageModelConfig, TrainTextConfig
from sfumato.config.text_data import TextDataConfig, TextTrainConfig
from sfumato.config.text_rl import TextRLTrainConfig
from sfumato.models.diffusion.frozen_parts import EMBED_BATCH
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.estimate.activation_memory import compile_without_code
from sfumato.models.estimate.cuda_autocast import IN_FLOAT32, TO_FLOAT32, as_on_cuda
from sfumato.models.estimate.frozen_passes import decoding_bytes, encoding_bytes
from sfumato.models.estimate.memory_plan import RankMemory, count_activations, count_drawing, plan_memory
from sfumato.models.estimate.meta_models import (
    diffusion_model_on_meta,
    plan_diffusion_model,
    plan_language_model,
    plan_text_policy,
)
from sfumato.models.estimate.peak_memory import PeakBytes, peak_bytes
from sfumato.models.language.packed_attention import register_packed_attention
from sfumato.models.language.scores import TokenScores
from sfumato.models.lora import add_lora, language_targets
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import cross_entropy_sum, linear_cross_entropy
from sfumato.parallel.memory import apply_memory_savings
from sfumato.parallel.plan import find_blocks, language_plan
from sfumato.parallel.precision import compute_in
from tests.tiny import tiny_text_config, write_tiny_pipeline
from tests.unit.test_flops import KINDS

LENGTH = 64


def train_section(tmp_path: Path, **more: Any) -> TextTrainConfig:
    return load_config(TextTrainConfig, overrides={"output_dir": str(tmp_path / "run"), **more})


def described(tmp_path: Path, kind: str, **more: Any) -> LanguageModelConfig:
    path = tmp_path / f"{kind}.yaml"
    path.write_text(yaml.safe_dump({"model_type": kind, **KINDS[kind]}))
    return LanguageModelConfig(config_path=str(path), tokenizer_path="none", **more)


def predicted(tmp_path: Path, kind: str, num_ranks: int = 1, lora: LoraConfig | None = None, **train: Any) -> Any:
    model, section = described(tmp_path, kind, lora=lora), train_section(tmp_path, **train)
    data = TextDataConfig(train_path="none.jsonl", max_seq_len=LENGTH)
    planned = plan_language_model(model, data, section, Layout.resolve(section, num_ranks), on_gpu=False)
    return planned, section


def real(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention())


class Saved:
    """Bytes of what autograd holds, once for each storage, without weights and copies of them."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = {parameter.untyped_storage()._cdata: parameter for parameter in module.parameters()}
        self.total = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self.seen:
            self.seen[key] = tensor.detach()
            self.total += tensor.untyped_storage().nbytes()
        return tensor.detach()


def really_saved(module: nn.Module, bf16: bool, chunked: bool = False) -> int:
    saved = Saved(module)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    head = module.get_output_embeddings()
    if chunked:
        head.forward = lambda hidden: hidden
    with (
        torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        output = module(input_ids=ids, position_ids=torch.arange(LENGTH)[None], use_cache=False).logits
        loss = linear_cross_entropy(output, head.weight, ids)[0] if chunked else cross_entropy_sum(output, ids)
    loss.backward()
    return saved.total


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_of_a_real_forward_pass(tmp_path: Path, kind: str, precision: str) -> None:
    planned, train = predicted(tmp_path, kind, mixed_precision=precision)
    activations = count_activations(planned, train, Layout())
    module = real(kind)
    if precision == "bf16":
        compute_in(module, torch.bfloat16)
    expected = really_saved(module, precision == "bf16")
    assert activations.before + activations.after + activations.copies + sum(
        activations.bytes_by_block("none")
    ) == pytest.approx(expected, rel=0.1)
    assert len(activations.blocks) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_compiled_blocks_keep_what_is_predicted(tmp_path: Path, kind: str) -> None:
    planned, train = predicted(tmp_path, kind, mixed_precision="bf16", compile=True)
    uncompiled = sum(count_activations(planned, train, Layout()).bytes_by_block("none"))
    activations = count_activations(planned, train, Layout(), compiled=True)
    compiled = sum(activations.bytes_by_block("none"))
    assert 0.3 * uncompiled < compiled < uncompiled
    module = real(kind)
    compute_in(module, torch.bfloat16)
    with compile_without_code(find_blocks(module, language_plan(module))):
        expected = really_saved(module, bf16=True)
    outside = activations.before + activations.after + activations.copies
    assert outside + compiled == pytest.approx(expected, rel=0.1)
    assert not any("forward" in vars(block) for block in find_blocks(module, language_plan(module)).values())


def test_compiled_blocks_are_counted_where_others_do_not_fit(tmp_path: Path) -> None:
    config = tiny_text_config(tmp_path, train={"device": "cuda", "mixed_precision": "bf16", "max_steps": 1})
    parsed = load_config(TrainTextConfig, overrides=config)
    plenty = check_model(parsed, Layout(), True, 2**40)
    little = check_model(parsed, Layout(), True, needed_bytes(plenty.largest, True) - 1)
    assert plenty.counts_uncompiled and not little.counts_uncompiled
    assert not little.advice, "compiled blocks fit"
    assert little.largest.parts["activations of blocks"] < plenty.largest.parts["activations of blocks"]
    recomputed = merge(config, {"train": {"activation_checkpointing": "full"}})
    assert not check_model(load_config(TrainTextConfig, overrides=recomputed), Layout(), True, None).counts_uncompiled


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_recomputation_keeps_what_is_predicted(tmp_path: Path, kind: str, mode: str) -> None:
    planned, train = predicted(tmp_path, kind, activation_checkpointing=mode)
    activations = count_activations(planned, train, Layout())
    outside = activations.before + activations.after + activations.copies
    module = real(kind)
    apply_memory_savings(module, train, find_blocks(module, language_plan(module)))
    if mode == "full":
        rotary = module.model.rotary_emb(torch.zeros(1), torch.arange(LENGTH)[None])  # held, but not by autograd
        expected = really_saved(module, bf16=False) + sum(tensor.nbytes for tensor in rotary)
        assert outside + sum(activations.bytes_by_block(mode)) == pytest.approx(expected, rel=0.1)
    else:
        assert (
            sum(activations.bytes_by_block("full"))
            < sum(activations.bytes_by_block(mode))
            < sum(activations.bytes_by_block("none"))
        )
        assert sum(activations.bytes_by_block(mode)) == pytest.approx(kept_by_policy(module), rel=0.1)


def kept_by_policy(module: nn.Module) -> int:
    """What torch's selective recomputation holds of the blocks, with what they are given."""
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    modes: list[Any] = []
    before = _CachingTorchDispatchMode.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        modes.append(self)

    saved, ids = Saved(module), torch.zeros(1, LENGTH, dtype=torch.int64)
    _CachingTorchDispatchMode.__init__ = remember
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed):
            output = module.base_model(input_ids=ids, position_ids=torch.arange(LENGTH)[None], use_cache=False)
    finally:
        _CachingTorchDispatchMode.__init__ = before
    leaves = tree_leaves([list(mode.storage.values()) for mode in modes])
    held = [getattr(leaf, "val", leaf) for leaf in leaves]
    assert output.last_hidden_state.requires_grad and held
    return saved.total + sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_weights_gradients_and_optimiser_state_are_exact(tmp_path: Path, kind: str, lora: LoraConfig | None) -> None:
    planned, train = predicted(tmp_path, kind, lora=lora)
    (memory,) = plan_memory(planned, train, 1)
    module = real(kind)
    if lora is not None:
        module.requires_grad_(False)
        add_lora(module, lora, language_targets(module), seed=0)
    optimizer, _ = build_optimizer(module, train, 1)
    really_saved(module, bf16=False)
    optimizer.step()
    assert memory.parts["weights"] == sum(parameter.nbytes for parameter in (*module.parameters(), *module.buffers()))
    gradients = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    missing = sum(
        parameter.nbytes for parameter in module.parameters() if parameter.requires_grad and parameter.grad is None
    )
    assert memory.parts["gradients"] == sum(gradient.nbytes for gradient in gradients if gradient is not None) + missing
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert memory.parts["optimiser state"] - 3 * missing == pytest.approx(
        sum(state.nbytes for state in states), abs=400
    )


def only(actual: list[RankMemory]) -> dict[str, int]:
    assert len(actual) == 1
    return actual[0].parts


def test_ranks_share_weights_gradients_and_state(tmp_path: Path) -> None:
    alone = only(plan_memory(*predicted(tmp_path, "qwen3"), 1))
    whole = only(plan_memory(*predicted(tmp_path, "qwen3", 4, data_parallel_mode="ddp"), 4))
    assert whole == alone, "ddp shares nothing"
    for mode in ("fsdp1", "fsdp2"):
        sharded = only(plan_memory(*predicted(tmp_path, "qwen3", 4, data_parallel_mode=mode), 4))
        for name in ("gradients", "optimiser state"):
            assert sharded[name] == pytest.approx(alone[name] / 4, rel=0.01)
        assert sharded["gathered weights"] > 0
        assert sharded["activations of blocks"] == alone["activations of blocks"]


def test_more_ranks_than_samples_need_whole_gradients_only_where_they_are_added_up(tmp_path: Path) -> None:
    fixed = {"dyn_bsz": False, "data_parallel_mode": "fsdp2"}
    once = only(plan_memory(*predicted(tmp_path, "qwen3", 2, global_batch_size=2, **fixed), 2))
    twice = only(plan_memory(*predicted(tmp_path, "qwen3", 2, global_batch_size=4, **fixed), 2))
    assert twice["whole gradients"] == pytest.approx(2 * once["gradients"], rel=0.02)
    assert once["whole gradients"] < twice["whole gradients"] / 2


def test_tensor_and_sequence_parallelism_share_activations(tmp_path: Path) -> None:
    def blocks(num_ranks: int, **train: Any) -> int:
        return only(plan_memory(*predicted(tmp_path, "qwen3", num_ranks, **train), num_ranks))["activations of blocks"]

    alone, cut = blocks(1), blocks(2, tensor_parallel_size=2)
    assert alone / 2 < blocks(2, tensor_parallel_size=2, sequence_parallel=True) < cut < alone
    assert blocks(2, ulysses_parallel_size=2) == blocks(2, context_parallel_size=2) == alone // 2


def test_stages_hold_their_layers_and_the_micro_batches_under_way(tmp_path: Path) -> None:
    settings = {"pipeline_parallel_size": 3, "global_batch_size": 6, "dyn_bsz": False}
    stages = plan_memory(*predicted(tmp_path, "qwen3", 3, **settings), 3)
    per_block = count_activations(*predicted(tmp_path, "qwen3"), Layout()).bytes_by_block("none")
    assert [stage.parts["activations of blocks"] for stage in stages] == [
        3 * per_block[0],
        2 * per_block[1],
        per_block[2],
    ]
    assert ["loss" in stage.parts for stage in stages] == [False, False, True]
    settings["pipeline_schedule"] = "gpipe"
    stages = plan_memory(*predicted(tmp_path, "qwen3", 3, **settings), 3)
    assert stages[1].parts["activations of blocks"] == 6 * per_block[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_offload_moves_to_the_host(tmp_path: Path, ranks: int) -> None:
    planned, train = predicted(tmp_path, "qwen3", ranks, enable_fsdp_offload=True, enable_activation_offload=True)
    (memory,) = plan_memory(planned, train, ranks)
    assert set(memory.host) == {"weights", "gradients", "optimiser state", "activations"}
    assert not {"weights", "gradients", "optimiser state"} & set(memory.parts)


def test_chunked_loss_holds_no_logits(tmp_path: Path) -> None:
    planned, train = predicted(tmp_path, "qwen3", chunked_loss=True)
    activations = count_activations(planned, train, Layout())
    expected = really_saved(real("qwen3"), bf16=False, chunked=True)
    assert activations.before + activations.after + activations.copies + sum(
        activations.bytes_by_block("none")
    ) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("source", ["folder", "description"])
def test_diffusion_models_are_predicted_the_same_way(tmp_path: Path, source: str, lora: LoraConfig | None) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    source_field = (
        {"model_path": str(folder)} if source == "folder" else {"config_path": str(tmp_path / "pipeline.yaml")}
    )
    config = ModelConfig(**source_field, max_sequence_length=7, lora=lora)
    train = train_section(tmp_path, micro_batch_size=2)
    planned = plan_diffusion_model(diffusion_model_on_meta(config, "no"), Layout(), 2, (16, 16))
    (memory,) = plan_memory(planned, train, 1)

    model = build_diffusion_model(config)
    denoiser, saved = model.denoiser, Saved(model.denoiser)
    assert memory.parts["weights"] == sum(
        parameter.nbytes for parameter in (*denoiser.parameters(), *denoiser.buffers())
    )
    trained = sum(parameter.nbytes for parameter in denoiser.parameters() if parameter.requires_grad)
    assert memory.parts["gradients"] == trained
    for name in ("vae", "text_encoder", "text_encoder_3"):
        component = model.components[name]
        expected = sum(parameter.nbytes for parameter in (*component.parameters(), *component.buffers()))
        assert memory.parts[f"frozen {name}"] == expected
    conditioning = model.encode_prompts(["write", '"'])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed):
        model.predict_velocity(torch.zeros(2, 4, 8, 8), torch.ones(2), conditioning)
    actual = memory.parts["activations of blocks"] + memory.parts["activations outside blocks"]
    assert actual == pytest.approx(saved.total, rel=0.1)


def test_autocast_is_counted_as_cuda_computes() -> None:
    """The rules are those of torch's own list; norms, softmax and powers save float32 where a CPU's save bf16."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    for names, title in ((IN_FLOAT32, "AT_FORALL_FP32("), (TO_FLOAT32, "AT_FORALL_FP32_SET_OPT_DTYPE(")):
        listed = header.split(f"#define {title}")[1].split("\n\n")[0]
        assert set(names) == {entry.replace(", ", ".") for entry in re.findall(r"_\(([\w, ]+)\)", listed)}
    linear, norm, tokens = nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False), torch.zeros(4, 8)

    def computed(on_gpu: bool) -> tuple[int, list[torch.dtype]]:
        saved = Saved(linear)
        with (
            as_on_cuda(on_gpu),
            torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed),
            torch.autocast("cpu", torch.bfloat16),
        ):
            results = [linear(tokens), norm(linear(tokens)), linear(tokens).softmax(-1), linear(tokens) ** 2]
        return saved.total, [result.dtype for result in results]

    on_cpu, on_gpu = computed(on_gpu=False), computed(on_gpu=True)
    assert on_cpu[1] == [torch.bfloat16] * 4 and on_gpu[1] == [torch.bfloat16, *[torch.float32] * 3]
    assert on_gpu[0] >= on_cpu[0] + 3 * 2 * tokens.numel()
    assert computed(on_gpu=False) == on_cpu, "and afterwards a CPU's rules are its own"


@pytest.mark.parametrize(("task", "per_logit"), [("train_text", 14), ("rl_text", 18)])
def test_logits_take_what_is_predicted(
    task: str, per_logit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a logit in bf16: itself, what its loss saves, and gradients, while the backward pass is in the loss."""
    vocabulary = 4800
    monkeypatch.setitem(KINDS["llama"], "vocab_size", vocabulary)
    head, hidden = nn.Linear(8, vocabulary, bias=False), torch.zeros(1, LENGTH, 8)
    labels = torch.zeros(1, LENGTH, dtype=torch.int64)
    with PeakBytes() as counted, as_on_cuda():
        with torch.autocast("cpu", torch.bfloat16):
            scores = TokenScores(head(hidden), (1, LENGTH))
            is_rl = task == "rl_text"
            loss, held = scores.log_probs_and_entropy(labels) if is_rl else scores.cross_entropy(labels)
        loss.sum().backward()
    del held  # until here, as the task holds the entropies
    logits = LENGTH * vocabulary
    assert counted.peak / logits == pytest.approx(per_logit, abs=1)
    planned, train = predicted(tmp_path, "llama", mixed_precision="bf16", rmpad_with_pos_ids=True)
    if task == "rl_text":
        section = load_config(TextRLTrainConfig, overrides={"output_dir": str(tmp_path), "mixed_precision": "bf16"})
        planned = plan_text_policy(described(tmp_path, "llama"), LENGTH, 1, section, Layout(), on_gpu=True)
    (memory,) = plan_memory(planned, train, 1)
    result = memory.parts["loss"] + memory.parts["activations outside blocks"]
    assert result / logits == pytest.approx(per_logit, abs=1)


def test_drawing_decoding_and_embedding_take_what_is_predicted(tmp_path: Path) -> None:
    """Peaks of the tiny model at work against those that are found without memory."""
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    config = ModelConfig(model_path=str(folder), max_sequence_length=7)
    described = diffusion_model_on_meta(config, "no")
    planned = plan_diffusion_model(described, Layout(), 2, (16, 16), drawn=(3, 4.5))
    model = build_diffusion_model(config)
    latents = torch.zeros(3, *model.latent_shape(16, 16))
    with torch.no_grad():
        conditioning = model.encode_prompts(["write", "a", "b"])
        drawing = peak_bytes(lambda: model.predict_velocity(latents, torch.ones(3), conditioning, 4.5))
        decoding = peak_bytes(lambda: model.decode(latents))
        embedding = peak_bytes(lambda: model.embed_prompts(["write"] * EMBED_BATCH))
    assert count_drawing(planned, train_section(tmp_path), Layout()) == pytest.approx(drawing, rel=0.15)
    assert decoding_bytes(described, (16, 16)) == pytest.approx(decoding, rel=0.15)
    assert encoding_bytes(described, (16, 16)) == pytest.approx(embedding, rel=0.3)
    larger = plan_diffusion_model(described, Layout(), 2, (32, 32), drawn=(3, 4.5))
    assert count_drawing(larger, train_section(tmp_path), Layout()) > 3 * drawing
    assert decoding_bytes(described, (32, 32)) > decoding


def test_a_phase_counts_where_it_takes_more_than_an_update() -> None:
    assert RankMemory({"weights": 3, "activations": 4}).total == 7
    assert RankMemory({"weights": 3, "activations": 4}, phases={"drawing": 5, "decoding": 9}).total == 9
