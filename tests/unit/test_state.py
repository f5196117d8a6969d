"""Saved and loaded state: going on from it equals never having stopped, and a state that does not fit is refused."""

import copy
import itertools
import json
import math
import os
import pickle
import random
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sfumato.checkpoint import state as state_module
from sfumato.checkpoint.parts import StoredCheckpoint, chunks_problem
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import DitTrainConfig
from sfumato.errors import CheckpointError
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import chunks_of_range
from tests.tiny import Position

TOTAL_STEPS = 9
ALONE = Mesh(Layout(), torch.device("cpu"))


def save_state(state: TrainState, root: Path) -> Path:
    saving = Saving(root, state, ALONE)
    saving.write()
    saving.finish(keep=1)
    return root / f"global_step_{state.step}"


def load_state(state: TrainState, folder: Path) -> list[str]:
    return state_module.load_state(state, StoredCheckpoint(folder), ALONE)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by torch's own tool."""
    dcp_to_torch_save(folder, folder.parent / "all.pt")
    return torch.load(folder.parent / "all.pt")


def make(seed: int = 0, width: int = 8, ema: bool = True, reference: bool = True, bias: bool = True) -> TrainState:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    module = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 2, bias=bias))
    module[0].bias.requires_grad_(False)
    return state_of(module, ema, reference)


def state_of(
    module: nn.Module, ema: bool = True, reference: bool = True, lr: float = 0.01, total_steps: int = TOTAL_STEPS
) -> TrainState:
    config = DitTrainConfig(
        output_dir="unused", lr=lr, lr_warmup_steps=2, lr_decay_style="cosine", lr_min=0.001, weight_decay=0.1
    )
    optimizer, schedule = build_optimizer(module, config, total_steps)
    frozen = copy.deepcopy(module).requires_grad_(False) if reference else None
    return TrainState(module, optimizer, schedule, Ema(module, 0.9, interval=2) if ema else None, frozen)


def train(state: TrainState, num_steps: int) -> list[float]:
    """Steps that draw from the global generators of torch, numpy and Python, and both the loss and the draws."""
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(5, 4) + float(np.random.standard_normal()) + random.gauss(0, 1)
        outputs = state.model(inputs)
        target = 0.0 if state.reference is None else state.reference(inputs)
        loss = ((outputs - target) ** 2).mean() + outputs.mean()
        loss.backward()
        state.optimizer.step()
        state.schedule.step()
        state.optimizer.zero_grad()
        if state.ema is not None:
            state.ema.update()
        state.step += 1
        losses += [float(loss.detach()), state.schedule.get_last_lr()[0]]
    return losses


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    """All tensors of a state, the optimizer's included."""
    results = {f"model/{name}": parameter for name, parameter in state.model.named_parameters()}
    for index, (_, entries) in enumerate(sorted(state.optimizer.state_dict()["state"].items())):
        results |= {f"optimizer/{index}/{key}": value for key, value in entries.items()}
    if state.ema is not None:
        results |= {f"ema/{name}": average for name, average in state.ema.averages.items()}
    if state.reference is not None:
        results |= {f"reference/{name}": parameter for name, parameter in state.reference.named_parameters()}
    return {name: value.detach().clone() for name, value in results.items()}


def assert_identical(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize(("settings", "rate"), [({"total_steps": 2 * TOTAL_STEPS}, "0.00638"), ({"lr": 0.02}, None)])
def test_a_learning_rate_that_does_not_go_on_is_said(tmp_path, settings, rate):
    state = make()
    train(state, TOTAL_STEPS)
    folder = save_state(state, tmp_path)
    other = state_of(make().model, **settings)
    said = load_state(other, folder)
    if rate is None:
        assert said == [], "both have decayed to lr_min"
    else:
        assert len(said) == 1 and said[0].startswith(f"the learning rate goes on at {rate}, and not at 0.001")
    values = json.loads((folder / "state.json").read_text())
    for stored in (None, [], 3, ["0.1"]):  # of a run before rates were stored, and of nobody
        (folder / "state.json").write_text(json.dumps(values | {"learning_rates": stored}))
        assert load_state(state_of(make().model, **settings), folder) == []


def test_parameters_in_other_groups_are_no_other_learning_rate(tmp_path):
    state = make()
    train(state, TOTAL_STEPS)
    folder = save_state(state, tmp_path)
    path = folder / "state.json"
    values = json.loads(path.read_text())
    (rate,) = {*values["learning_rates"]}
    path.write_text(json.dumps(values | {"learning_rates": [rate] * 5}))
    assert load_state(make(), folder) == []
    path.write_text(json.dumps(values | {"learning_rates": [rate, 10 * rate]}))
    (said,) = load_state(make(), folder)
    assert said.startswith("the learning rate goes on at 0.001, and not at 0.01, 0.001, as")


@pytest.mark.parametrize("optimizers", [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimiser_is_refused(tmp_path, optimizers):
    torch.manual_seed(0)
    folder = None
    for optimizer in optimizers:
        module = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 4)})
        config = DitTrainConfig(output_dir="unused", optimizer=optimizer)
        state = TrainState(module, *build_optimizer(module, config, 1))
        if folder is None:
            sum(parameter.sum() for parameter in module.parameters()).backward()
            state.optimizer.step()
            folder = save_state(state, tmp_path)
        else:
            with pytest.raises(CheckpointError, match=r"layers\.0\.weight/.*restore train\.optimizer"):
                load_state(state, folder)
            assert not state.optimizer.state


