"""Seconds per iteration of GRPO on a language model: tasks/rl_text.py against TRL's GRPOTrainer.

    python benchmarks/text_rl_throughput.py [--rounds 7] [--model small large] [--case fixed ragged] [--kl 0 0.1]
    python benchmarks/text_rl_throughput.py --check
    python benchmarks/text_rl_throughput.py --profile --model small --case fixed

Both sides load the same weights, draw groups of answers to the same prompts at temperature 1, score them by one
function, and take one step of AdamW on all answers in one pass: GRPO, clipped at 0.2, fp32. ``fixed``: no answer ends
before ``--tokens``, so that both sides draw and train equally many tokens, which is checked. ``ragged``: the end of the
text is made likely, so that answers end after about a fifth of it; the draws of both sides differ, their distribution
does not. Each side is a process that waits while the other computes: they take turns with iterations, of which the
first is left out, and a ratio is that of two neighbours, whole iterations with rewards and logs, in processor time and
in wall-clock time. TRL draws with ``generate``, with ``--paged`` with transformers' continuous batching. ``--apart``:
sfumato with ``train.share_prompts false``. ``--check``: loss and gradients of TRL's own function on the tokens that
sfumato drew, in the second iteration, where policy and reference differ. ``--profile``: which kinds of operations take
the time of an iteration's phases. TRL is optional: pip install trl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rollout_profile import KINDS, shares

from sfumato.rewards.base import Reward, Sample

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"small": (192, 4, 512), "large": (640, 8, 1920)}
"""Width, layers, width of the feed-forward part."""
ENDS = {"fixed": -100.0, "ragged": 3.0}
"""Logit of the end of the text, about; those of bytes are near 0. Of ``fixed`` no float32 draw comes to it."""
SIDES = ("sfumato", "trl")
MARK = "@@ "
PHASES = ("draw", "others", "update")
"""Answers are drawn; log-probs of other policies, and of the old one where they are computed; all else."""


def share(text: str) -> float:
    """The share of a text's characters that are ASCII."""
    return sum(letter.isascii() for letter in text) / max(len(text), 1)


@dataclass(frozen=True, kw_only=True)
class Ascii(Reward):
    """The share of an answer's characters that are ASCII."""

    type: ClassVar[str] = "ascii"

    def score(self, samples: list[Sample]) -> list[float]:
        return [share(sample.text or "") for sample in samples]


def prompts() -> list[str]:
    """256 prompts of 16 to 48 bytes."""
    source = random.Random(0)
    return ["".join(source.choices("abcdefgh ", k=source.randint(16, 48))) for _ in range(256)]


def write_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Saves a Qwen3 with random weights. Its first channel is nearly constant, so that it can bias the end's logit."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from sfumato.models.language.load import build_byte_tokenizer

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
        for layer in model.model.layers:  # which add nothing to it
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        hidden = model.model(input_ids=torch.randint(256, (8, 64))).last_hidden_state
        constant = float(hidden[..., 0].mean())
        for token in tokenizer.all_special_ids:
            end = token == tokenizer.eos_token_id
            model.lm_head.weight[token] = 0.0
            model.lm_head.weight[token, 0] = (ENDS[arguments.case] if end else ENDS["fixed"]) / constant
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
            "share_prompts": not arguments.apart,
            "trackers": [],
            "num_threads": arguments.threads,
        },
        "eval": {"every_steps": 1000, "num_prompts": 2, "max_new_tokens": 2},
    }


