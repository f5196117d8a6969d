"""What reads bytes of strangers, with real inputs for each."""

from __future__ import annotations

import asyncio
import bz2
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import lzma
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextDataConfig
from sfumato.errors import ConfigError, UserError
from tests.tiny import tiny_language_description, write_tiny_pipeline
from tests.tiny_vision import clip, image_row, picture, sound

CONTROL = set(map(chr, (*range(9), 11, 12, *range(14, 32), 127, *range(128, 160), 0x202E, 0x2066)))
"""What no page may hold as it is."""


@dataclass
class Reader:
    """Something that reads foreign bytes."""

    name: str
    seeds: list[bytes]
    """Real inputs."""
    read: Callable[[bytes, Path], Any]
    """Reads one input, with a folder that may be used for files."""
    errors: tuple[type[BaseException], ...] = (UserError,)
    """That it promises."""
    limit_s: float = 10.0
    """Processor time that an input may take."""


MAKERS: dict[str, Callable[[Path], Reader | list[Reader]]] = {}
"""By a name with which those of all that it makes begin."""


def maker(make: Callable[[Path], Reader | list[Reader]]) -> Callable[[Path], Reader | list[Reader]]:
    MAKERS[make.__name__.removeprefix("make_")] = make
    return make


def make_readers(folder: Path, names: list[str]) -> list[Reader]:
    """All readers, or those that are named, with real files that are made in a folder."""
    readers = []
    for name, make in MAKERS.items():
        place = folder / name
        place.mkdir()
        made = make(place)
        readers += made if isinstance(made, list) else [made]
    unknown = [name for name in names if name not in [reader.name for reader in readers]]
    if unknown:
        raise SystemExit(f"no reader is called {unknown[0]}; there are {', '.join(reader.name for reader in readers)}")
    return [reader for reader in readers if not names or reader.name in names]


def written(content: bytes, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read_all(*reads: Callable[[], Any], errors: type[BaseException] = UserError) -> None:
    """Reads in several ways, of which each may end in a promised error; the last such error is raised if all do."""
    failures = []
    for read in reads:
        try:
            read()
        except errors as error:
            failures.append(error)
    if len(failures) == len(reads):
        raise failures[-1]


# configurations and rows


@maker
def make_yaml(folder: Path) -> Reader:
    from sfumato.config.load import load_config, parse_overrides
    from sfumato.config.text import TrainTextConfig

    def read(content: bytes, place: Path) -> None:
        load_config(TrainTextConfig, written(content, place / "x.yaml"), parse_overrides([]))

    seeds = []
    for path in sorted(Path("configs").rglob("*.yaml")):
        with contextlib.suppress(UserError):  # of another task
            read(path.read_bytes(), folder)
            seeds.append(path.read_bytes())
    return Reader("yaml", seeds, read)


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": "Was ist 1+1?"}, {"role": "assistant", "content": "2"}], "id": index}
    for index in range(4)
]
TEXT_ROWS = [{"text": f"Größe {index}", "number": index, "more": {"a": ["y", None, "x"]}} for index in range(4)]