@pytest.mark.parametrize("stop", range(TOTAL_STEPS))
def test_stopping_and_resuming_changes_no_bit(tmp_path, stop):
    undisturbed = make()
    losses = train(undisturbed, TOTAL_STEPS)

    first = make()
    begin = train(first, stop)
    folder = save_state(first, tmp_path)
    saved = everything(first)

    resumed = make(seed=99)
    assert load_state(resumed, folder) == [], "nothing has changed"
    assert resumed.step == stop
    assert_identical(everything(resumed) | {"model/0.bias": saved["model/0.bias"]}, saved)
    resumed.model[0].bias.copy_(first.model[0].bias)  # frozen: comes from the model folder, not from the checkpoint
    assert begin + train(resumed, TOTAL_STEPS - stop) == losses
    assert_identical(everything(resumed), everything(undisturbed))
    assert resumed.ema.num_updates == TOTAL_STEPS
    assert resumed.optimizer.state_dict()["param_groups"] == undisturbed.optimizer.state_dict()["param_groups"]
    assert resumed.schedule.state_dict() == undisturbed.schedule.state_dict()


def test_every_generator_goes_on_where_it_stood(tmp_path):
    state = make()
    random.gauss(0, 1)  # gauss makes two values and keeps one, in Python and in numpy
    np.random.standard_normal()
    torch.randn(3)
    folder = save_state(state, tmp_path)

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), *np.random.standard_normal(2), *torch.randn(2).tolist()]

    expected = draw()
    other = make(seed=5)
    load_state(other, folder)
    assert draw() == expected


def test_saving_draws_no_random_number_and_changes_nothing(tmp_path):
    state, twin = make(), make()
    train(twin, 3)
    twin_next = train(twin, 1)
    state = make()
    train(state, 3)
    before = everything(state)
    save_state(state, tmp_path)
    assert_identical(everything(state), before)
    assert train(state, 1) == twin_next


def test_torch_reads_it_and_reads_only_what_is_trained(tmp_path):
    state = make()
    state.loader = Position(position=12, sources=["a", "b"], part=0.5)
    train(state, 2)
    folder = save_state(state, tmp_path)
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", "state.json", "manifest.json"}
    result = tensors_in(folder)
    trained = {"0.weight", "3.weight", "3.bias"}
    assert {key.removeprefix("model/") for key in result if key.startswith("model/")} == trained
    assert {key.split("/")[1] for key in result if key.startswith("optimizer/")} == trained
    assert torch.equal(result["model/3.weight"], state.model[3].weight)
    assert torch.equal(result["optimizer/3.bias/exp_avg"], state.optimizer.state[state.model[3].bias]["exp_avg"])
    assert torch.equal(result["ema/0.weight"], state.ema.averages["0.weight"])
    values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    assert (values["step"], values["model"], values["data"]) == (2, "Sequential", state.loader.values)
    loaded = make(seed=3)
    loaded.loader = Position()
    load_state(loaded, folder)
    assert loaded.loader.values == state.loader.values