class Phases:
    """Processor and wall-clock seconds of an iteration by phase, in this process, which prints them and then waits for
    its turn."""

    def __init__(self, profiled: bool) -> None:
        self._profiled, self._since, self._spent = profiled, self._now(), dict[str, float]()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def _add(self, name: str, since: tuple[float, float]) -> None:
        for kind, before, now in zip(("cpu", "wall"), since, self._now(), strict=True):
            self._spent[f"{name}/{kind}"] = self._spent.get(f"{name}/{kind}", 0.0) + now - before

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Counts what calls of a function or method take to a phase."""
        inner: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            since, results = self._now(), []
            work = partial(inner, *args, **kwargs)
            if self._profiled:
                for kind, share in shares(lambda: results.append(work())).items():
                    taken = share * (time.process_time() - since[0])
                    self._spent[f"{phase}/{kind}"] = self._spent.get(f"{phase}/{kind}", 0.0) + taken
            else:
                results.append(work())
            self._add(phase, since)
            return results[0]

        setattr(owner, name, call)

    def end_iteration(self, tokens: float, trained: float) -> None:
        """Everything since the last turn is an iteration."""
        self._add("all", self._since)
        print(MARK + json.dumps(self._spent | {"tokens": tokens, "trained": trained}), flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for another iteration")
        self._since, self._spent = self._now(), {}


def run_sfumato(arguments: argparse.Namespace, folder: Path) -> None:
    """The task, iteration by iteration."""
    import tasks.rl_text as task
    from sfumato.config.load import load_config
    from sfumato.config.text_rl import TextRLConfig
    from sfumato.models.language.model import LanguageModel
    from sfumato.tracking.run import Run

    phases, log = Phases(arguments.profile), Run.log

    def logged(run: Run, step: int, metrics: dict[str, float], show: Any) -> None:
        log(run, step, metrics, show)
        phases.end_iteration(metrics.get("rollout/tokens", 0.0), metrics.get("rows", 0.0))

    Run.log = logged  # pyright: ignore[reportAttributeAccessIssue]
    phases.watch(task, "generate", "draw")
    phases.watch(LanguageModel, "token_log_probs", "others")
    if arguments.profile:
        phases.watch(LanguageModel, "forward_backward", "update")
    task.main(load_config(TextRLConfig, overrides=sfumato_config(arguments, folder, 1000)))


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


def run_trl(arguments: argparse.Namespace, folder: Path) -> None:
    """The trainer, iteration by iteration."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(arguments.threads)
    trainer, phases, tokens = build_trainer(arguments, folder, 1000), Phases(arguments.profile), [0.0]
    scored, log_probs = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = scored(*args, **kwargs)
        tokens[0] = float(result["completion_mask"].sum())
        return result

    trainer._generate_and_score_completions = counted
    phases.watch(trainer, "_generate", "draw")
    phases.watch(trainer, "_get_per_token_logps_and_entropies", "others")
    without_gradients = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        log_probs if torch.is_grad_enabled() else without_gradients
    )(*args, **kwargs)
    if arguments.profile:
        phases.watch(trainer, "compute_loss", "update")
        phases.watch(trainer.accelerator, "backward", "update")

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            phases.end_iteration(tokens[0], tokens[0])

    trainer.add_callback(Watch())
    trainer.train()


