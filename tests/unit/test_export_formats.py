"""Forms of exports: dtypes, kohya's names, llama.cpp's converter, and what may be exported."""

import json
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sfumato.cli import main
from sfumato.commands.export_formats import change_dtype
from sfumato.errors import ConfigError
from sfumato.models.diffusion.kohya import to_kohya
from tests.tiny import run_task_here, tiny_text_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return run_task_here("train_text", tiny_text_config(folder, train={"max_steps": 1}))


def dtypes_in(folder):
    return {weight.dtype for path in folder.rglob("*.safetensors") for weight in load_file(path).values()}


def test_an_export_is_cast_and_loads(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run / "hf_ckpt"), str(out), "--dtype", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "copy of" in said and "the weights are bf16 (1 file)\n" in said
    assert dtypes_in(out) == {torch.bfloat16}
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*.safetensors")} == {0o644}
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    assert dtypes_in(run / "hf_ckpt") == {torch.float32}, "the run's own export stays"
    assert main(["export", str(run), str(tmp_path / "half"), "--dtype", "fp16"]) == 0
    for path in run.glob("hf_ckpt/*.safetensors"):
        half = load_file(tmp_path / "half" / path.name)
        assert all(torch.equal(half[name], weight.half()) for name, weight in load_file(path).items())


def test_what_fp16_does_not_hold_is_refused(tmp_path):
    save_file({"w": torch.tensor([1e6])}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="values that fp16 does not hold: take --dtype bf16"):
        change_dtype(tmp_path, "fp16")
    assert load_file(tmp_path / "model.safetensors")["w"].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "is exported already: add --dtype"),
        (["--merge"], "hf_ckpt has no adapters; they are merged already"),
        (["--lora", "kohya"], "config.yaml names no model.model_path"),
        (["--gguf"], "git clone https://github.com/ggml-org/llama.cpp"),
        (["--gguf", "--llama-cpp", "/nowhere"], "holds no convert_hf_to_gguf.py"),
    ],
)
def test_refusals_name_the_remedy(run, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert main(["export", str(run / "hf_ckpt"), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_that_lie_elsewhere_than_their_run_are_not_taken_for_it(tmp_path, capsys):
    moved, kept = tmp_path / "moved", tmp_path / "run" / "hf_ckpt"
    for folder in (moved, kept):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "README.md").write_text("---\ntags: []\n---\n")
    (kept.parent / "config.yaml").write_text("{}")
    for folder, name in ((moved, "RUN"), (kept, str(kept.parent))):
        assert main(["export", str(folder), str(tmp_path / "out"), "--merge"]) == 2
        assert f"--merge needs the checkpoint: sfumato export {name} " in capsys.readouterr().err


def test_llama_cpp_is_called_with_the_folder_and_the_type(run, tmp_path, capsys):
    """A program in the place of the converter, which notes its arguments; the real one is called in test_smollm2.py."""
    tool = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    tool.parent.mkdir()
    tool.write_text(
        "import json, sys\nopen(sys.argv[sys.argv.index('--outfile') + 1], 'w').write(json.dumps(sys.argv[1:]))\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    out = tmp_path / "out"
    command = ["export", str(run / "hf_ckpt"), str(out), "--gguf", "--llama-cpp", str(tool.parent), "--dtype", "fp16"]
    assert main(command) == 0
    assert json.loads((out / "model-fp16.gguf").read_text()) == [
        *(str(out), "--outfile", str(out / "model-fp16.gguf"), "--outtype", "f16")
    ]
    tool.write_text("raise SystemExit('no such architecture')")
    assert main([*command[:2], str(tmp_path / "again"), *command[3:]]) == 2
    assert "no such architecture" in capsys.readouterr().err


def test_kohya_file_becomes_a_folder_for_diffusers(tmp_path, capsys):
    layers = {
        f"transformer.transformer_blocks.1.attn.to_q.lora_{matrix}.weight": torch.randn(shape)
        for matrix, shape in (("A", (2, 6)), ("B", (4, 2)))
    }
    save_file(to_kohya(layers, "QwenImagePipeline"), tmp_path / "kohya.safetensors")
    assert main(["export", str(tmp_path / "kohya.safetensors"), str(tmp_path / "out")]) == 0
    back = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    assert back.keys() == layers.keys()
    assert all(torch.equal(back[name], layers[name]) for name in layers)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    assert main(["export", str(tmp_path / "broken.safetensors"), str(tmp_path / "other")]) == 2
    assert "is no file of safetensors" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
