"""Draws a saved sample of a run again, and compares the two: equal to the bit, or how far apart and why.

What is compared is what ``samples.jsonl`` and its files hold: pictures, texts, the drawn tokens with their
log-probabilities, and the rewards that can be computed here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sfumato.config.rl import RLConfig
from sfumato.errors import ConfigError, DataError, UserError
from sfumato.evaluation.options import GenerationOptions
from sfumato.evaluation.recorded import ChosenWeights, RecordedSample, Redrawn
from sfumato.evaluation.sources import check_task
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.http_reward import HttpReward
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.tracking.folder import environment_of, read_environment
from sfumato.tracking.samples import BROKEN, read_frames, write_picture
from sfumato.tracking.waveforms import Waveform

Verdict = Literal["identical", "different", "other weights"]

COMPARED_ENTRIES = (
    *("device", "cpu_kernels", "cpu_threads", "float32_products", "platform", "num_processes"),
    *("git_commit", "source_code"),
)
"""Entries of ``environment.json`` that may explain other bits."""

COMPARED_PACKAGES = ("torch", "diffusers", "transformers", "peft")
"""Packages whose version may change bits."""


@dataclass(frozen=True)
class Part:
    """Something of a sample that was compared."""

    name: str
    is_equal: bool
    text: str
    """What is equal, or how far apart the two are."""


@dataclass(frozen=True)
class ReplayResult:
    """What came of drawing a sample again."""

    verdict: Verdict
    text: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    """What was not compared, and what may be the reason of a difference."""
    drawn_text: str | None
    """The answer of a language model."""
    file: str | None
    """The picture, where it was kept."""

    def as_json(self) -> dict[str, object]:
        """The result as a page gets it."""
        return {**asdict(self), "parts": [asdict(part) for part in self.parts], "notes": list(self.notes)}


def replay(
    recorded: RecordedSample, weights: ChosenWeights, options: GenerationOptions, with_rewards: bool, out: Path | None
) -> ReplayResult:
    """Draws a sample again and compares it.

    Args:
        recorded: the sample.
        weights: that draw it.
        options: has the device.
        with_rewards: score it again, but for rewards that ask a server or compare a group.
        out: folder in which the picture is kept, which exists; None keeps none.

    Raises:
        ConfigError: when such a sample cannot be drawn again; says why.
        UserError: as loading data and weights does.
    """
    check_task(weights.source)
    _check_redrawable(recorded)
    device = options.find_device()
    if device.type == "cpu":
        _use_threads(read_environment(recorded.run.folder).get("cpu_threads"))
    options = replace(options, seed=recorded.seed)
    best: tuple[list[Part], Redrawn] | None = None
    with tempfile.TemporaryDirectory(prefix="sfumato-replay-") as temporary:
        folder = out or Path(temporary)
        for redrawn in _redraw(recorded, weights, options):
            parts = _compare_content(recorded, redrawn, folder)
            best = (parts, redrawn)
            # a sample that was not drawn by these weights is not drawn a second time to look alike
            if all(part.is_equal for part in parts) or weights.version != recorded.policy_version:
                break
    assert best is not None
    parts, redrawn = best
    notes = [*weights.notes]
    if with_rewards:
        reward_parts, not_compared = _compare_rewards(recorded, redrawn.sample)
        parts += reward_parts
        notes += not_compared
    else:
        notes.append("rewards were not computed again")
    verdict, text = _judge_sample(recorded, weights, parts, redrawn)
    if verdict == "different":
        notes += _machine_differences(recorded, device)
    picture = None if out is None or redrawn.sample.image is None else _picture_path(recorded, out)
    return ReplayResult(
        verdict, text, (*parts,), (*notes,), redrawn.sample.text, None if picture is None else str(picture.absolute())
    )


def _check_redrawable(recorded: RecordedSample) -> None:
    rollout = getattr(recorded.run.config, "rollout", None)
    if recorded.kind != "train" or rollout is None:
        return
    if rollout.leaves_unfinished:
        raise ConfigError(
            f"{recorded} was drawn with rollout.over_sampling_batch_size: its answer may have begun under earlier "
            "weights, so that no checkpoint draws it again"
        )
    if getattr(rollout, "load_dump", None) is not None:
        raise ConfigError(f"{recorded} was read from {rollout.load_dump}, and not drawn: replay it in that run")


def _use_threads(count: object) -> None:
    """Computes with as many threads as the run: sums are divided by threads, and their last bits depend on it."""
    if isinstance(count, int) and not isinstance(count, bool) and 0 < count <= 1024:
        torch.set_num_threads(count)


def _redraw(recorded: RecordedSample, weights: ChosenWeights, options: GenerationOptions) -> Iterator[Redrawn]:
    # language models need no diffusers
    if recorded.run.is_diffusion:
        from sfumato.evaluation.redraw_pictures import redraw_picture

        yield redraw_picture(recorded, weights.source, options)
    else:
        from sfumato.evaluation.redraw_texts import redraw_text

        yield from redraw_text(recorded, weights.source, options)


def _compare_content(recorded: RecordedSample, redrawn: Redrawn, folder: Path) -> list[Part]:
    row = recorded.row
    sample = redrawn.sample
    parts = []
    if str(row.get("damage", "")) or sample.damage:
        is_equal = row.get("damage", "") == sample.damage
        parts.append(Part("damage", is_equal, f"{row.get('damage') or 'none'} then, {sample.damage or 'none'} now"))
    if sample.sound is not None:
        parts.append(_compare_sounds(recorded, sample.sound))
    if sample.image is not None:
        parts.append(_compare_pictures(recorded, sample.image, folder))
    elif sample.text is not None:
        # what no file can hold is written as a question mark
        parts.append(_compare_texts(str(row.get("text", "")), sample.text))
    token_ids = row.get("token_ids")
    if isinstance(token_ids, list):
        parts.append(_compare_tokens(token_ids, redrawn.token_ids[: len(token_ids)]))
    log_probs = row.get("log_probs")
    if isinstance(log_probs, list) and parts[-1].is_equal:
        parts.append(_compare_log_probs(log_probs, redrawn.log_probs[: len(log_probs)]))
    return parts


def _picture_path(recorded: RecordedSample, folder: Path) -> Path:
    file = recorded.file
    assert file is not None
    return folder / f"replay_step{recorded.step}_{file.name}"


def _compare_sounds(recorded: RecordedSample, sound: Waveform) -> Part:
    saved = None if recorded.file is None else recorded.file.with_suffix(".wav")  # beside the picture of its spectrum
    if saved is None or not saved.is_file():
        return Part("sound", False, "the run has saved no sound of it")
    is_equal = saved.read_bytes() == sound.wav()
    count = sound.samples.shape[1]
    return Part("sound", is_equal, f"{'all' if is_equal else 'not all'} {count} samples of each channel are the same")


def _compare_pictures(recorded: RecordedSample, image: np.ndarray, folder: Path) -> Part:
    saved = recorded.file
    if saved is None:
        return Part("picture", False, "the run has saved no picture of it")
    path = _picture_path(recorded, folder)
    write_picture(image, path)
    try:
        before = read_frames(saved).astype(int)
    except BROKEN as error:
        raise DataError(f"{saved} cannot be read: {error}") from error
    now = read_frames(path).astype(int)
    if before.shape != now.shape:
        return Part("picture", False, f"{list(before.shape)} then, {list(now.shape)} now (frames, height, width)")
    frames, height, width, _ = before.shape
    size = f"{height} x {width} pixels" + (f", {frames} frames" if frames > 1 else "")
    lossy = " after the lossy compression of the file" if saved.suffix == ".webp" else ""
    distance = np.abs(before - now)
    if not distance.any():
        return Part("picture", True, f"all {size} are the same{lossy}")
    share = (distance > 0).mean()
    return Part(
        "picture",
        False,
        f"{share:.1%} of the values of {size} differ{lossy}, by {distance.max()} of 255 at most and "
        f"{distance.mean():.3g} in the mean",
    )


def _compare_texts(before: str, now: str) -> Part:
    # a lone surrogate cannot be written, so the file has a question mark in its place
    now = now.encode("utf-8", "replace").decode("utf-8")
    before = before.encode("utf-8", "replace").decode("utf-8")
    if before == now:
        return Part("text", True, f"all {len(before)} characters are the same")
    first = _first_difference(before, now)
    return Part("text", False, f"{len(before)} characters then, {len(now)} now; they differ from character {first} on")


def _compare_tokens(before: list[object], now: tuple[int, ...]) -> Part:
    if before == list(now):
        return Part("tokens", True, f"all {len(before)} tokens are the same")
    return Part("tokens", False, f"they differ from token {_first_difference(before, now)} of {len(before)} on")


def _compare_log_probs(before: list[object], now: tuple[float, ...]) -> Part:
    saved = np.array([np.nan if value is None else value for value in before], np.float32)
    drawn = np.array(now, np.float32)
    if np.array_equal(saved, drawn, equal_nan=True):
        return Part("log-probabilities", True, f"all {len(saved)} are the same")
    distance = np.abs(saved - drawn)
    return Part("log-probabilities", False, f"{(distance != 0).sum()} differ, by {np.nanmax(distance):.3g} at most")


def _first_difference(before: object, now: object) -> int:
    assert isinstance(before, str | list | tuple) and isinstance(now, str | list | tuple)
    pairs = zip(before, now, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(before), len(now)))


def _compare_rewards(recorded: RecordedSample, sample: Sample) -> tuple[list[Part], list[str]]:
    """The rewards that can be computed from the sample alone, in this process; and why others were left out."""
    saved = recorded.row.get("rewards")
    if not isinstance(saved, dict) or not saved or recorded.kind == "watched":
        return [], []
    config = recorded.run.config
    if not isinstance(config, RLConfig):
        return [], [f"not compared: {', '.join(map(str, saved))}, which the task computes by itself"]
    parts: list[Part] = []
    notes: list[str] = []
    for reward in config.reward.rewards:
        if reward.label not in saved:
            continue
        if isinstance(reward, HttpReward):
            notes.append(f"reward {reward.label} was not compared: it asks a server")
        elif reward.groupwise:
            notes.append(f"reward {reward.label} was not compared: it compares the samples of a group")
        else:
            try:
                parts.append(_compare_reward(reward, saved, sample))
            except UserError as error:
                notes.append(f"reward {reward.label} was not compared: {error}")
    return parts, notes


def _compare_reward(reward: Reward, saved: Mapping[str, object], sample: Sample) -> Part:
    scorer = Scorer([reward], require_objective=False)
    try:
        scorer.prepare()
        scores = scorer.score([sample])
    finally:
        scorer.close()
    value = float(scores.components[reward.label][0])
    before = saved[reward.label]
    then = float(before) if isinstance(before, int | float) else float("nan")
    shown = "failed" if np.isnan(then) else repr(then)
    if then == value or (np.isnan(then) and np.isnan(value)):
        return Part(f"reward {reward.label}", True, shown)
    why = f" ({'; '.join(scores.failures)})" if scores.failures else ""
    return Part(
        f"reward {reward.label}", False, f"{shown} then, {'failed' if np.isnan(value) else repr(value)} now{why}"
    )


def _judge_sample(
    recorded: RecordedSample, weights: ChosenWeights, parts: list[Part], redrawn: Redrawn
) -> tuple[Verdict, str]:
    how = f" ({redrawn.how})" if redrawn.how else ""
    equal = ", ".join(part.name for part in parts if part.is_equal)
    different = "; ".join(f"{part.name}: {part.text}" for part in parts if not part.is_equal)
    if weights.version != recorded.policy_version:
        return "other weights", (
            f"no proof: it was drawn after {recorded.policy_version} updates, of which no intact checkpoint is there "
            f"(train.save_steps), and is drawn again after {weights.version}. "
            + (different if different else f"It is the same nevertheless: {equal}")
        )
    if different:
        return "different", f"not equal: {different}" + (f"; equal: {equal}" if equal else "") + how
    return "identical", f"equal to the bit: {equal}{how}"


def _machine_differences(recorded: RecordedSample, device: torch.device) -> list[str]:
    """What differs between the machine of the run and this one, which may be why bits do."""
    then = read_environment(recorded.run.folder)
    now = environment_of(Mesh(Layout(), device))
    lines = []
    for name in COMPARED_ENTRIES:
        if name in then and then[name] != now[name]:
            lines.append(f"{name.replace('_', ' ')}: {then[name]} in the run, {now[name]} here")
    packages = then.get("packages")
    here = now["packages"]
    for name in COMPARED_PACKAGES:
        if isinstance(packages, dict) and isinstance(here, dict) and packages.get(name) != here.get(name):
            lines.append(f"{name}: {packages.get(name)} in the run, {here.get(name)} here")
    engine = getattr(getattr(recorded.run.config, "rollout", None), "engine", None)
    if engine is not None and engine.type != "embedded":
        lines.append(f"rollout.engine: {engine.type} in the run, embedded here, which has other kernels and noise")
    if device.type == "cuda":
        lines.append("GPUs: kernels may be chosen by the size of a batch, and some add in no fixed order")
    if not lines:
        return ["nothing is known that differs from the run's machine"]
    return [f"a reason may be {line}" for line in lines]