def test_fields_of_any_kind_of_optimiser_state(tmp_path):
    """Integers, other dtypes, and tensors that have not the shape of their parameter, as 8-bit optimisers have."""
    state = make()
    train(state, 1)
    weight, bias = state.model[0].weight, state.model[3].bias
    state.optimizer.state[weight] = {
        "step": 7,
        "state1": torch.arange(32, dtype=torch.uint8).view(8, 4),
        "absmax1": torch.rand(3),
        "scale": torch.tensor(math.pi, dtype=torch.float64),
    }
    state.optimizer.state[bias]["exp_avg"] = torch.tensor([math.nan, -0.0], dtype=torch.bfloat16)
    folder = save_state(state, tmp_path)
    loaded = make(seed=3)
    load_state(loaded, folder)
    fields = loaded.optimizer.state[loaded.model[0].weight]
    assert isinstance(fields.pop("step"), int)
    assert_identical(fields, {key: value for key, value in state.optimizer.state[weight].items() if key != "step"})
    result, saved = (
        train_state.optimizer.state[train_state.model[3].bias]["exp_avg"] for train_state in (loaded, state)
    )
    assert result.dtype == torch.bfloat16
    assert torch.equal(result.view(torch.int16), saved.view(torch.int16))


def test_a_parameter_without_gradient_so_far_has_no_state(tmp_path):
    state, loaded = make(), make(seed=3)
    train(state, 1)
    train(loaded, 2)
    del state.optimizer.state[state.model[0].weight]
    load_state(loaded, save_state(state, tmp_path))
    assert loaded.model[0].weight not in loaded.optimizer.state
    assert len(loaded.optimizer.state) == 2


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Writes a checkpoint again by torch's own saver, with tensors added, changed, or (None) left out."""
    tensors = {name: change for name, change in (tensors_in(folder) | changes).items() if change is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is overwritten
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)


OTHER_TENSORS = [
    ("3.weight", None, r"global_step_0 is of another model.*has no '{name}'$"),
    ("extra", torch.ones(1), "does not train '{name}'$"),
    ("3.weight", torch.ones(2, 1), r"'{name}' has shape \(2, 1\), here \(2, 8\)"),
    ("3.weight", torch.ones(2, 8, dtype=torch.bfloat16), r"'{name}' has dtype torch\.bfloat16, here torch\.float32"),
]


@pytest.mark.parametrize(("key", "tensor", "message"), OTHER_TENSORS)
@pytest.mark.parametrize("section", ["model", "ema", "reference"])
def test_a_tensor_that_is_missing_unknown_or_another_is_named(tmp_path, section, key, tensor, message):
    folder, name = save_state(make(), tmp_path), f"{section}/{key}"
    edit(folder, **{name: tensor})
    with pytest.raises(CheckpointError, match=message.format(name=name)):
        load_state(make(), folder)


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path):
    folder = save_state(make(width=8), tmp_path)
    narrow = make(width=6)
    before = everything(narrow)
    with pytest.raises(CheckpointError, match=r"'ema/0\.weight' has shape \(8, 4\), here \(6, 4\)"):
        load_state(narrow, folder)
    assert_identical(everything(narrow), before)
    with pytest.raises(CheckpointError, match=r"does not train 'ema/3\.bias', 'model/3\.bias', 'reference/3\.bias'$"):
        load_state(make(bias=False), folder)
    message = (
        r"\(a Sequential, here a Bilinear\): it has no 'ema/bias', 'ema/weight', 'model/bias' and 3 more; this conf"
    )
    with pytest.raises(CheckpointError, match=message):
        load_state(state_of(nn.Bilinear(3, 3, 2)), folder)


def test_optimizer_state_of_an_unknown_parameter_is_named(tmp_path):
    state = make()
    train(state, 1)
    folder = save_state(state, tmp_path)
    edit(folder, **{"optimizer/other/exp_avg": torch.ones(1)})
    with pytest.raises(CheckpointError, match="does not train 'optimizer/other/exp_avg'"):
        load_state(make(), folder)