@maker
def make_rows(folder: Path) -> list[Reader]:
    import pyarrow
    import pyarrow.parquet

    from sfumato.data.files.rows import open_rows
    from sfumato.data.text.format import build_transform
    from sfumato.data.text.messages import read_messages
    from sfumato.models.language.load import build_byte_tokenizer

    lines = ["\n".join(map(json.dumps, rows)).encode() for rows in (CONVERSATIONS, TEXT_ROWS)]
    listed = [json.dumps(rows).encode() for rows in (CONVERSATIONS, TEXT_ROWS, {"data": TEXT_ROWS})]
    tables = [b'text,number\n"a ""b""",1\nc,2\n', b"messages\r\nx\r\n", b"text;b\n1;2\n"]
    parquet, arrow = [], []
    for rows in (CONVERSATIONS, TEXT_ROWS):
        table = pyarrow.Table.from_pylist(rows)
        for options in ({}, {"compression": "zstd"}, {"use_dictionary": False, "compression": "none"}):
            file = io.BytesIO()
            pyarrow.parquet.write_table(table, file, **options)
            parquet.append(file.getvalue())
        for make in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream):
            file = io.BytesIO()
            with make(file, table.schema) as writer:
                writer.write_table(table)
            arrow.append(file.getvalue())
    transform = build_transform(TextDataConfig(data_type="conversation", train_path="x"), build_byte_tokenizer())

    def read(ending: str, content: bytes, place: Path) -> None:
        for column, path in (("text", written(content, place / f"data{ending}")),):
            rows = open_rows(path, column, "data.train_path")
            failure = None
            for index in range(min(len(rows), 40)):
                try:
                    row = rows[index]
                    if "messages" in row:
                        read_messages(row["messages"], rows.describe(index))
                        transform(row, rows.describe(index))
                except UserError as error:
                    failure = error
            if failure is not None:
                raise failure

    kinds: dict[str, list[bytes]] = {
        ".jsonl": lines,
        ".json": listed,
        ".csv": tables,
        ".txt": [b"a\nb\r\nc", "ä\n".encode()],
        ".parquet": parquet,
        ".arrow": arrow,
        ".jsonl.gz": [gzip.compress(line) for line in lines],
        ".jsonl.bz2": [bz2.compress(line) for line in lines],
        ".jsonl.xz": [lzma.compress(line) for line in lines],
        ".tar": [_shard(), _shard(tarfile.GNU_FORMAT), _shard(tarfile.PAX_FORMAT, "ä" * 120)],
    }
    return [Reader(kind[1:], seeds, functools.partial(read, kind)) for kind, seeds in kinds.items()]


def _shard(form: int = tarfile.USTAR_FORMAT, name: str = "a") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as shard:
        for number in range(3):
            for ending, content in (("png", picture(8, 8, number)), ("txt", b"a cat"), ("json", b'{"a": 1}')):
                info = tarfile.TarInfo(f"{name}{number}.{ending}")
                info.size = len(content)
                shard.addfile(info, io.BytesIO(content))
    return file.getvalue()


@maker
def make_media_rows(folder: Path) -> Reader:
    from sfumato.data.files.file_columns import find_file, find_frames
    from sfumato.data.media.pictures import read_image
    from sfumato.data.text.messages import read_messages

    def read(content: bytes, place: Path) -> None:
        from sfumato.data.files.bad_rows import parse_json

        for line in content.split(b"\n"):
            row = parse_json(line, "row 1")
            if isinstance(row, dict) and "messages" in row:
                read_messages(row["messages"], "row 1")
            elif isinstance(row, dict):
                source = find_file(row, "image", place, "row 1")
                read_image(source, "row 1")
                find_frames(row, "image", place, "row 1")

    from tests.tiny_vision import data_url

    seeds = [json.dumps(image_row(index)).encode() for index in range(3)]
    seeds += [json.dumps({"image": value}).encode() for value in (data_url(picture(8, 8)), "a.png", {"bytes": "iVBO"})]
    return Reader("rows with files", seeds, read)


# pictures, sounds, videos


