"""Conversion of published weights and texts: equal results, and nothing of the files is executed."""

import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sfumato.errors import DataError
from sfumato.rewards.convert import convert, main, open_clip_to_transformers, read_instruction

WIDTH, HEADS, EMBED, WORDS, LENGTH = 16, 2, 8, 10, 6


class Block(nn.Module):
    """A layer of open_clip's transformers, with the names of its weights."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, features, mask=None):
        inner = self.ln_1(features)
        features = features + self.attn(inner, inner, inner, attn_mask=mask, need_weights=False)[0]
        return features + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(features))))


def transformer():
    return nn.ModuleDict({"resblocks": nn.ModuleList([Block(), Block()])})


class OpenClip(nn.Module):
    """open_clip's CLIP with two vision and two text layers, written down from its description."""

    def __init__(self):
        super().__init__()
        self.visual = nn.Module()
        self.visual.class_embedding = nn.Parameter(torch.zeros(WIDTH))
        self.visual.positional_embedding = nn.Parameter(torch.zeros(5, WIDTH))
        self.visual.conv1 = nn.Conv2d(3, WIDTH, 8, 8, bias=False)
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.visual.transformer = transformer()
        self.visual.proj = nn.Parameter(torch.zeros(WIDTH, EMBED))
        self.token_embedding = nn.Embedding(WORDS, WIDTH)
        self.positional_embedding = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.transformer = transformer()
        self.ln_final = nn.LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(torch.zeros(WIDTH, EMBED))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def embed_image(self, pixels):
        visual = self.visual
        patches = visual.conv1(pixels).flatten(2).mT
        features = torch.cat([visual.class_embedding.expand(len(pixels), 1, -1), patches], dim=1)
        features = visual.ln_pre(features + visual.positional_embedding)
        for block in visual.transformer["resblocks"]:
            features = block(features)
        return visual.ln_post(features[:, 0]) @ visual.proj

    def embed_text(self, token_ids):
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        features = self.token_embedding(token_ids) + self.positional_embedding
        for block in self.transformer["resblocks"]:
            features = block(features, mask)
        return self.ln_final(features)[torch.arange(len(token_ids)), token_ids.argmax(-1)] @ self.text_projection


def transformers_clip():
    from transformers import CLIPConfig, CLIPModel

    shape = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "hidden_act": "gelu",
    }  # fmt: skip
    text = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "eos_token_id": WORDS - 1, "bos_token_id": 0}
    vision = {"image_size": 16, "patch_size": 8}
    return CLIPModel(
        CLIPConfig(text_config={**shape, **text}, vision_config={**shape, **vision}, projection_dim=EMBED)
    ).eval()


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"epoch": 3, "state_dict": state}])
def test_open_clip_weights_embed_the_same_in_transformers(tmp_path, wrap):
    original, target = OpenClip(), tmp_path / "model.safetensors"
    torch.save(
        wrap({f"module.{name}": weight for name, weight in original.state_dict().items()}), tmp_path / "model.pt"
    )
    convert("open_clip", tmp_path / "model.pt", target)
    converted = transformers_clip()
    converted.load_state_dict(load_file(target))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    token_ids = torch.tensor([[0, 3, 4, 9, 9, 9], [0, 5, 9, 9, 9, 9]])
    with torch.no_grad():
        torch.testing.assert_close(
            converted.get_image_features(pixels).pooler_output, original.embed_image(pixels), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            converted.get_text_features(token_ids).pooler_output, original.embed_text(token_ids), rtol=1e-5, atol=1e-5
        )


def test_the_mask_that_older_files_hold_is_left_out():
    tensors = OpenClip().state_dict()
    assert (
        open_clip_to_transformers({**tensors, "attn_mask": torch.ones(1)}).keys()
        == open_clip_to_transformers(tensors).keys()
    )


def test_pickled_weights_become_safetensors(tmp_path, capsys):
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": shared, "b": shared.T}, tmp_path / "model.bin")
    assert main(["weights", str(tmp_path / "model.bin"), str(tmp_path / "model.safetensors")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'model.safetensors'}\n"
    written = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(written, {"a": shared, "b": shared.T.contiguous()})
    assert main(["weights", str(tmp_path / "model.bin"), str(tmp_path / "model.safetensors")]) == 2
    assert "exists already" in capsys.readouterr().err


class Harmful:
    def __reduce__(self):
        return (open, ("harmed", "w"))


@pytest.mark.parametrize("content", [Harmful(), [1, 2], {"a": "text"}])
def test_what_is_no_weights_is_refused_and_not_executed(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with open("model.bin", "wb") as file:
        pickle.dump(content, file, protocol=2) if isinstance(content, Harmful) else torch.save(content, file)
    with pytest.raises(DataError, match=r"model\.bin"):
        convert("weights", tmp_path / "model.bin", tmp_path / "out.safetensors")
    assert not (tmp_path / "harmed").exists() and not (tmp_path / "out.safetensors").exists()


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.pt is not a file"):
        convert("open_clip", tmp_path / "nothing.pt", tmp_path / "out.safetensors")


def test_instructions_of_edits_are_put_together_of_two_sources(tmp_path):
    source = tmp_path / "prompts.py"
    source.write_text(
        'INSTRUCTION_EDIT_FOLLOWING = "Do {{it}}: {text_prompt}. "\nINSTRUCTION_EDIT_QUALITY = "{other}"\n'
    )
    with pytest.raises(DataError, match=r"data_collator_qwen_edit\.py is not a file"):
        convert("edit_following", source, tmp_path / "following.txt")
    (tmp_path / "data_collator_qwen_edit.py").write_text(
        'import nothing\nprompt_with_special_token = "Now: <|Reward|>"\n'
    )
    convert("edit_following", source, tmp_path / "following.txt")
    assert (tmp_path / "following.txt").read_text() == "Do {it}: {text_prompt}. Now: <|Reward|>"
    with pytest.raises(DataError, match="INSTRUCTION_EDIT_QUALITY has other fields"):
        convert("edit_quality", source, tmp_path / "quality.txt")
    source.write_text("")
    with pytest.raises(DataError, match="assigns no text to INSTRUCTION_EDIT_QUALITY"):
        convert("edit_quality", source, tmp_path / "quality.txt")


def test_instruction_is_read_from_the_source_without_running_it(tmp_path):
    source = tmp_path / "data_collator_qwen.py"
    source.write_text(
        "import missing_package\n"
        'INSTRUCTION = """\nRate it. \nPrompt - {text_prompt}\n"""\n'
        'prompt_with_special_token = """\nNow: <|Reward|>\n"""\n'
        "raise SystemExit\n"
    )
    convert("instruction", source, tmp_path / "instruction.txt")
    assert (tmp_path / "instruction.txt").read_bytes() == b"\nRate it. \nPrompt - {text_prompt}\n\nNow: <|Reward|>\n"
    source.write_text("DETAILED_PROMPT_WITH_SPECIAL_TOKEN = 'Now {text_prompt}: <|VQ_reward|>'\n")
    assert read_instruction(source) == "Now {text_prompt}: <|VQ_reward|>"
    source.write_text("this is no Python")
    with pytest.raises(DataError, match="is no Python source"):
        read_instruction(source)
    source.write_text("INSTRUCTION = 'a'\n")
    with pytest.raises(DataError, match="prompt_with_special_token"):
        read_instruction(source)
