"""Seconds per iteration of GRPO on a language model: tasks/rl_text.py against TRL's GRPOTrainer.

    python benchmarks/text_rl_throughput.py [--rounds 3] [--model small large] [--case fixed ragged] [--kl 0 0.1]
    python benchmarks/text_rl_throughput.py --check
    python benchmarks/text_rl_throughput.py --profile --model small --case fixed

Both sides load the same weights, draw groups of answers to the same prompts at temperature 1, score them by the same
function, and take one step of AdamW on all answers in one pass: GRPO, clipped at 0.2, fp32. ``fixed``: no answer ends
before ``--tokens``. ``ragged``: the end of the text is made likely, so that answers end after about a fifth of it; the
draws of both sides differ, their distribution does not. Each measurement is a process of its own, whose first iteration
is left out; sides take turns, and a ratio is that of two neighbours. TRL draws with ``generate``, or with ``--paged``
with transformers' continuous batching. ``--check``: loss and gradients of TRL's own function on the tokens that
sfumato drew, in the second iteration, where policy and reference differ. TRL is optional: pip install trl.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sfumato.rewards.base import Reward, Sample

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"small": (192, 4, 512), "large": (640, 8, 1920)}
"""Width, layers, width of the feed-forward part."""
ENDS = {"fixed": -14.0, "ragged": 3.0}
"""Logit of the end of the text, about; those of bytes are near 0."""
SIDES = ("sfumato", "trl")


def share(text: str) -> float:
    """The share of a text's characters that are ASCII."""
    return sum(each.isascii() for each in text) / max(len(text), 1)


@dataclass(frozen=True, kw_only=True)
class Ascii(Reward):
    """The share of an answer's characters that are ASCII."""

    type: ClassVar[str] = "ascii"

    def score(self, samples: list[Sample]) -> list[float]:
        return [share(each.text or "") for each in samples]


def prompts() -> list[str]:
    """256 prompts of 16 to 48 bytes."""
    source = random.Random(0)
    return ["".join(source.choices("abcdefgh ", k=source.randint(16, 48))) for _ in range(256)]


def write_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Saves a Qwen3 with random weights. Its first channel is nearly constant, so that it can bias the end's logit."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from sfumato.models.language_load import build_byte_tokenizer

    width, layers, inner = SIZES[arguments.model]
    tokenizer = build_byte_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        for token in tokenizer.all_special_ids:
            end = token == tokenizer.eos_token_id
            model.lm_head.weight[token] = 0.0
            model.lm_head.weight[token, 0] = (ENDS[arguments.case] if end else ENDS["fixed"]) / width**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sfumato_config(arguments: argparse.Namespace, folder: Path, steps: int) -> dict[str, Any]:
    """The configuration of ``tasks/rl_text.py``."""
    for name in ("train", "eval"):
        rows = prompts() if name == "train" else prompts()[:2]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    samples = arguments.prompts * arguments.group
    return {
        "model": {"model_path": str(folder / "model")},
        "data": {
            "train_path": str(folder / "train.jsonl"),
            "eval_path": str(folder / "eval.jsonl"),
            "max_prompt_tokens": 64,
            "chat_template": "none",
        },
        "rollout": {"num_prompts": arguments.prompts, "n": arguments.group, "max_new_tokens": arguments.tokens},
        "reward": {"rewards": [{"type": "text_rl_throughput:Ascii"}]},
        "algorithm": {"recipe": "grpo", "kl": {"coef": arguments.kl[0]}},
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": steps,
            "micro_batch_size": samples,
            "lr": arguments.lr,
            "trackers": [],
            "num_threads": arguments.threads,
        },
        "eval": {"every_steps": 1000, "num_prompts": 2, "max_new_tokens": 2},
    }


def run_sfumato(arguments: argparse.Namespace, folder: Path, steps: int) -> list[dict[str, float]]:
    """Seconds and tokens of each iteration of the task."""
    from sfumato.config.load import load_config
    from sfumato.config.text_rl import TextRLConfig
    from sfumato.tracking.trackers import read_jsonl
    from tasks.rl_text import main

    main(load_config(TextRLConfig, overrides=sfumato_config(arguments, folder, steps)))
    times = list(read_jsonl(folder / "run/timings.jsonl"))
    metrics = [line for line in read_jsonl(folder / "run/metrics.jsonl") if "rollout/tokens" in line]
    times = [line for line in times if "time/update_s" in line]
    return [
        {
            "generate": time_of["time/generate_s"],
            "update": time_of["time/update_s"],
            "all": time_of["time/generate_s"] + time_of["time/update_s"] + time_of.get("time/wait_for_rewards_s", 0.0)
            if time_of["step"] == steps  # the last one has an evaluation
            else time_of["time/step_s"],
            "tokens": line["rollout/tokens"],
            "trained": line["rows"],
        }
        for time_of, line in zip(times, metrics, strict=True)
    ]