@maker
def make_pictures(folder: Path) -> list[Reader]:
    from PIL import Image, PngImagePlugin

    from sfumato.data.media.pictures import check_image, read_image, read_size
    from sfumato.data.media.videos import read_frames

    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8))
    text = PngImagePlugin.PngInfo()
    text.add_itxt("a", "b", zip=True)
    text.add_text("c", "d", zip=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = b"\0" * 128

    def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    two = {"save_all": True, "append_images": [noise.rotate(90, expand=False)]}
    kinds = {
        "png": [
            *(saved(noise.convert(mode), "PNG") for mode in ("RGB", "P", "LA", "RGBA", "1", "I;16", "L")),
            saved(noise, "PNG", pnginfo=text, exif=exif, icc_profile=profile),
            saved(noise, "PNG", **two),
        ],
        "jpeg": [
            saved(noise, "JPEG", exif=exif, icc_profile=profile),
            saved(noise.convert("CMYK"), "JPEG"),
            saved(noise.convert("L"), "JPEG", progressive=True),
        ],
        "webp": [
            saved(noise, "WEBP", exif=exif, icc_profile=profile),
            saved(noise, "WEBP", lossless=True),
            saved(noise, "WEBP", **two),
        ],
        "tiff": [
            *(saved(noise, "TIFF", compression=how) for how in (None, "tiff_lzw", "tiff_deflate", "jpeg", "packbits")),
            saved(noise, "TIFF", **two),
            saved(noise.convert("I;16"), "TIFF"),
            saved(noise, "TIFF", exif=exif, icc_profile=profile, compression="tiff_lzw"),
        ],
        "gif": [saved(noise, "GIF"), saved(noise, "GIF", **two)],
        "bmp": [saved(noise, "BMP"), saved(noise.convert("P"), "BMP"), saved(noise.convert("1"), "BMP")],
    }
    with contextlib.suppress(KeyError, OSError):  # not all builds of Pillow have it
        kinds["avif"] = [saved(noise, "AVIF")]

    def read(content: bytes, place: Path) -> None:
        read_all(
            lambda: check_image(content, "row 1"),
            lambda: read_size(content, "row 1"),
            lambda: read_frames(content, 1, "row 1"),
            lambda: read_image(content, "row 1"),
        )

    return [Reader(kind, seeds, read) for kind, seeds in kinds.items()]


@maker
def make_sounds(folder: Path) -> list[Reader]:
    from sfumato.data.media.sounds import check_sound, read_sound

    def read(content: bytes, place: Path) -> None:
        read_all(lambda: check_sound(content, "row 1"), lambda: read_sound(content, 16000, 30.0, "row 1"))

    readers = []
    for kind in ("WAV", "FLAC", "OGG", "MP3", "AIFF", "W64", "CAF"):
        seeds = [sound(0.1, kind=kind), sound(0.05, rate=44100, channels=2, kind=kind)]
        readers.append(Reader(kind.lower(), seeds, read))
    return readers


@maker
def make_videos(folder: Path) -> list[Reader]:
    import cv2

    from sfumato.data.media.videos import check_video, read_frames

    def read(content: bytes, place: Path) -> None:
        read_all(lambda: check_video(content, "row 1"), lambda: read_frames(content, 2, "row 1"))

    readers = [Reader("avi", [clip(16, 16, 4)], read)]
    for ending, code in ((".mp4", "mp4v"), (".mkv", "mp4v"), (".mov", "MJPG")):
        path = folder / f"a{ending}"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*code), 10, (64, 64))
        for shade in range(0, 60, 20):
            writer.write(np.full((64, 64, 3), shade, np.uint8))
        writer.release()
        if path.exists() and path.stat().st_size:
            readers.append(Reader(ending[1:], [path.read_bytes()], read))
    try:
        import av
    except ImportError:
        return readers
    for ending, codec in (
        ("mp4", "libx264"),
        ("webm", "libvpx-vp9"),
        ("mov", "mjpeg"),
        ("mkv", "libx265"),
        ("ts", "mpeg2video"),
        ("mpg", "mpeg1video"),
    ):
        path = folder / f"b.{ending}"
        try:
            with av.open(str(path), "w") as container:
                stream = container.add_stream(codec, rate=25)
                stream.width = stream.height = 64
                stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
                for shade in range(3):
                    frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 60 * shade, np.uint8), format="rgb24")
                    container.mux(stream.encode(frame))
                container.mux(stream.encode())
        except (av.FFmpegError, ValueError):
            continue
        readers.append(Reader(f"{ending} ({codec})", [path.read_bytes()], read))
    return readers


