"""Fields of a model's configuration that change its loss in training: followed, or refused by the run and by check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from sfumato.commands.check_config import check_config
from sfumato.errors import ConfigError
from sfumato.models.language.source_folder import LOSS_TERMS, refuse_loss_terms
from tests.survey.test_tiny_configs import NAMES
from tests.survey.tiny_configs import tiny_config
from tests.tiny import run_task_here, tiny_language_description, tiny_text_config, write_config

BAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
BAMBA |= {"mamba_n_groups": 1, "attn_layer_indices": [1], "z_loss_coefficient": 0.5}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "attn_pdrop 0.1"),
        ("opt", {"layerdrop": 0.1, "dropout": 0.0}, "layerdrop 0.1"),
        ("mixtral", MIXTRAL, "jitter"),
        ("bamba", BAMBA, "z_loss_coefficient 0.5 adds a term to the loss"),
    ],
)
def test_what_is_not_followed_is_refused_by_the_run_and_by_check(
    tmp_path: Path, kind: str, fields: dict[str, Any], said: str
) -> None:
    from transformers import CONFIG_MAPPING

    base = tiny_language_description("llama") | {"model_type": kind}
    fields_of_kind = {**CONFIG_MAPPING[kind]().to_dict(), "model_type": kind}
    description = {name: value for name, value in base.items() if name in fields_of_kind} | fields
    config = tiny_text_config(tmp_path, train={"max_steps": 1})
    config["model"]["config_path"] = str(write_config(description, tmp_path / "model.yaml"))
    result = check_config(write_config(config, tmp_path / "config.yaml"), with_data=False)
    assert any(said in problem for problem in result.problems)
    with pytest.raises(ConfigError, match=said):
        run_task_here("train_text", config)


UNSHIFTED = {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"}
UNSHIFTED |= {"trocr", "whisper", "xlnet"}
"""Whose labels are those of the same place in transformers."""
OTHERS = {"prophetnet", "xlm", "cpmant", "git", "reformer"}
"""Whose own loss is of several tokens ahead, of masked tokens, or of tokens beside those that are given."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_every_family_is_the_cross_entropy_or_refused(name: str) -> None:
    config = tiny_config(name)
    text = config.get_text_config()
    for field in LOSS_TERMS:
        if hasattr(text, field):
            setattr(text, field, 0.5)
            with pytest.raises(ConfigError, match=field):
                refuse_loss_terms(config, "config.json")
            return
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if name in OTHERS:
        return
    ids = torch.randint(3, 50, (1, 16))
    output = module(input_ids=ids, labels=ids, use_cache=False)
    logits = output.logits[0].detach().float()
    expected = cross_entropy(logits, ids[0]) if name in UNSHIFTED else cross_entropy(logits[:-1], ids[0, 1:])
    assert float(output.loss.detach()) == pytest.approx(float(expected), abs=1e-4)