def build_trainer(arguments: argparse.Namespace, folder: Path, steps: int) -> Any:
    """TRL's trainer with the same settings."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=arguments.prompts * arguments.group,
        num_generations=arguments.group,
        max_completion_length=arguments.tokens,
        max_steps=steps,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        beta=arguments.kl[0],
        use_bias_correction_kl=False,
        loss_type="grpo",
        use_transformers_continuous_batching=arguments.paged,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
        reward_funcs=lambda completions, **_: [share(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts()}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )


def run_trl(arguments: argparse.Namespace, folder: Path, steps: int) -> list[dict[str, float]]:
    """Seconds and tokens of each iteration of the trainer."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(arguments.threads)
    trainer, spent, found = build_trainer(arguments, folder, steps), dict[str, float](), list[dict[str, float]]()

    def timed(name: str) -> None:
        inner: Callable[..., Any] = getattr(trainer, name)

        def call(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = inner(*given, **named)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started
            if name == "_generate_and_score_completions":
                spent["tokens"] = float(result["completion_mask"].sum())
            return result

        setattr(trainer, name, call)

    for name in ("_generate", "_calculate_rewards", "_generate_and_score_completions"):
        timed(name)

    class Watch(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = self.started or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            whole, self.started = now - self.started, now
            drawn = spent["_generate"]
            rest = spent["_generate_and_score_completions"] - drawn if not arguments.kl[0] else 0.0
            tokens = spent["tokens"]
            update = whole - drawn - rest
            found.append({"generate": drawn, "update": update, "all": whole, "tokens": tokens, "trained": tokens})
            spent.clear()

    trainer.add_callback(Watch())
    trainer.train()
    return found


def check(arguments: argparse.Namespace, folder: Path) -> tuple[float, float, float]:
    """Loss of sfumato and of TRL on the same tokens, and the largest difference of gradients over the largest one."""
    import torch

    import tasks.rl_text as task
    from sfumato.config.load import load_config
    from sfumato.config.text_rl import TextRLConfig

    kept: dict[str, Any] = {}
    update_policy, reduce_and_clip, policy_loss = task.update_policy, task.reduce_and_clip, task.policy_loss

    def watched(actor: Any, part: Any, advantages: Any, *given: Any) -> Any:
        weights = {name: each.detach().clone() for name, each in actor.model.plain.named_parameters()}
        kept.update(part=part, advantages=advantages.values.clone(), weights=weights, loss=0.0)
        return update_policy(actor, part, advantages, *given)

    def loss_of(*given: Any, **named: Any) -> torch.Tensor:
        loss = policy_loss(*given, **named)
        kept["loss"] += float(loss.detach())
        return loss

    def before(model: Any, *given: Any) -> float:
        kept["gradients"] = {name: each.grad.clone() for name, each in model.named_parameters()}
        return reduce_and_clip(model, *given)

    task.update_policy, task.policy_loss, task.reduce_and_clip = watched, loss_of, before
    task.main(load_config(TextRLConfig, overrides=sfumato_config(arguments, folder, 2)))

    trainer = build_trainer(arguments, folder, 2)
    model = trainer.model
    rollouts, _, ids = kept["part"]
    sequence_of = {
        request.sample_id: sequence
        for rollout in rollouts
        for request, (sequence,) in zip(rollout.requests, rollout.sequences, strict=True)
    }
    sequences = [(torch.from_numpy(sequence_of[number].token_ids).long(), sequence_of[number].drawn) for number in ids]
    given = [tokens[: len(tokens) - int(drawn.sum())] for tokens, drawn in sequences]
    drawn = [tokens[len(tokens) - int(drawn.sum()) :] for tokens, drawn in sequences]
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = {"advantages": kept["advantages"][list(ids)].float()}
    for name, parts, side in (("prompt", given, "left"), ("completion", drawn, "right")):
        inputs[f"{name}_ids"] = pad(parts, batch_first=True, padding_side=side)
        ones = [torch.ones_like(part) for part in parts]
        inputs[f"{name}_mask"] = pad(ones, batch_first=True, padding_side=side)
    trainer.current_gradient_accumulation_steps = 1
    if arguments.kl[0]:  # the model still has the weights of the beginning
        whole = [torch.cat([inputs[f"prompt_{what}"], inputs[f"completion_{what}"]], 1) for what in ("ids", "mask")]
        with torch.no_grad():
            found = trainer._get_per_token_logps_and_entropies(model, *whole, inputs["completion_ids"].shape[1])
        inputs["ref_per_token_logps"] = found[0]
    model.load_state_dict(kept["weights"], strict=False)
    model.train()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    pairs = [(each.grad, kept["gradients"][name]) for name, each in model.named_parameters()]
    largest = max(float(ours.abs().max()) for _, ours in pairs)
    return kept["loss"], float(loss.detach()), max(float((a - b).abs().max()) for a, b in pairs) / largest


def inside(arguments: argparse.Namespace, side: str) -> Any:
    """One measurement, in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", arguments)
        if side == "check":
            return check(arguments, folder)
        run = {"sfumato": run_sfumato, "trl": run_trl}[side]
        if not arguments.profile:
            return run(arguments, folder, arguments.steps + 1)[1:]
        profiler = cProfile.Profile()
        profiler.runcall(run, arguments, folder, arguments.steps + 1)
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(35)
        return []


def measure(arguments: argparse.Namespace, side: str, **changes: Any) -> Any:
    """One measurement, in a process of its own."""
    given = json.dumps(vars(arguments) | changes)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(changes.get("threads", 1)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *sys.path]),
    }
    command = [sys.executable, __file__, "--inside", side, given]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{side}, {changes}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    if arguments.profile:
        print(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compare(arguments: argparse.Namespace, label: str, **changes: Any) -> None:
    """Prints ratios of the median iterations of neighbouring runs, sfumato over TRL; tokens and seconds of both."""
    ratios: dict[str, list[float]] = {"generate": [], "update": [], "all": [], "per token": []}
    medians: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            lines = measure(arguments, side, **changes)
            medians[side].append({name: statistics.median(line[name] for line in lines) for name in lines[0]})
        ours, theirs = (medians[side][-1] for side in SIDES)
        for name in ("generate", "update", "all"):
            ratios[name].append(ours[name] / theirs[name])
        ratios["per token"].append(ratios["all"][-1] * theirs["tokens"] / ours["tokens"])
    shown = [
        f"{name} {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for name, each in ratios.items()
    ]
    print(f"{label}: sfumato / TRL: {', '.join(shown)}")
    for side, runs in medians.items():
        print(f"    {side:8}", *(f"{name} {statistics.median(run[name] for run in runs):.3f}" for name in runs[0]))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="iterations that count, of each process")
    parser.add_argument("--model", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--case", nargs="*", default=list(ENDS), choices=list(ENDS))
    parser.add_argument("--kl", nargs="*", type=float, default=[0.0, 0.1], help="of the KL to a reference")
    parser.add_argument("--threads", nargs="*", type=int, default=[1])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--paged", action="store_true", help="TRL draws by transformers' continuous batching")
    parser.add_argument("--check", action="store_true", help="compare losses and gradients only")
    parser.add_argument("--profile", action="store_true", help="print where Python spends time, of sfumato only")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        side, given = arguments.inside
        print(json.dumps(inside(argparse.Namespace(**json.loads(given)), side)))
        return
    for model in arguments.model:
        for case in arguments.case:
            for kl in arguments.kl:
                for threads in arguments.threads:
                    changes = {"model": model, "case": case, "kl": [kl], "threads": threads}
                    label = f"{model}, {case}, KL {kl}, {threads} threads"
                    if arguments.check:
                        ours, theirs, worst = measure(arguments, "check", **changes, lr=1e-3)
                        print(f"{label}: loss {ours:.8f}, TRL {theirs:.8f}, gradients differ by {worst:.1e}")
                    elif arguments.profile:
                        measure(arguments, "sfumato", **changes)
                    else:
                        compare(arguments, label, **changes)


if __name__ == "__main__":
    main()