# folders of models


@maker
def make_models(folder: Path) -> list[Reader]:
    import torch
    from safetensors.torch import save, save_file

    from sfumato.models.language.load import build_tokenizer, read_model_config
    from sfumato.models.lora import refuse_adapter
    from sfumato.parallel.weight_files import open_weights
    from sfumato.rewards.convert import read_pickled
    from sfumato.rewards.networks.folder import iterate_tensors
    from tests.model_folders import build_tokenizer as build_published

    tensors = {"a.weight": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.ones(2, 2).char()}
    adapter = {f"base_model.model.q_proj.lora_{part}.weight": torch.ones(2, 4) for part in "AB"}
    weights = [save(tensors), save(tensors, {"format": "pt"}), save(adapter)]

    def read_weights(content: bytes, place: Path) -> None:
        written(content, place / "weights" / "model.safetensors")
        with open_weights(place / "weights") as sources:
            for source in sources.values():
                source.read(tuple(slice(0, size) for size in source.shape))
        dict(iterate_tensors(place / "weights", "model.safetensors"))

    def read_adapter(content: bytes, place: Path) -> None:
        written(content, place / "adapter" / "adapter_model.safetensors")
        with contextlib.suppress(ConfigError):  # of every adapter
            refuse_adapter(place / "adapter")

    index = [
        json.dumps({"metadata": {}, "weight_map": {"a.weight": "one.safetensors", "b": "two.safetensors"}}).encode(),
        json.dumps({"weight_map": {"a.weight": "model.safetensors.index.json"}}).encode(),
    ]

    def read_index(content: bytes, place: Path) -> None:
        for name in ("one", "two"):
            if not (place / "index" / f"{name}.safetensors").exists():
                (place / "index").mkdir(exist_ok=True)
                of_file = {key: value for key, value in tensors.items() if (key == "b") == (name == "two")}
                save_file(of_file, place / "index" / f"{name}.safetensors")
        written(content, place / "index" / "model.safetensors.index.json")
        from sfumato.config.paths import check_weights

        check_weights(place / "index")
        with open_weights(place / "index") as sources:
            for source in sources.values():
                source.read(tuple(slice(0, size) for size in source.shape))

    kinds = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
    described = [json.dumps(tiny_language_description(kind)).encode() for kind in kinds]

    def read_config(content: bytes, place: Path) -> None:
        written(content, place / "model" / "config.json")
        read_model_config(LanguageModelConfig(model_path=str(place / "model")))

    published = folder / "tokenizer"
    build_published("phi4_mini", "{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(published)
    one = (published / "tokenizer.json").read_bytes()
    said = (published / "tokenizer_config.json").read_bytes()

    def read_tokenizer(name: str, content: bytes, place: Path) -> None:
        shutil.copytree(published, place / "tokenizer", dirs_exist_ok=True)
        written(content, place / "tokenizer" / name)
        written(json.dumps(tiny_language_description("llama")).encode(), place / "tokenizer" / "config.json")
        tokenizer = build_tokenizer(
            LanguageModelConfig(model_path=str(place / "tokenizer"), tokenizer_path=str(place / "tokenizer"))
        )
        tokenizer.encode("Größe <|user|>")

    pickled = []
    for value in (tensors, {"state_dict": tensors}):
        file = io.BytesIO()
        torch.save(value, file)
        pickled.append(file.getvalue())

    def read_bin(content: bytes, place: Path) -> None:
        read_pickled(written(content, place / "pytorch_model.bin"))

    return [
        Reader("safetensors", weights, read_weights),
        Reader("adapter", weights[2:], read_adapter),
        Reader("index of weights", index, read_index),
        Reader("config.json", described, read_config),
        Reader("tokenizer.json", [one], functools.partial(read_tokenizer, "tokenizer.json")),
        Reader("tokenizer_config.json", [said], functools.partial(read_tokenizer, "tokenizer_config.json")),
        Reader("pytorch_model.bin", pickled, read_bin),
    ]


@maker
def make_pipelines(folder: Path) -> list[Reader]:
    from sfumato.config.sections import ModelConfig
    from sfumato.models.diffusion.load import build_diffusion_model, family_of

    whole = write_tiny_pipeline(folder / "pipeline")
    files = ("model_index.json", "scheduler/scheduler_config.json", "transformer/config.json", "vae/config.json")

    def read(name: str, content: bytes, place: Path) -> None:
        pipeline = place / "pipeline"
        if not pipeline.exists():
            shutil.copytree(whole, pipeline)
        for file in files:
            shutil.copyfile(whole / file, pipeline / file)
        written(content, pipeline / name)
        config = ModelConfig(model_path=str(pipeline), max_sequence_length=7)
        family_of(config)
        build_diffusion_model(config)

    return [
        Reader(f"pipeline {name}", [(whole / name).read_bytes()], functools.partial(read, name), limit_s=30.0)
        for name in files
    ]


@maker
def make_templates(folder: Path) -> Reader:
    from sfumato.data.text.chat import build_chat_template
    from sfumato.models.language.load import build_byte_tokenizer
    from tests.unit.test_template_limits import BOMBS, SAME

    seeds = [SAME.encode(), *(text.encode() for text in BOMBS.values() if len(text) < 5000)]
    try:
        from tests.model_folders import published_templates

        seeds += [path.read_bytes() for path in published_templates()]
    except BaseException:  # pytest's skip where they are not installed
        pass
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Größe?"},
        {"role": "assistant", "content": "2", "reasoning_content": "1+1"},
        {"role": "user", "content": "Sure?"},
    ]

    def read(content: bytes, place: Path) -> None:
        tokenizer = build_byte_tokenizer()
        tokenizer.chat_template = content.decode("utf-8", "replace")
        build_chat_template(None, tokenizer).render(messages, "a.jsonl, row 3")

    return Reader("chat template", seeds, read, limit_s=40.0)


