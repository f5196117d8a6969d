"""Bytes and peak memory of what handles a whole model, on several ranks of this machine (gloo, CPU).

    python -m benchmarks.memory_at_size
    python -m benchmarks.memory_at_size --ranks 2 4 --parameters 200e6

For each number of ranks, a model under fsdp2: gathering it for the embedded engine (first, and after an update),
starting from scratch (in sequence on rank 0, and in parts on every rank), and the export; each in processes of its own,
tensor by tensor, and once as it was done before: everything gathered, as pickles where several ranks need it. Then rows
of text that are tokenised by every rank, or once.

Columns: bytes that a rank receives from others in collectives (those of gloo's float and byte tensors, as torch counts
their outputs); most bytes beyond those before on rank 0 and on the largest other rank (resident memory, sampled every
millisecond); seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

MEASURES = (
    "gather: whole, pickled",
    "gather: one by one",
    "gather: after an update",
    "scratch: in sequence",
    "scratch: in parts",
    "export: whole",
    "export: one by one",
    "text: every rank",
    "text: once",
)

ROWS = 2048
"""Rows of the text that is tokenised, of about 1,000 characters."""


def describe(num_parameters: float) -> dict[str, Any]:
    """A Qwen3 of about so many parameters."""
    hidden = 256
    layers = max(int((num_parameters - 2 * 8192 * hidden) / (4 * hidden**2 + 3 * hidden * 4 * hidden)), 1)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    return {"vocab_size": 8192, "num_attention_heads": 4, "num_key_value_heads": 4, **sizes}


def measure(name: str, num_parameters: float) -> dict[str, float]:
    """Measures on this rank, within the process group that the environment describes."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from sfumato.config.sections import TrainConfig
    from sfumato.parallel import random_weights
    from sfumato.parallel.mesh import build_mesh, close_mesh
    from sfumato.parallel.parallelize import parallelize
    from sfumato.parallel.plan import language_plan
    from sfumato.parallel.random_weights import initialise_on_meta
    from sfumato.parallel.weights import build_on_meta

    train = TrainConfig(output_dir=tempfile.mkdtemp(), device="cpu", mixed_precision="bf16")
    mesh = build_mesh(train)
    build = partial(
        AutoModelForCausalLM.from_config, Qwen3Config(**describe(num_parameters)), attn_implementation="sdpa"
    )
    if name.startswith("text"):
        run = partial(read_text, name == "text: once", mesh)
    else:
        on_meta = build_on_meta(build)
        module = parallelize(on_meta, mesh, train, language_plan(on_meta), torch.bfloat16)
        if name.startswith("scratch"):
            random_weights.LARGEST_IN_SEQUENCE = 2**60 if name == "scratch: in sequence" else 0
            run = partial(initialise_on_meta, module, build, mesh, 0)
        else:
            random_weights.LARGEST_IN_SEQUENCE = 0
            initialise_on_meta(module, build, mesh, 0)
            run = partial(gather if name.startswith("gather") else export, name, module, build, mesh)
            if name == "gather: after an update":
                run = partial(run, copies=gather(name, module, build, mesh))
    mesh.barrier()
    with counted() as counts:
        held = run()
    del held
    close_mesh()
    return counts


def gather(name: str, module: Any, build: Callable[[], Any], mesh: Any, copies: Any = None) -> Any:
    """The copy of the model that the embedded engine draws by, before and now."""
    import torch

    from sfumato.models.language.hf_config import give_weights
    from sfumato.parallel.weights import build_on_meta, each_whole_weight, whole_weights

    if name == "gather: whole, pickled":
        gathered = mesh.first(whole_weights(module, mesh, share=True), among="world")
        copy = build_on_meta(build)
        give_weights(copy, gathered)
        return copy
    if copies is None:
        copies = build_on_meta(build)
        give_weights(copies, dict(each_whole_weight(module, mesh, torch.bfloat16)))
        return copies
    places = copies.state_dict()
    for weight, tensor in each_whole_weight(module, mesh, torch.bfloat16, with_frozen=False):
        places[weight].copy_(tensor)
    return copies


