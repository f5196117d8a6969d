"""Training of a model that sees: tokens per CPU second beside a plain padded loop, and how even ranks' work is.

    python benchmarks/vision_throughput.py [--steps 6] [--repeats 3]
    python benchmarks/vision_throughput.py --balance
    python benchmarks/vision_throughput.py --media [--repeats 3]

The same Qwen3-VL with random weights, the same conversations, AdamW, fp32, one thread. Of five conversations two have
no image, two have one and one has two or three, of 32 to 160 pixels a side; the lengths of texts are log-normal with a
median of 60 tokens. ``plain``: eight conversations a step, transformers' processor with padding, the model's own loss
of the answers. ``sfumato``: tasks/train_text.py with rows of 1,024 tokens that are filled up with whole conversations.
Each measurement is a process of its own, run with some steps and with three times as many; the rate is the difference
in tokens of answers over the difference in CPU seconds. Both take turns; the ratio is the median of the repeats'.

``--balance``: the share of time that four ranks of data parallelism wait for the one with most work,
``1 - mean / max`` of their operations, over 40 steps of 64 of these conversations, shared out in their order, by
tokens, by the operations of their texts, and by all operations as the loader does it.

``--media``: what opening media takes, of 24 conversations with a JPEG file of 1,200 x 900 pixels, and of 4 with an .mp4
file of 160 frames of 640 x 360, of which 16 are taken, for the processor of a Qwen3-VL: seconds and CPU seconds by one
thread, by as many as there are CPUs (at most eight), and from ``data.cache_media``, in turns; ratios are medians of the
repeats'.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.kernels import choose_kernels

ROOT = Path(__file__).resolve().parent.parent
ROW, ROWS, MEDIAN, RANKS, GLOBAL_BATCH = 1024, 8, 60, 4, 64

MODEL = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
    "text_config": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 4 * ROW,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 256,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
LIMITS = {"min_pixels": 256, "max_pixels": 160 * 160}


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """Rows of ``image_conversation``."""
    from PIL import Image

    from sfumato.data.media.pictures import as_png

    source, noise = random.Random(0), np.random.default_rng(0)
    for _ in range(count):
        num_images = source.choice((0, 0, 1, 1, source.randint(2, 3)))
        content: list[dict[str, str]] = []
        for _ in range(num_images):
            size = source.randint(32, 160), source.randint(32, 160)
            image = Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8))
            url = f"data:image/png;base64,{base64.b64encode(as_png(image)).decode()}"
            content.append({"type": "image", "image": url})
        lengths = [min(max(int(source.lognormvariate(0, 0.8) * MEDIAN / 2), 4), 200) for _ in range(2)]
        question, answer = ("".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=length)) for length in lengths)
        content.append({"type": "text", "text": question})
        yield {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def config_of(folder: Path, steps: int) -> dict[str, Any]:
    """Of tasks/train_text.py, on somewhat more conversations than so many steps take."""
    path, model = folder / "rows.jsonl", folder / "model.yaml"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in conversations(max(steps * ROWS, GLOBAL_BATCH))))
    model.write_text(json.dumps(MODEL))
    return {
        "model": {"config_path": str(model), "tokenizer_path": "bytes"},
        "data": {
            "data_type": {"type": "image_conversation", **LIMITS},
            "train_path": str(path),
            "max_seq_len": ROW,
        },
        "train": {
            "output_dir": str(folder / "run"),
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "dyn_bsz": True,
            "max_steps": steps,
            "lr": 1e-3,
            "num_threads": 1,
            "trackers": [],
        },
    }


def run_sfumato(steps: int, folder: Path) -> int:
    """The task itself. Returns the tokens of its loss masks."""
    from sfumato.config.load import load_config
    from sfumato.config.text import TrainTextConfig
    from sfumato.tracking.json_lines import read_jsonl
    from tasks.train_text import main

    main(load_config(TrainTextConfig, overrides=config_of(folder, steps)))
    return sum(int(line["tokens"]) for line in read_jsonl(folder / "run/metrics.jsonl"))


def build(folder: Path, steps: int) -> tuple[Any, Any]:
    """The configuration of a run, and its model as the run has it."""
    from sfumato.config.load import load_config
    from sfumato.config.text import TrainTextConfig
    from sfumato.models.language.load import build_language_model

    config = load_config(TrainTextConfig, overrides=config_of(folder, steps))
    return config, build_language_model(config.model, config.train, data_type=config.data.data_type)


def run_plain(steps: int, folder: Path) -> int:
    """What a person writes first: padded conversations, the model's own loss of the answers, clipping, AdamW."""
    import torch

    from sfumato.data.media.pictures import read_image

    _, built = build(folder, 1)
    model, processor = built.plain.train(), built.vision.reader.processor
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    rows, tokens, answer_begin = list(conversations(steps * ROWS)), 0, "<|im_start|>assistant\n"
    render = built.tokenizer.apply_chat_template
    for step in range(steps):
        batch = [row["messages"] for row in rows[step * ROWS : (step + 1) * ROWS]]
        parts = [part for messages in batch for part in messages[0]["content"] if part["type"] == "image"]
        images = [read_image(base64.b64decode(part["image"].partition(",")[2]), "a row") for part in parts]
        texts = [render(messages, tokenize=False) for messages in batch]
        inputs = processor(text=texts, images=images or None, padding=True, return_tensors="pt")
        labels = torch.full_like(inputs["input_ids"], -100)
        for index, text in enumerate(texts):
            answer = text.partition(answer_begin)[2].removesuffix("\n")
            length, end = len(built.tokenizer(answer)["input_ids"]), int(inputs["attention_mask"][index].sum())
            stop = end - (len(built.tokenizer("\n")["input_ids"]) if text.endswith("\n") else 0)
            labels[index, stop - length : stop] = inputs["input_ids"][index, stop - length : stop]
        model(**inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int((labels != -100).sum())
    return tokens


RUNS = {"plain": run_plain, "sfumato": run_sfumato}


def measure(name: str, steps: int) -> tuple[int, float]:
    """Tokens and CPU seconds of a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--inside", name, str(steps), folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{name}:\n{done.stderr[-3000:]}")
        tokens, seconds = done.stdout.split()[-2:]
        return int(tokens), float(seconds)


def rate_of(name: str, steps: int) -> float:
    """Tokens a CPU second, without what starting up takes."""
    few, short = measure(name, steps)
    many, long = measure(name, 3 * steps)
    return (many - few) / (long - short)


def balance(num_steps: int) -> dict[str, float]:
    """Share of time lost to waiting for the rank with most work, by how samples are shared out."""
    from sfumato.data.files.row_table import FiledRow
    from sfumato.data.text.format import build_transform
    from sfumato.models.estimate.flops import FlopCount
    from sfumato.parallel.bin_packing import pack

    with tempfile.TemporaryDirectory() as folder:
        config, model = build(Path(folder), 1)
        flops = FlopCount(model.plain, model.vision)
        transform = build_transform(config.data, model.tokenizer, model.vision.reader)
    lost: dict[str, list[float]] = {}
    rows = conversations(num_steps * GLOBAL_BATCH)
    for _ in range(num_steps):
        samples = [transform(FiledRow(next(rows)), "a row")[0] for _ in range(GLOBAL_BATCH)]
        documents = [sample.documents[0] for sample in samples]
        lengths = [sample.num_tokens for sample in samples]
        shapes = [[] if document.images is None else [document.images.shapes] for document in documents]
        texts = [float(flops.count_document(length)) for length in lengths]
        work = [cost + sum(map(flops.sight.of_images, shape)) for cost, shape in zip(texts, shapes, strict=True)]
        ways = {
            "in their order": [[list(range(rank, GLOBAL_BATCH, RANKS))] for rank in range(RANKS)],
            "by tokens": pack(lengths, lengths, ROW, RANKS),
            "by operations of texts": pack(lengths, texts, ROW, RANKS),
            "by all operations": pack(lengths, work, ROW, RANKS),
        }
        for name, ranks in ways.items():
            # ranks wait for each other in each micro-batch: fsdp gathers weights there
            most = [max(sum(work[index] for index in part) for part in parts) for parts in zip(*ranks, strict=True)]
            lost.setdefault(name, []).append(1 - sum(work) / RANKS / sum(most))
    return {name: statistics.mean(value) for name, value in lost.items()}


def media_rows(folder: Path, kind: str, count: int) -> Path:
    """Conversations about a smooth picture each, or a video, in files that lie beside."""
    import cv2
    from PIL import Image

    noise, rows = np.random.default_rng(0), []
    for index in range(count):
        coarse = [Image.fromarray(noise.integers(0, 256, (12, 16, 3), np.uint8)) for _ in range(2)]
        name = f"{index}.jpg" if kind == "image" else f"{index}.mp4"
        if kind == "image":
            coarse[0].resize((1200, 900), Image.Resampling.BICUBIC).save(folder / name, quality=90)
        else:
            ends = [np.asarray(picture.resize((640, 360), Image.Resampling.BICUBIC), np.float32) for picture in coarse]
            writer = cv2.VideoWriter(str(folder / name), cv2.VideoWriter.fourcc(*"mp4v"), 20.0, (640, 360))
            for part in np.linspace(0, 1, 160):
                writer.write((ends[0] * (1 - part) + ends[1] * part).astype(np.uint8))
            writer.release()
        content = [{"type": kind, "path": name}, {"type": "text", "text": "What is it?"}]
        rows.append(
            {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "It is that."}]}
        )
    (folder / f"{kind}s.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / f"{kind}s.jsonl"


def media_config(folder: Path, kind: str, count: int, **data: Any) -> Any:
    """Of a run on these conversations."""
    from sfumato.config.load import load_config
    from sfumato.config.text import TrainTextConfig

    config = config_of(folder, 12)
    config["data"] |= {"train_path": str(media_rows(folder, kind, count)), "max_seq_len": 4 * ROW, **data}
    config["data"]["data_type"] = {"type": "media_conversation", "max_pixels": 512 * 512, "max_frames": 16}
    config["data"]["data_type"] |= {"video_max_pixels": 16 * 256 * 256}
    config["train"] |= {"dyn_bsz": False, "micro_batch_size": 4, "global_batch_size": 4}
    return load_config(TrainTextConfig, overrides=config)


def media(repeats: int) -> None:
    """Prints what opening media takes."""
    from sfumato.data.files.sources import open_sources
    from sfumato.data.media import threads as media_threads
    from sfumato.data.media.cache import build_media_cache
    from sfumato.data.text.format import build_transform
    from sfumato.data.text.token_store import build_token_store
    from sfumato.models.language.load import build_reader

    for kind, count in (("image", 24), ("video", 4)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = media_config(folder, kind, count)
            transform = build_transform(config.data, *build_reader(config.model, config.train, config.data.data_type))
            sources, said = open_sources(config.data), []
            store = build_token_store(sources, transform, folder / "cache", 1, 0, said.append)
            started = time.perf_counter()
            cache = build_media_cache(store, sources.rows, transform, folder / "cache", 1, said.append)
            made, size = time.perf_counter() - started, sum(path.stat().st_size for path in cache.folder.iterdir())
            samples, taken = [store.sample(index) for index in range(count)], {}
            for _ in range(repeats):
                ways = {"one thread": transform.reader.tensors, "threads": transform.reader.tensors}  # pyright: ignore[reportAttributeAccessIssue]
                for way, tensors in (ways | {"cache, one thread": cache.tensors}).items():
                    begun = time.perf_counter(), time.process_time()
                    if way == "threads":
                        for sample in media_threads.open_ahead(samples, tensors):
                            sample.documents[0].images.opened.result()
                    else:
                        for sample in samples:
                            tensors(sample.documents[0].images)
                    took = time.perf_counter() - begun[0], time.process_time() - begun[1]
                    taken.setdefault(way, []).append([1000 * seconds / count for seconds in took])
            print(f"{kind}s: cache of {size / count / 1e6:.1f} MB a conversation, made in {1000 * made / count:.0f} ms")
            for way, value in taken.items():
                wall, cpu = (statistics.median(values) for values in zip(*value, strict=True))
                ratio = [one[0] / measured[0] for one, measured in zip(taken["one thread"], value, strict=True)]
                print(f"  {way:18}{wall:8.1f} ms {cpu:8.1f} ms of CPU   ratio {statistics.median(ratio):.2f}")


def main() -> None:
    choose_kernels()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--balance", action="store_true", help="how even ranks' work is, instead")
    parser.add_argument("--media", action="store_true", help="what opening media takes, instead")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.media:
        return media(arguments.repeats)
    if arguments.balance:
        for name, lost in balance(40).items():
            print(f"{name:24}{lost:8.1%} of the time lost")
        return
    if arguments.inside:
        import torch

        torch.set_num_threads(1)
        name, steps, folder = arguments.inside
        tokens = RUNS[name](int(steps), Path(folder))
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(tokens, used.ru_utime + used.ru_stime)
        return
    rates = [{name: rate_of(name, arguments.steps) for name in RUNS} for _ in range(arguments.repeats)]
    for name in RUNS:
        results = [rate[name] for rate in rates]
        print(f"{name:10}{statistics.median(results):8.0f} tokens / CPU s   {min(results):.0f} to {max(results):.0f}")
    ratios = [rate["sfumato"] / rate["plain"] for rate in rates]
    print(f"ratio     {statistics.median(ratios):8.2f}                    {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