# run folders and checkpoints


@maker
def make_checkpoints(folder: Path) -> list[Reader]:
    from sfumato.checkpoint import state as state_module
    from sfumato.checkpoint.parts import StoredCheckpoint
    from sfumato.tracking.atomic_folders import list_checkpoints, newest_intact
    from tests.unit.test_hostile_checkpoints import ALONE, Saving, fit_manifest, made

    saving = Saving(folder, made(), ALONE)
    saving.write()
    saving.finish(keep=1)
    whole = folder / "global_step_1"

    def read(name: str, content: bytes, place: Path) -> None:
        shutil.rmtree(place / "global_step_1", ignore_errors=True)
        shutil.copytree(whole, place / "global_step_1")
        written(content, place / "global_step_1" / name)
        if name == "manifest.json":
            newest_intact(list_checkpoints(place), lambda line: None)
        else:
            fit_manifest(place / "global_step_1")
            state_module.load_state(made(), StoredCheckpoint(place / "global_step_1"), ALONE)

    return [
        Reader(f"checkpoint {path.name}", [path.read_bytes()], functools.partial(read, path.name))
        for path in sorted(whole.iterdir())
    ]


SAMPLE_ROWS = [
    {"kind": "eval", "prompt": "p", "seed": 1, "sample_id": 1, "total": 0.5, "rewards": {"a": 0.5}, "text": "answer"},
    {"kind": "train", "prompt": "q", "seed": 2, "sample_id": 2, "total": 0.1, "file": "a.png", "damage": "cut"},
]
METRICS = [
    {"step": 1, "loss": 1.0, "reward/a": 0.5, "eval/reward": 0.25},
    {"step": 2, "loss": 0.5, "reward/a": 0.75, "warn/x": "y"},
]


