"""Tokens per CPU second of language model training: sfumato, a plain PyTorch loop, HF Trainer and TRL's SFTTrainer.

    python benchmarks/text_throughput.py [--steps 12] [--repeats 3] [--only sfumato plain ...] [--before FOLDER]

The same model (a Qwen3, random weights), the same tokens, AdamW, fp32, one thread. ``full``: every document fills a row
of 512 tokens. ``mixed``: lengths are log-normal with a median of 100, cut at 512. Each measurement is a process of its
own, run with some steps and with three times as many; the rate is the difference in tokens over the difference in CPU
seconds, so starting up does not count. All candidates take turns, and what is printed is the median of the repeats.
Without TRL (pip install trl) its rows are left out.

Four rows count something else than tokens. ``tokenise``: bytes of text that become stored tokens, 300 rows a step of a
file, a BPE of 4096 tokens. ``small step``: steps of two short rows, with TensorBoard. ``bookkeeping``: the same steps
by the CPU seconds that counting and logging take.

``--before``: a folder with another version of sfumato (git archive), which takes turns with this one; the ratio is then
that of the two, the median of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
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
    "tokenise, plain text": ("tokenise", "plaintext"),
    "tokenise, conversations": ("tokenise", "conversation"),
    "small step": ("small", "step"),
    "bookkeeping of a small step": ("small", "bookkeeping"),
}

OWN = ("sfumato", "tokenise", "small")
"""Candidates that are sfumato."""


def texts(kind: str, count: int) -> list[str]:
    """Documents whose number of bytes is one less than their number of tokens, the last of which ends the text."""
    source = random.Random(0)
    results = []
    for _ in range(count):
        length = ROW if kind == "full" else min(max(int(source.lognormvariate(0, 0.8) * MEDIAN), 8), ROW)
        results.append("".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=length - 1)))
    return results


def encoded(kind: str, count: int) -> list[list[int]]:
    from sfumato.models.language.load import build_byte_tokenizer

    tokenizer = build_byte_tokenizer()
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts(kind, count)]


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
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
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

    from sfumato.models.language.load import build_byte_tokenizer

    rows = encoded(kind, steps * ROWS)
    data = Dataset.from_dict({"input_ids": rows})
    collator = DataCollatorForLanguageModeling(build_byte_tokenizer(), mlm=False)
    Trainer(build(), TrainingArguments(**_arguments(folder, steps)), collator, data).train()
    return sum(map(len, rows))


def run_trl(kind: str, steps: int, folder: Path, **packing: Any) -> int:
    """TRL's SFTTrainer; it counts the tokens that it trains on itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from sfumato.models.language.load import build_byte_tokenizer

    count = steps * ROWS * (1 if not packing else 5)
    data = Dataset.from_dict({"input_ids": encoded(kind, count)})
    config = SFTConfig(**_arguments(folder, steps), max_length=ROW, **packing)
    trainer = SFTTrainer(build(), config, train_dataset=data, processing_class=build_byte_tokenizer())
    trainer.train()
    return int(trainer._total_train_tokens)


def run_sfumato(kind: str, steps: int, folder: Path, data: dict[str, Any] | None = None, **train: Any) -> int:
    """The task itself, from text in a file; ``data`` and ``train`` change its sections."""
    import yaml

    from sfumato.config.load import load_config
    from sfumato.config.text import TrainTextConfig
    from tasks.train_text import main

    path = folder / "data.jsonl"
    count = steps * ROWS if kind == "full" else steps * ROWS * 6
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(kind, count)), encoding="utf-8")
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    config = {
        "model": {"config_path": str(folder / "model.yaml"), "tokenizer_path": "bytes"},
        "data": {"data_type": "plaintext", "train_path": str(path), "max_seq_len": ROW, **(data or {})},
        "train": {
            "output_dir": str(folder / "run"),
            "micro_batch_size": ROWS,
            "global_batch_size": ROWS,
            "max_steps": steps,
            "lr": 1e-3,
            "trackers": [],
            **train,
        },
    }
    main(load_config(TrainTextConfig, overrides=config))
    # without sfumato's reader, since the version of ``--before`` may have it elsewhere
    lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(int(json.loads(line)["tokens"]) for line in lines)