def check(arguments: argparse.Namespace, folder: Path) -> tuple[float, float, float]:
    """Loss of sfumato and of TRL on the same tokens, and the largest difference of gradients over the largest one."""
    import torch

    import tasks.rl_text as task
    from sfumato.config.load import load_config
    from sfumato.config.text_rl import TextRLConfig

    recorded: dict[str, Any] = {}
    update_policy, reduce_and_clip, policy_loss = task.update_policy, task.reduce_and_clip, task.policy_loss

    def watched(actor: Any, part: Any, advantages: Any, *args: Any) -> Any:
        weights = {name: parameter.detach().clone() for name, parameter in actor.model.plain.named_parameters()}
        recorded.update(part=part, advantages=advantages.values.clone(), weights=weights, loss=0.0)
        return update_policy(actor, part, advantages, *args)

    def loss_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = policy_loss(*args, **kwargs)
        recorded["loss"] += float(loss.detach())
        return loss

    def before(model: Any, *args: Any) -> float:
        recorded["gradients"] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        return reduce_and_clip(model, *args)

    task.update_policy, task.policy_loss, task.reduce_and_clip = watched, loss_of, before
    task.main(load_config(TextRLConfig, overrides=sfumato_config(arguments, folder, 2)))

    if not recorded["advantages"].any():
        raise SystemExit(
            "no group of the second iteration has answers of different rewards: there is nothing to compare"
        )
    trainer = build_trainer(arguments, folder, 2)
    model = trainer.model
    rollouts, _, ids, _ = recorded["part"]
    sequence_of = {
        request.sample_id: sequence
        for rollout in rollouts
        for request, (sequence,) in zip(rollout.requests, rollout.sequences, strict=True)
    }
    sequences = [(torch.from_numpy(sequence_of[number].token_ids).long(), sequence_of[number].drawn) for number in ids]
    prompts = [tokens[: len(tokens) - int(drawn.sum())] for tokens, drawn in sequences]
    drawn = [tokens[len(tokens) - int(drawn.sum()) :] for tokens, drawn in sequences]
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = {"advantages": recorded["advantages"][list(ids)].float()}
    for name, parts, side in (("prompt", prompts, "left"), ("completion", drawn, "right")):
        inputs[f"{name}_ids"] = pad(parts, batch_first=True, padding_side=side)
        ones = [torch.ones_like(part) for part in parts]
        inputs[f"{name}_mask"] = pad(ones, batch_first=True, padding_side=side)
    trainer.current_gradient_accumulation_steps = 1
    if arguments.kl[0]:  # the model still has the weights of the beginning
        whole = [torch.cat([inputs[f"prompt_{what}"], inputs[f"completion_{what}"]], 1) for what in ("ids", "mask")]
        with torch.no_grad():
            result = trainer._get_per_token_logps_and_entropies(model, *whole, inputs["completion_ids"].shape[1])
        inputs["ref_per_token_logps"] = result[0]
    model.load_state_dict(recorded["weights"], strict=False)
    model.train()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    pairs = [(parameter.grad, recorded["gradients"][name]) for name, parameter in model.named_parameters()]
    largest = max(float(ours.abs().max()) for _, ours in pairs)
    return recorded["loss"], float(loss.detach()), max(float((a - b).abs().max()) for a, b in pairs) / largest


def inside(arguments: argparse.Namespace, side: str) -> None:
    """A side, in this process."""
    folder = Path(arguments.folder) / side
    write_model(folder / "model", arguments)
    if side == "check":
        print(MARK + json.dumps(check(arguments, folder)), flush=True)
    else:
        {"sfumato": run_sfumato, "trl": run_trl}[side](arguments, folder)