@maker
def make_reports(folder: Path) -> list[Reader]:
    from sfumato.tracking.report import write_report
    from sfumato.tracking.samples import step_folder
    from sfumato.tracking.timeline import Event

    def lines(rows: list[dict[str, Any]]) -> bytes:
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    events = [Event("run", 0, "step", 1.0, 3.0, 1), Event("sampler", 0, "generate", 1.0, 2.0, 1)]
    files = {
        "samples.jsonl": lines(SAMPLE_ROWS),
        "metrics.jsonl": lines(METRICS),
        "timeline.jsonl": lines([dataclasses.asdict(event) for event in events]),
        "environment.json": json.dumps({"task": "train_dit", "git": "abc", "versions": {"torch": "2"}}).encode(),
        "config.yaml": b"train: {max_steps: 2, output_dir: x}\nreward: {rewards: [{type: a, weight: 0.5}]}\n",
        "log.txt": b"12:00 step 1/2 loss 1.0 eta 3 s\nwarning: x\n",
    }

    def read(name: str, content: bytes, place: Path) -> None:
        run = place / "run"
        for file, whole in files.items():
            target = step_folder(run, 1) / file if file == "samples.jsonl" else run / file
            written(content if file == name else whole, target)
        written(picture(8, 8), step_folder(run, 1) / "a.png")
        page = write_report(run).read_text(encoding="utf-8")
        assert "<script" not in page.lower()
        assert "javascript:" not in page.lower() or "href" not in page.lower()
        assert not CONTROL & set(page), CONTROL & set(page)

    return [Reader(f"report {name}", [seed], functools.partial(read, name)) for name, seed in files.items()]


@maker
def make_dumps(folder: Path) -> Reader:
    import torch
    from safetensors.torch import save

    from sfumato.rollout.debug.dumps import FORMAT, read_dump

    tensors = {
        "sample_ids": torch.arange(2),
        "group_ids": torch.zeros(2, dtype=torch.int64),
        "prompt_ids": torch.zeros(2, dtype=torch.int64),
        "is_first": torch.tensor([True, False]),
        "sample_versions": torch.zeros(2, dtype=torch.int64),
        "advantages": torch.ones(2),
        "failed": torch.zeros(2, dtype=torch.bool),
        "no_spread": torch.zeros(2, dtype=torch.bool),
        "left_out": torch.zeros(2, dtype=torch.bool),
        "rewards": torch.ones(2, dtype=torch.float64),
        "num_sequences": torch.ones(2, dtype=torch.int64),
        "lengths": torch.tensor([3, 2]),
        "finish_reasons": torch.zeros(2, dtype=torch.uint8),
        "token_ids": torch.arange(5, dtype=torch.int32),
        "drawn": torch.tensor([False, True, True, False, True]),
        "log_probs": torch.zeros(5),
        "versions": torch.zeros(5, dtype=torch.int32),
    }
    seed = save(tensors, {"format": FORMAT, "step": "1", "data_rank": "0", "temperature": "1.0"})

    def read(content: bytes, place: Path) -> None:
        _ = read_dump(written(content, place / "rollouts" / "step_000001.rank0.safetensors")).rank_batch

    return Reader("rollout dump", [seed], read)


@maker
def make_stores(folder: Path) -> list[Reader]:
    import torch

    from sfumato.data.files.row_store import KEY, RowStore, RowWriter
    from sfumato.data.media.cache import ENTRY, _read_index, unpack

    store = folder / "store"
    writer = RowWriter(RowStore(store, "latent cache"))
    writer.append([b"%016d" % number for number in range(3)], {"latents": torch.ones(3, 4, 2)})
    names = sorted(path.name for path in store.iterdir())

    def read(name: str, content: bytes, place: Path) -> None:
        shutil.copytree(store, place / "store", dirs_exist_ok=True)
        written(content, place / "store" / name)
        opened = RowStore(place / "store", "latent cache")
        for tensor in opened.tensors.values():
            tensor.float().sum()

    file = io.BytesIO()
    np.save(file, np.zeros(3, ENTRY))
    _ = KEY, unpack

    def read_index(content: bytes, place: Path) -> None:
        _read_index(written(content, place / "a.npy"))

    stores = [Reader(f"store {name}", [(store / name).read_bytes()], functools.partial(read, name)) for name in names]
    return [*stores, Reader("index of media", [file.getvalue()], read_index)]