def export(name: str, module: Any, build: Callable[[], Any], mesh: Any) -> None:
    """Writes the model as transformers loads it, before and now."""
    import torch

    from sfumato.models.language.hf_config import give_weights
    from sfumato.models.language.streamed_export import TransformersExport, lay_out, set_dtypes
    from sfumato.parallel.weights import build_on_meta, weights_on_first, whole_weights

    plain = build_on_meta(build)
    with tempfile.TemporaryDirectory() as folder:
        if name == "export: whole":
            gathered = whole_weights(module, mesh, share=True)
            for weight in gathered:
                gathered[weight] = gathered[weight].bfloat16()
            if mesh.is_first:
                give_weights(plain, gathered)
                plain.save_pretrained(folder)
            return
        set_dtypes(plain, torch.bfloat16, ())
        layout = lay_out(plain)
        assert layout is not None
        exported = TransformersExport(
            plain, layout, torch.bfloat16, frozenset(), lambda _: None, lambda _folder, _rest: None
        )
        arriving = weights_on_first(module, mesh, dtype_of=exported.dtype_of)
        if mesh.is_first:
            exported.write(Path(folder), arriving)
        else:
            for _ in arriving:
                pass


def read_text(once: bool, mesh: Any) -> None:
    """Streams rows of text, of which every rank makes all samples, or its share."""
    from sfumato.config.text_data import TextDataConfig
    from sfumato.data.background import Calls
    from sfumato.data.files.bad_rows import BadRows
    from sfumato.data.files.sources import Sources
    from sfumato.data.text.format import build_transform
    from sfumato.data.text.row_samples import SharedWork
    from sfumato.data.text.token_source import TextStream
    from sfumato.models.language.load import build_byte_tokenizer

    class Rows(list):
        def describe(self, index: int) -> str:
            return f"row {index}"

        def fingerprint(self) -> str:
            return "rows"

    rows = Rows({"text": f"{index} some words of a row, "[:25] * 40} for index in range(ROWS))
    data = TextDataConfig(train_path="made", max_seq_len=2048, data_type="plaintext", datasets_type="iterable")
    transform = build_transform(data, build_byte_tokenizer())
    gathered = partial(mesh.gather, over="world")
    shared = SharedWork(mesh.rank, mesh.size, Calls(), gathered) if once and mesh.size > 1 else None
    stream = TextStream(Sources(["rows"], [rows], None), transform, 0, True, ROWS, BadRows(0, print), shared)
    samples = stream.read({"samples": 0, **stream.begin()})
    tokens = 0
    for _ in range(ROWS):
        tokens += next(samples).sample.num_tokens


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Inside, counts bytes received, the peak of resident memory beyond that before, CPU and wall seconds."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Received(TorchDispatchMode):
        """Counts the bytes that collectives write on this rank."""

        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func._schema.name
            if name.startswith("_c10d_functional::all_gather"):
                Received.total += result.nbytes
            elif name.startswith(("c10d::allgather_", "c10d::_allgather_base_", "c10d::broadcast_")):
                Received.total += sum(tensor.nbytes for tensor in _tensors(args[0]))
            return result

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    counts: dict[str, float] = {}
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still held would hide what is taken again
    before = most = resident()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started, cpu = time.perf_counter(), time.process_time()
    with Received(), torch.no_grad():
        yield counts
    counts |= {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    ended.set()
    watcher.join()
    counts |= {"received": Received.total, "peak": most - before}


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    else:
        yield value


def run_ranks(name: str, num_ranks: int, num_parameters: float) -> list[dict[str, float]]:
    """Measures in processes of its own; the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        port = str(20000 + os.getpid() % 20000)
        launched = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "--measure", name, "--parameters", str(num_parameters)]
        processes = [
            subprocess.Popen(
                [*command, "--into", f"{folder}/{rank}.json"],
                env={**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(num_ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{name} on {num_ranks} ranks ended with {codes}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--parameters", type=float, default=20e6)
    parser.add_argument("--measures", nargs="+", default=list(MEASURES), choices=MEASURES)
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        Path(options.into).write_text(json.dumps(measure(options.measure, options.parameters)))
        return
    size = f"{options.parameters / 1e6:.0f} M parameters, {4 * options.parameters / 2**20:.0f} MiB in float32"
    print(f"{size}; {platform.machine()}, {os.cpu_count()} cores")
    print("| what | ranks | received, MiB a rank | peak on rank 0, MiB | on others | CPU s of all ranks | s |")
    print("|---|---|---|---|---|---|---|")
    for name in options.measures:
        for num_ranks in options.ranks:
            counts = run_ranks(name, num_ranks, options.parameters)
            received = max(rank["received"] for rank in counts) / 2**20
            others = max(rank["peak"] for rank in counts[1:]) / 2**20
            seconds, cpu = max(rank["seconds"] for rank in counts), sum(rank["cpu"] for rank in counts)
            cells = (f"{received:,.0f}", f"{counts[0]['peak'] / 2**20:,.0f}", f"{others:,.0f}", f"{cpu:.1f}")
            print(f"| {name} | {num_ranks} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