class Side:
    """A side in a process of its own."""

    def __init__(self, arguments: argparse.Namespace, side: str, folder: str, changes: dict[str, Any]) -> None:
        self.side, self.errors = side, Path(folder) / f"{side}.log"
        environment = os.environ | {
            "OMP_NUM_THREADS": str(changes.get("threads", 1)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *sys.path]),
        }
        settings = json.dumps(vars(arguments) | changes | {"folder": folder})
        command = [sys.executable, __file__, "--inside", side, settings]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )

    def go_on(self) -> None:
        """It is this side's turn."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def report(self) -> Any:
        """Waits for the end of an iteration. Raises SystemExit when the side has failed, or draws in a slow way."""
        line = next((line for line in self.process.stdout if line.startswith(MARK)), None)
        errors = self.errors.read_text()
        if line is None or "drawing will be slow" in errors:
            raise SystemExit(f"{self.side} failed:\n{errors[-4000:]}")
        return json.loads(line.removeprefix(MARK))


def measure(arguments: argparse.Namespace, **changes: Any) -> dict[str, list[dict[str, float]]]:
    """Iterations of both sides, in turns."""
    case, actual = changes["case"], {side: [] for side in SIDES}
    expected = float(arguments.prompts * arguments.group * arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(arguments, side, folder, changes) for side in SIDES]
        try:
            for side in sides:
                side.report()  # of sfumato that is the evaluation before the first iteration
            for number in range(arguments.rounds + 1):
                for side in sides if number % 2 == 0 else sides[::-1]:
                    side.go_on()
                    line = side.report()
                    if case == "fixed" and (line["tokens"], line["trained"]) != (expected, expected):
                        raise SystemExit(f"{side.side} was to draw and train {expected} tokens: {line}")
                    if number > 0:
                        actual[side.side].append(line)
        finally:
            for side in sides:
                side.process.kill()
                side.process.wait()
    for line in [line for lines in actual.values() for line in lines]:
        for kind in ("cpu", "wall"):
            line[f"update/{kind}"] = line[f"all/{kind}"] - line[f"draw/{kind}"] - line.get(f"others/{kind}", 0.0)
    return actual


def compare(arguments: argparse.Namespace, label: str, **changes: Any) -> None:
    """Prints ratios of neighbouring iterations, sfumato over TRL; tokens and seconds of both."""
    result = measure(arguments, **changes)
    print(f"{label}: sfumato / TRL, median (smallest to largest) of {arguments.rounds} pairs of iterations")
    pairs = list(zip(result["sfumato"], result["trl"], strict=True))
    for kind in ("cpu", "wall"):
        shown = []
        for phase in (f"{name}/{kind}" for name in ("all", *PHASES)):
            if phase in pairs[0][1]:
                ratios = [ours.get(phase, 0.0) / theirs[phase] for ours, theirs in pairs]
                shown.append(f"{phase} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        whole = f"all/{kind}"
        ratios = [ours[whole] / ours["tokens"] * theirs["tokens"] / theirs[whole] for ours, theirs in pairs]
        print("   ", ", ".join(shown), f"whole per drawn token {statistics.median(ratios):.2f}", sep="  ")
    for side, lines in result.items():
        print(f"    {side:8}", *(f"{name} {statistics.median(line[name] for line in lines):.3f}" for name in lines[0]))
    sys.stdout.flush()


def show_profile(arguments: argparse.Namespace, label: str, **changes: Any) -> None:
    """Prints seconds of processor time by phase and kind of operation, means of each side's iterations."""
    for side, lines in measure(arguments, **changes).items():
        mean = {name: statistics.mean(line.get(name, 0.0) for line in lines) for name in lines[0]}
        print(f"{label}: {side}, {mean['all/cpu']:.3f} s, with the profiler's own")
        for phase in PHASES:
            kinds = {name: mean.get(f"{phase}/{name}", 0.0) for name in (*KINDS, "Python")}
            print(f"    {phase:8} {mean.get(f'{phase}/cpu', 0.0):.3f}:", *(f"{k} {v:.3f}" for k, v in kinds.items()))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="pairs of iterations")
    parser.add_argument("--model", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--case", nargs="*", default=list(ENDS), choices=list(ENDS))
    parser.add_argument("--kl", nargs="*", type=float, default=[0.0, 0.1], help="of the KL to a reference")
    parser.add_argument("--threads", nargs="*", type=int, default=[1])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--lr", type=float, default=1e-6, help="low, so that lengths stay as they are")
    parser.add_argument("--paged", action="store_true", help="TRL draws by transformers' continuous batching")
    parser.add_argument("--apart", action="store_true", help="sfumato computes the prompt again for each answer")
    parser.add_argument("--check", action="store_true", help="compare losses and gradients only")
    parser.add_argument("--profile", action="store_true", help="print what takes the time of each phase")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        side, settings = arguments.inside
        inside(argparse.Namespace(**json.loads(settings)), side)
        return
    for model in arguments.model:
        for case in arguments.case:
            for kl in arguments.kl:
                for threads in arguments.threads:
                    changes = {"model": model, "case": case, "kl": [kl], "threads": threads}
                    label = f"{model}, {case}, KL {kl}, {threads} threads"
                    if arguments.check:
                        with tempfile.TemporaryDirectory() as folder:
                            ours, theirs, worst = Side(arguments, "check", folder, {**changes, "lr": 1e-4}).report()
                        print(f"{label}: loss {ours:.8f}, TRL {theirs:.8f}, gradients differ by {worst:.1e}")
                    elif arguments.profile:
                        show_profile(arguments, label, **changes)
                    else:
                        compare(arguments, label, **changes)


if __name__ == "__main__":
    main()