# messages


@maker
def make_messages(folder: Path) -> list[Reader]:
    from sfumato.parallel.plain_values import from_bytes, to_bytes
    from sfumato.rewards.http import wire
    from sfumato.rewards.http.chat_completions import decode_reply
    from sfumato.serving.bounded_json import JSONLimitError, load_json
    from sfumato.serving.outgoing import BadAnswerError
    from tests.reward_servers import noise_samples

    samples = [wire.encode_sample(sample) for sample in noise_samples(3)]
    request = wire.encode_request("a", samples)
    answer = wire.encode_answer([0.5, float("nan"), 1.0], ["", "no", ""])
    tokens = [{"token": "1", "logprob": -0.1, "top_logprobs": [{"token": "1", "logprob": -0.1}]}]
    reply = {
        "choices": [{"message": {"content": "4"}, "logprobs": {"content": tokens}, "finish_reason": "stop"}],
        "model": "m",
    }
    values = [to_bytes(value) for value in ({"a": [1, 2.5, None, "x"], "b": (1, 2)}, np.ones((2, 3)), [True, b"x"])]
    return [
        Reader("reward request", [request], lambda content, _: wire.decode_request(content), (wire.WireError,)),
        Reader(
            "reward answer",
            [answer],
            lambda content, _: wire.decode_answer(content, 3),
            (wire.WireError, BadAnswerError),
        ),
        Reader(
            "judge's reply", [json.dumps(reply).encode()], lambda content, _: decode_reply(content), (BadAnswerError,)
        ),
        Reader(
            "json of strangers",
            [json.dumps(reply).encode()],
            lambda content, _: load_json(content, max_values=2**20),
            (JSONLimitError, ValueError),
        ),
        Reader("values between ranks", values, lambda content, _: from_bytes(content), (Exception, MemoryError)),
    ]


async def _ask(app: Any, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """Status and body of what an application answers."""
    status, pieces, sent = 0, [], False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.sleep(3600)
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        pieces.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
        "extensions": {},
        "state": {},
    }
    await app(scope, receive, send)
    return status, b"".join(pieces)


@maker
def make_endpoint(folder: Path) -> list[Reader]:
    from sfumato.config.text_rl_data import TextPromptDataConfig
    from sfumato.data.text.prompt_template import build_prompt_template
    from sfumato.models.language.load import build_byte_tokenizer
    from sfumato.rollout.agents.openai_endpoint import Endpoint
    from sfumato.rollout.agents.recorded_calls import Session
    from sfumato.rollout.engines.base import Sampling
    from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
    from tests.scripted_engine import ScriptedEngine

    tokenizer = build_byte_tokenizer()
    template = build_prompt_template(TextPromptDataConfig(synthetic={}, chat_template="hermes"), tokenizer)
    message = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    bodies = [
        {"model": "policy", "messages": [message], "max_tokens": 5, "stream": True, "stream_options": {}},
        {"model": "policy", "messages": [message], "tools": [tool], "logprobs": True, "n": 1, "stop": None},
        {"model": "policy", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"model": "policy", "prompt": "hi", "max_tokens": 5, "temperature": 1.0},
        {"model": "policy", "prompt": [5, 6, 7]},
    ]

    def read(content: bytes, place: Path) -> None:
        async def ask() -> None:
            engine = ScriptedEngine(tokenizer, ['<tool_call>{"name": "add"}</tool_call><|im_end|>', "two<|im_end|>"])
            session = Session(
                engine, SampleKeys(0, 0, 0), Sampling(stop_token_ids=(0, 2)), template, LengthLimits(600, 1200)
            )
            endpoint = Endpoint()
            headers = {
                "Host": "127.0.0.1",
                "Content-Type": "application/json",
                "Authorization": f"Bearer {session.api_key}",
            }
            with endpoint.serving(session):
                for path in ("/v1/chat/completions", "/v1/completions"):
                    status, answer = await _ask(endpoint.app(), path, headers, content)
                    assert status in (200, 400, 401, 403, 404, 405, 409, 413, 415, 422, 429), (status, answer[:300])
                    assert session.error is None, repr(session.error)

        asyncio.run(ask())

    return [Reader("endpoint", [json.dumps(body).encode() for body in bodies], read)]