def run_tokenise(kind: str, steps: int, folder: Path) -> tuple[int, float]:
    """Stores the tokens of rows cut out of this project's pages. Returns the bytes of their texts, and CPU seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from sfumato.config.text_data import TextDataConfig
    from sfumato.data.files.sources import open_sources
    from sfumato.data.text.format import build_transform
    from sfumato.data.text.token_store import build_token_store

    source, text = random.Random(0), "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": specials, "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator([text], trainers.BpeTrainer(vocab_size=4096, **options))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=specials[0], pad_token=specials[0])
    num_pieces, longest = (1, 1000) if kind == "plaintext" else (4, 300)
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for _ in range(300 * steps):
        starts = [source.randrange(len(text) - longest) for _ in range(num_pieces)]
        pieces = [text[start : start + source.randint(100, longest)] for start in starts]
        num_bytes += sum(len(piece.encode()) for piece in pieces)
        turns = [{"role": ("user", "assistant")[index % 2], "content": piece} for index, piece in enumerate(pieces)]
        rows.append({"text": pieces[0]} if kind == "plaintext" else {"messages": turns})
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    template = {} if kind == "plaintext" else {"chat_template": "chatml", "overlong": "truncate"}
    config = TextDataConfig(data_type=kind, train_path=str(path), max_seq_len=512, **template)
    transform, sources = build_transform(config, tokenizer), open_sources(config)
    started = time.process_time()
    build_token_store(sources, transform, folder / "tokens", 1, len(rows), lambda _text: None)
    return num_bytes, time.process_time() - started


def run_small(kind: str, steps: int, folder: Path) -> int | tuple[int, float]:
    """Steps of two rows of 64 tokens with TensorBoard; of the bookkeeping only, with the seconds that it took."""
    from sfumato.tracking.run import Run

    spent = [0.0]

    def timed(name: str) -> None:
        inner = getattr(Run, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - started

        setattr(Run, name, call)

    for name in ("count", "log", "add_time"):
        timed(name)
    steps *= 10
    sizes = {"micro_batch_size": 2, "global_batch_size": 2, "max_steps": steps}
    run_sfumato("full", steps, folder, {"max_seq_len": 64}, trackers=["tensorboard"], **sizes)
    return (steps, spent[0]) if kind == "bookkeeping" else steps


RUNS: dict[str, Callable[..., Any]] = {
    "plain": run_plain,
    "trainer": run_trainer,
    "trl_padded": run_trl,
    "trl_bfd": lambda *args: run_trl(*args, packing=True, packing_strategy="bfd"),
    "trl_wrapped": lambda *args: run_trl(*args, packing=True, packing_strategy="wrapped"),
    "sfumato": run_sfumato,
    "tokenise": run_tokenise,
    "small": run_small,
}


def rate_of(name: str, kind: str, steps: int, tree: Path = ROOT) -> float:
    """Tokens a CPU second, or what else the candidate counts."""
    few, short = measure(name, kind, steps, tree)
    many, long = measure(name, kind, 3 * steps, tree)
    return (many - few) / (long - short)


def measure(name: str, kind: str, steps: int, tree: Path) -> tuple[int, float]:
    """Tokens and CPU seconds of a process of its own, with the sfumato of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--inside", name, kind, str(steps), folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tree), *sys.path[1:]])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{name}, {kind}:\n{done.stderr[-3000:]}")
        tokens, seconds = done.stdout.split()[-2:]
        return int(tokens), float(seconds)


def print_before(rates: dict[str, list[float]], before: dict[str, list[float]]) -> None:
    """Rates of both versions by label, and how much more the newer one has."""
    print(f"{'a CPU second':32}{'before':>12}{'after':>12}{'ratio':>8}   spread")
    for label, old in before.items():
        ratios = [after / earlier for after, earlier in zip(rates[label], old, strict=True)]
        medians = f"{statistics.median(old):12.0f}{statistics.median(rates[label]):12.0f}"
        print(f"{label:32}{medians}{statistics.median(ratios):8.2f}   {min(ratios):.2f} to {max(ratios):.2f}")
    print()


def main() -> None:
    choose_kernels()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of candidates' names")
    parser.add_argument("--before", type=Path, help="folder with another version of sfumato")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        import torch

        torch.set_num_threads(1)
        name, kind, steps, folder = arguments.inside
        result = RUNS[name](kind, int(steps), Path(folder))
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(*(result if isinstance(result, tuple) else (result, used.ru_utime + used.ru_stime)))
        return
    chosen = {
        label: run for label, run in CANDIDATES.items() if not arguments.only or any(x in label for x in arguments.only)
    }
    if importlib.util.find_spec("trl") is None and (missing := [x for x in chosen if x.startswith("TRL")]):
        print(f"left out, as TRL is not installed (pip install trl): {', '.join(missing)}", flush=True)
        chosen = {label: run for label, run in chosen.items() if label not in missing}
    rates: dict[str, list[float]] = {label: [] for label in chosen}
    before: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for label, (name, kind) in chosen.items():
            rates[label].append(rate_of(name, kind, arguments.steps))
            if arguments.before is not None and name in OWN:
                before.setdefault(label, []).append(rate_of(name, kind, arguments.steps, arguments.before.resolve()))
    if before:
        print_before(rates, before)
    medians = {label: statistics.median(rate) for label, rate in rates.items()}
    base = medians.get("plain loop, full", next(iter(medians.values())))
    print(f"{'':32}{'tokens / CPU s':>16}{'ratio':>8}   spread")
    for label, rate in medians.items():
        print(f"{label:32}{rate:16.0f}{rate / base:8.2f}   {min(rates[label]):.0f} to {max(rates[label]):.0f}")


if __name__ == "__main__":
    main()
