"""Brings published reward models into the form that is loaded here: safetensors, under transformers' names.

Nothing is executed from the files: pickled weights are read with ``weights_only``, Python sources are parsed.

    python -m sfumato.rewards.convert weights pytorch_model.bin model.safetensors
    python -m sfumato.rewards.convert weights pytorch_model.bin.index.json model.safetensors
    python -m sfumato.rewards.convert open_clip HPS_v2.1_compressed.pt FOLDER/model.safetensors
    python -m sfumato.rewards.convert instruction data_collator_qwen.py FOLDER/instruction.txt
    python -m sfumato.rewards.convert instruction prompt_template.py FOLDER/instruction.txt
    python -m sfumato.rewards.convert edit_following EditReward/dataset/prompts.py FOLDER/following.txt
    python -m sfumato.rewards.convert edit_quality EditReward/dataset/prompts.py FOLDER/quality.txt
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.config.characters import printable
from sfumato.config.file_checks import read_json_object
from sfumato.config.writing import write_atomically
from sfumato.errors import DataError, UserError

if TYPE_CHECKING:
    import torch

EDIT_INSTRUCTIONS = {"edit_following": "INSTRUCTION_EDIT_FOLLOWING", "edit_quality": "INSTRUCTION_EDIT_QUALITY"}
EDIT_QUESTION = ("data_collator_qwen_edit.py", "prompt_with_special_token")
"""Where the end of EditReward's instructions lies, beside its file of instructions."""

WRAPPERS = ("state_dict", "model")

INSTRUCTIONS = (("INSTRUCTION", "prompt_with_special_token"), ("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",))
"""Names of the texts that make an instruction: HPSv3's, VideoReward's."""

OPEN_CLIP_NAMES = (
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),  # spelt so in transformers
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a ``torch.save`` file, or of all files of an index. Nothing in them is executed.

    Raises:
        DataError: the file is damaged, or holds something else than tensors by name.
    """
    import torch

    if path.name.endswith(".index.json"):
        try:
            names = sorted({str(name) for name in read_json_object(path)["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not an index of weights: {error!r}") from error
        return {key: tensor for name in names for key, tensor in read_pickled(path.parent / Path(name).name).items()}
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle that is made up raises whatever it comes upon
        raise DataError(f"{path} is damaged, or holds more than weights, which is not executed") from error
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise DataError(f"{path} holds no mapping of names to tensors")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def open_clip_to_transformers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of an open_clip model (a vision transformer with its text transformer) for transformers' CLIPModel."""
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == "attn_mask":  # a constant that older files hold
            continue
        renamed = name
        for pattern, replacement in OPEN_CLIP_NAMES:
            renamed = re.sub(pattern, replacement, renamed)
        # open_clip keeps the projections of queries, keys and values in one matrix, transformers in three
        stacked = re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", renamed)
        if stacked:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                converted[f"{stacked[1]}.self_attn.{part}_proj.{stacked[2]}"] = piece
        else:
            # open_clip keeps its projections as [in, out], linear layers of torch as [out, in]
            converted[renamed] = tensor.T if name in ("visual.proj", "text_projection") else tensor
    return converted


def read_instruction(path: Path) -> str:
    """The instruction of a model out of its source, which is not run, with ``{text_prompt}`` for the prompt.

    Args:
        path: of HPSv3 ``hpsv3/dataset/data_collator_qwen.py``, of VideoReward ``prompt_template.py``.

    Raises:
        DataError: the file is no Python, or does not assign the texts.
    """
    texts = read_texts(path)
    for names in INSTRUCTIONS:
        if all(name in texts for name in names):
            return "".join(texts[name] for name in names)
    raise DataError(
        f"{path} assigns no text to {' or '.join(name for names in INSTRUCTIONS for name in names)}: give "
        "hpsv3/dataset/data_collator_qwen.py of HPSv3, or prompt_template.py of VideoAlign"
    )


def read_edit_instruction(path: Path, kind: str) -> str:
    """One of EditReward's two instructions, with ``{text_prompt}`` for the prompt.

    Args:
        path: ``EditReward/dataset/prompts.py``, beside which ``data_collator_qwen_edit.py`` lies.
        kind: ``edit_following`` or ``edit_quality``.

    Raises:
        DataError: a file is missing, no Python, or does not assign its text.
    """
    collator, question = EDIT_QUESTION
    texts = []
    for file, name in ((path, EDIT_INSTRUCTIONS[kind]), (path.parent / collator, question)):
        if not file.is_file():
            raise DataError(f"{file} is not a file: it lies beside prompts.py in EditReward/dataset")
        assigned = read_texts(file)
        if name not in assigned:
            raise DataError(f"{file} assigns no text to {name}: give EditReward/dataset/prompts.py")
        texts.append(assigned[name])
    try:
        return texts[0].format(text_prompt="{text_prompt}") + texts[1]
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"{path}: {EDIT_INSTRUCTIONS[kind]} has other fields than {{text_prompt}}: {error!r}"
        ) from error


def read_texts(path: Path) -> dict[str, str]:
    """The texts that a Python source assigns to names, without running it. Raises DataError."""
    try:
        parsed = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{path} is no Python source: {error}") from error
    texts: dict[str, str] = {}
    for node in parsed.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update({target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)})
    return texts


def convert(kind: str, source: Path, target: Path) -> None:
    """Converts one file. Raises DataError when the source is missing or holds something else, or the target exists."""
    if not source.is_file():
        raise DataError(f"{source} is not a file")
    if os.path.lexists(target):
        raise DataError(f"{target} exists already: move it away")
    if kind == "instruction":
        write_atomically(target, read_instruction(source).encode())
        return
    if kind in EDIT_INSTRUCTIONS:
        write_atomically(target, read_edit_instruction(source, kind).encode())
        return
    from safetensors.torch import save_file

    tensors = read_pickled(source)
    if kind == "open_clip":
        tensors = open_clip_to_transformers(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target, {"format": "pt"})


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sfumato.rewards.convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kind", choices=("weights", "open_clip", "instruction", *EDIT_INSTRUCTIONS))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    try:
        convert(options.kind, options.source, options.target)
    except UserError as error:
        print(printable(str(error)), file=sys.stderr)
        return error.exit_code
    print(f"wrote {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