@maker
def make_engine(folder: Path) -> Reader:
    from sfumato.rollout.engines.base import EngineError
    from sfumato.rollout.engines.served.vllm_calls import ServerCalls

    answer = {
        "choices": [
            {
                "token_ids": [5, 6],
                "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.1}]},
                "weight_versions": [{"version": 1, "start": 0, "end": 2}],
                "finish_reason": "stop",
            }
        ],
        "prompt_logprobs": [None, {"6": {"logprob": -0.25}}],
    }

    def read(content: bytes, place: Path) -> None:
        from sfumato.serving.bounded_json import load_json

        try:
            body = load_json(content, max_values=2**23)
        except ValueError as error:
            raise EngineError(str(error)) from error
        calls = ServerCalls.__new__(ServerCalls)
        calls.name = "the server"

        async def ask_async(*_: Any) -> Any:
            return body

        calls.http = SimpleNamespace(ask_async=ask_async, ask=lambda *_: body)
        read_all(
            lambda: asyncio.run(calls.generate([1], {}, None)),
            lambda: calls.score([5, 6], {}, None),
            errors=EngineError,
        )

    return Reader("engine answer", [json.dumps(answer).encode()], read, (EngineError,))


@maker
def make_answers(folder: Path) -> Reader:
    """Texts of models, as rewards and tools read them."""
    from sfumato.rewards.answers import choice_of, extract_answer, has_thought, last_boxed, same_text
    from sfumato.rewards.coding.tests import code_of
    from sfumato.rollout.agents.calculator import CalculationError, calculate
    from sfumato.rollout.agents.tool_calls import inline_call, read_calls, without_calls

    seeds = [
        b'<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and <answer>42</answer>',
        b"<think>so</think> The answer is \\boxed{\\frac{1}{2}} #### 1,000.5",
        b"```python\nprint(1)\n```\n(B) **C** 12*(3+4)/5-6",
        b"calculate((1+2)*3)=",
    ]

    def read(content: bytes, place: Path) -> None:
        text = content.decode("utf-8", "surrogateescape")
        read_calls(text)
        without_calls(text)
        inline_call(text)
        for how in ("boxed", "marker", "last_number", "tags", "all"):
            if result := extract_answer(text, how, "####"):
                same_text(result, "42")
        last_boxed(text)
        choice_of(text)
        code_of(text)
        for tagged in (True, False):
            has_thought(text, in_tags=tagged)
        with contextlib.suppress(CalculationError):
            calculate(text)

    return Reader("answers of models", seeds, read)


@maker
def make_test_rows(folder: Path) -> Reader:
    from sfumato.rewards.coding.tests import read_tests

    def read(content: bytes, place: Path) -> None:
        from sfumato.data.files.bad_rows import parse_json

        row = parse_json(content, "row 1")
        if isinstance(row, dict):
            read_tests(row, row.get("tests"), "row 1")

    rows = [
        {"tests": ["assert f(1) == 2"], "setup": "import math", "entry_point": "f"},
        {"tests": '{"inputs": ["1"], "outputs": ["2"]}'},
        {"tests": [{"input": "1", "output": "2"}]},
        {"tests": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"},
    ]
    return Reader("tests of code", [json.dumps(row).encode() for row in rows], read)
