"""Tokens per CPU second of language model training: sfumato, a plain PyTorch loop, HF Trainer and TRL's SFTTrainer.

    python benchmarks/text_throughput.py [--steps 12] [--repeats 3] [--only sfumato plain ...]

The same model (a Qwen3, random weights), the same tokens, AdamW, fp32, one thread. ``full``: every document fills a row
of 512 tokens. ``mixed``: lengths are log-normal with a median of 100, cut at 512. Each measurement is a process of its
own, run with some steps and with three times as many; the rate is the difference in tokens over the difference in CPU
seconds, so starting up does not count. All candidates take turns, and what is printed is the median of the repeats.
TRL is optional: pip install trl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfumato.kernels import choose_kernels

ROOT = Path(__file__).resolve().parent.parent
ROW, ROWS, MEDIAN = 512, 8, 100

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": ROW,
    "tie_word_embeddings": True,
}

CANDIDATES = {
    "plain loop, full": ("plain", "full"),
    "plain loop, mixed, padded": ("plain", "mixed"),
    "HF Trainer, full": ("trainer", "full"),
    "HF Trainer, mixed, padded": ("trainer", "mixed"),
    "TRL, full": ("trl_padded", "full"),
    "TRL, mixed, padded": ("trl_padded", "mixed"),
    "TRL, mixed, packing bfd": ("trl_bfd", "mixed"),
    "TRL, mixed, packing wrapped": ("trl_wrapped", "mixed"),
    "sfumato, full": ("sfumato", "full"),
    "sfumato, mixed": ("sfumato", "mixed"),
}


def texts(kind: str, count: int) -> list[str]:
    """Documents whose number of bytes is one less than their number of tokens, the last of which ends the text."""
    source = random.Random(0)
    found = []
    for _ in range(count):
        length = ROW if kind == "full" else min(max(int(source.lognormvariate(0, 0.8) * MEDIAN), 8), ROW)
        found.append("".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=length - 1)))
    return found


def encoded(kind: str, count: int) -> list[list[int]]:
    from sfumato.models.language_load import build_byte_tokenizer

    tokenizer = build_byte_tokenizer()
    return [[*tokenizer(each)["input_ids"], tokenizer.eos_token_id] for each in texts(kind, count)]


def build() -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(Qwen3Config(**fields), dtype=torch.float32)


def run_plain(kind: str, steps: int, folder: Path) -> int:
    """What a person writes first: padded rows, the model's own loss, clipping, AdamW. Returns the real tokens."""
    import torch

    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    rows = encoded(kind, steps * ROWS)
    tokens = 0
    for step in range(steps):
        batch = rows[step * ROWS : (step + 1) * ROWS]
        longest = max(map(len, batch))
        ids = torch.tensor([each + [0] * (longest - len(each)) for each in batch])
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in batch])
        labels = ids.masked_fill(mask == 0, -100)
        model(input_ids=ids, attention_mask=None if mask.all() else mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int(mask.sum())
    return tokens


def _arguments(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "logging_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": False,
    }


def run_trainer(kind: str, steps: int, folder: Path) -> int:
    """HF Trainer with its language modelling collator."""
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    from sfumato.models.language_load import build_byte_tokenizer

    rows = encoded(kind, steps * ROWS)
    data = Dataset.from_dict({"input_ids": rows})
    collator = DataCollatorForLanguageModeling(build_byte_tokenizer(), mlm=False)
    Trainer(build(), TrainingArguments(**_arguments(folder, steps)), collator, data).train()
    return sum(map(len, rows))


def run_trl(kind: str, steps: int, folder: Path, **packing: Any) -> int:
    """TRL's SFTTrainer; it counts the tokens that it trains on itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from sfumato.models.language_load import build_byte_tokenizer

    count = steps * ROWS * (1 if not packing else 5)
    data = Dataset.from_dict({"input_ids": encoded(kind, count)})
    config = SFTConfig(**_arguments(folder, steps), max_length=ROW, **packing)
    trainer = SFTTrainer(build(), config, train_dataset=data, processing_class=build_byte_tokenizer())
    trainer.train()
    return int(trainer._total_train_tokens)


def run_sfumato(kind: str, steps: int, folder: Path) -> int:
    """The task itself, from text in a file."""
    import yaml

    sys.path.insert(0, str(ROOT))
    from sfumato.config.load import load_config
    from sfumato.config.text import TrainTextConfig
    from sfumato.tracking.trackers import read_jsonl
    from tasks.train_text import main

    path = folder / "data.jsonl"
    count = steps * ROWS if kind == "full" else steps * ROWS * 6
    path.write_text("\n".join(json.dumps({"text": each}) for each in texts(kind, count)), encoding="utf-8")
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    config = {
        "model": {"config_path": str(folder / "model.yaml"), "tokenizer_path": "bytes"},
        "data": {"data_type": "plaintext", "train_path": str(path), "max_seq_len": ROW},
        "train": {
            "output_dir": str(folder / "run"),
            "micro_batch_size": ROWS,
            "global_batch_size": ROWS,
            "max_steps": steps,
            "lr": 1e-3,
            "trackers": [],
        },
    }
    main(load_config(TrainTextConfig, overrides=config))
    return sum(int(each["tokens"]) for each in read_jsonl(folder / "run/metrics.jsonl"))


RUNS: dict[str, Callable[..., int]] = {
    "plain": run_plain,
    "trainer": run_trainer,
    "trl_padded": run_trl,
    "trl_bfd": lambda *given: run_trl(*given, packing=True, packing_strategy="bfd"),
    "trl_wrapped": lambda *given: run_trl(*given, packing=True, packing_strategy="wrapped"),
    "sfumato": run_sfumato,
}


def measure(name: str, kind: str, steps: int) -> tuple[int, float]:
    """Tokens and CPU seconds of a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--inside", name, kind, str(steps), folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{name}, {kind}:\n{done.stderr[-3000:]}")
        tokens, seconds = done.stdout.split()[-2:]
        return int(tokens), float(seconds)


def main() -> None:
    choose_kernels()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of candidates' names")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        import torch

        torch.set_num_threads(1)
        name, kind, steps, folder = arguments.inside
        tokens = RUNS[name](kind, int(steps), Path(folder))
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(tokens, used.ru_utime + used.ru_stime)
        return
    chosen = {
        label: run for label, run in CANDIDATES.items() if not arguments.only or any(x in label for x in arguments.only)
    }
    rates: dict[str, list[float]] = {label: [] for label in chosen}
    for _ in range(arguments.repeats):
        for label, (name, kind) in chosen.items():
            few, short = measure(name, kind, arguments.steps)
            many, long = measure(name, kind, 3 * arguments.steps)
            rates[label].append((many - few) / (long - short))
    medians = {label: statistics.median(each) for label, each in rates.items()}
    base = medians.get("plain loop, full", next(iter(medians.values())))
    print(f"{'':32}{'tokens / CPU s':>16}{'ratio':>8}   spread")
    for label, rate in medians.items():
        print(f"{label:32}{rate:16.0f}{rate / base:8.2f}   {min(rates[label]):.0f} to {max(rates[label]):.0f}")


if __name__ == "__main__":
    main()
