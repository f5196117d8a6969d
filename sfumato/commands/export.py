"""``sfumato export``: options. What it writes is in ``export_checkpoint``."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.options import add_trust
from sfumato.config.characters import printable
from sfumato.config.trust import code_of_configurations
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("export", help="write the trained weights of a run or checkpoint for other programs")
    parser.add_argument(
        "source",
        type=Path,
        help="run folder (its newest checkpoint), checkpoint, hf_ckpt, or a file of kohya's adapters",
    )
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--merge", action="store_true", help="add adapters to the weights they belong to")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="cast weights; else as they were trained")
    parser.add_argument("--lora", choices=("kohya",), help="write adapters also with kohya's names and alphas")
    parser.add_argument("--comfyui", action="store_true", help="also each transformer as one file for ComfyUI")
    parser.add_argument("--gguf", action="store_true", help="also one file for llama.cpp, by its converter")
    parser.add_argument("--llama-cpp", metavar="DIR", help="folder of llama.cpp; else LLAMA_CPP of the environment")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the folder; 0 when it is written."""
    from sfumato.commands.export_checkpoint import copy_export, export_checkpoint, is_export, run_of, source_model
    from sfumato.commands.export_formats import (
        change_dtype,
        find_converter,
        import_lora,
        read_kohya_class,
        read_transformer_classes,
        refuse_adapters,
        write_gguf,
        write_kohya,
        write_single_files,
    )
    from sfumato.models.lora import FILES as ADAPTER_FILES

    source: Path = options.source
    out: Path = options.out
    if source.is_file():
        if out.exists():
            raise ConfigError(f"{out} exists: name another folder")
        if options.merge or options.gguf or options.lora or options.comfyui:
            raise ConfigError(f"{source} is a file of adapters, which is only turned into diffusers' (and --dtype)")
        print(printable(f"{import_lora(source, out)}: adapters of {source}"))
    elif is_export(source):
        if options.merge:
            if not any((source / name).exists() for name in ADAPTER_FILES):
                raise ConfigError(f"--merge: {source} has no adapters; they are merged already, or there were none")
            run = run_of(source) if (run_of(source) / "config.yaml").exists() else "RUN"
            raise ConfigError(f"--merge needs the checkpoint: sfumato export {run} {out} --merge")
        if not (options.dtype or options.lora or options.gguf or options.comfyui):
            raise ConfigError(f"{source} is exported already: add --dtype, --lora, --comfyui or --gguf, or copy it")
    # before minutes are spent on the export
    pipeline_class = read_kohya_class(source_model(source)) if options.lora else ""
    if options.comfyui:
        exported = source if is_export(source) else run_of(source) / "hf_ckpt"
        refuse_adapters(exported, options.merge)
        is_pipeline = (exported / "model_index.json").is_file()
        read_transformer_classes(exported if is_pipeline else source_model(source))
    if options.gguf:
        find_converter(options.llama_cpp)
    if is_export(source):
        print(printable(copy_export(source, out)))
    elif not source.is_file():
        with code_of_configurations(options.trust_code):
            print(printable(export_checkpoint(source, out, options.merge)))
        from sfumato.tracking.model_card import write_card

        write_card(run_of(source), out)
        command = f"hf upload OWNER/NAME {shlex.quote(str(out))}"
        print(printable(f"{out / 'README.md'}: the model card. To share it: {command}"))
    if options.lora:
        for file in write_kohya(out, pipeline_class):
            print(printable(f"{file}: adapters with kohya's names"))
    if options.dtype:
        num_files = change_dtype(out, options.dtype)
        print(f"the weights are {options.dtype} ({num_files} file{'s' if num_files > 1 else ''})")
    if options.comfyui:
        for file in write_single_files(out):
            print(printable(f"{file}: for ComfyUI's models/diffusion_models"))
    from sfumato.checkpoint.export import let_others_read

    let_others_read(out)
    if options.gguf:
        print(printable(f"{write_gguf(out, options.dtype or 'bf16', options.llama_cpp)}: for llama.cpp"))
    return 0