def test_a_folder_of_whole_tensors_is_named(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has no \.metadata.*hf_ckpt"):
        StoredCheckpoint(tmp_path)


class Malicious:
    """Unpickles to a call of any function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "pickled",
    [
        lambda path: pickle.dumps(Malicious(os.mkdir, str(path))),
        lambda path: (
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08os.mkdir\x93\x8c"
            + bytes([len(str(path))])
            + str(path).encode()
            + b"\x85R."
        ),  # by the module that the metadata's own module has imported
        lambda path: pickle.dumps(Malicious(eval, f"__import__('os').mkdir({str(path)!r})")),
    ],
    ids=["directly", "through a module", "eval"],
)
def test_a_checkpoint_runs_no_program(tmp_path, pickled):
    folder = save_state(make(), tmp_path)
    mark = tmp_path / "mark"
    content = pickled(mark)
    pickle.loads(content)
    mark.rmdir()  # it would have run
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata was not written by torch: it asks for .*(mkdir|eval)"):
        load_state(make(), folder)
    assert not mark.exists()


@pytest.mark.parametrize(("which", "what"), [("ema", "moving average"), ("reference", "reference model")])
def test_what_the_checkpoint_has_and_what_the_run_wants_must_agree(tmp_path, which, what):
    has, lacks = save_state(make(), tmp_path / "has"), save_state(make(**{which: False}), tmp_path / "lacks")
    with pytest.raises(CheckpointError, match=f"has no {what}.*, but this configuration wants one"):
        load_state(make(), lacks)
    with pytest.raises(CheckpointError, match=f"has one {what}.*, but this configuration wants none"):
        load_state(make(**{which: False}), has)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_make_up_every_range_of_a_flattened_tensor(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = list(chunks_of_range(shape, start, stop))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            results = [
                whole[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))].flatten()
                for box in boxes
            ]
            assert torch.cat([*results, whole.flatten()[:0]]).tolist() == list(range(start, stop))


def test_rates_and_betas_come_from_the_configuration_of_the_resumed_run(tmp_path):
    first = make()
    train(first, 5)
    folder = save_state(first, tmp_path)
    resumed = make()
    for group in resumed.optimizer.param_groups:
        group["betas"] = (0.5, 0.6)
    resumed.schedule.base_lrs = [0.1] * len(resumed.schedule.base_lrs)
    load_state(resumed, folder)
    assert [group["betas"] for group in resumed.optimizer.param_groups] == [(0.5, 0.6)] * 2
    before = first.schedule.get_last_lr()[0]
    assert resumed.schedule.get_last_lr()[0] == pytest.approx(10 * before)
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(10 * before)


def test_chunks_that_do_not_make_up_a_tensor_are_named_without_comparing_all_with_all() -> None:
    def chunks(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((4 * row, 0), (4, 10**6)) for row in range(count)]  # cut along the shorter dimension

    good = chunks(8)
    assert chunks_problem((32, 10**6), good) == "" and chunks_problem((), [((), ())]) == ""
    assert "hold 28000000 elements of 32000000" in chunks_problem((32, 10**6), good[1:])
    assert "lies outside" in chunks_problem((31, 10**6), good)
    assert "overlap" in chunks_problem((32, 10**6), [((2, 0), (4, 10**6)), *good[1:]])
    assert chunks_problem((2, 2), [((0, 0), (2, 2)), ((1, 0), (0, 2)), ((1, 0), (0, 2))]) == "", "of no elements"
    seconds = []
    for count in (256, 4096):
        cut = chunks(count)
        started = time.process_time()
        assert chunks_problem((4 * count, 10**6), cut) == ""
        seconds.append(time.process_time() - started)
    assert seconds[1] < 64 * max(seconds[0], 1e-3), "16 times the chunks, not 256 times the work"


def test_chunks_make_up_a_tensor_where_a_count_of_its_elements_says_so() -> None:
    generator = random.Random(0)
    seen = set()
    for _ in range(400):
        size = tuple(generator.randint(1, 4) for _ in range(generator.randint(1, 3)))
        cuts = [sorted({0, *(generator.randrange(length) for _ in range(2)), length}) for length in size]
        chunks = [
            (tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box))
            for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
        ]
        generator.shuffle(chunks)
        for _ in range(generator.randint(0, 2)):  # another place or another size for some
            place = generator.randrange(len(chunks))
            offsets = tuple(generator.randrange(length) for length in size)
            sizes = tuple(generator.randint(0, whole - first) for first, whole in zip(offsets, size, strict=True))
            chunks[place] = (offsets, sizes)
        count = torch.zeros(size, dtype=torch.int64)
        for offsets, lengths in chunks:
            count[tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))] += 1
        is_whole = bool((count == 1).all())
        assert (chunks_problem(size, chunks) == "") == is_whole, (size, chunks)
        seen.add((is_whole, chunks_problem(size, chunks).rpartition(" ")[2] == "overlap"))
    assert seen == {(True, False), (False, False), (False, True)}


def test_forged_chunks_cannot_hold_up_a_run() -> None:
    count = 1500  # long strips beside a column of short ones: each of these is beside all of those
    strips = [((0, column), (count, 1)) for column in range(count)]
    column = [((row, count), (1, 1)) for row in range(count)]
    began = time.process_time()
    assert "lie as no processes cut a tensor" in chunks_problem((count, count + 1), [*strips, *column])
    assert time.process_time() - began < 20
