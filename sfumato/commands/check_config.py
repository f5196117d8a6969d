"""``sfumato check``: what a run will read, build and need, and whether that fits, before it is started."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from sfumato.commands.check_data import (
    DataFindings,
    bad_rows_of,
    check_image_data,
    check_prompt_data,
    check_text_data,
    check_text_prompt_data,
)
from sfumato.commands.check_host import HostFindings, check_host
from sfumato.commands.check_model import (
    ModelFindings,
    build_planned_model,
    check_model,
    made_model,
    needed_bytes,
    smallest_number_of_ranks,
)
from sfumato.commands.check_programs import check_programs
from sfumato.commands.check_text_rl import describe_engine
from sfumato.commands.find_task import load_for_task
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.direct_rl import DirectRLConfig
from sfumato.config.load import merge
from sfumato.config.omni import TrainImageTokenizerConfig, TrainOmniConfig
from sfumato.config.parallel import world_size
from sfumato.config.rl import RLConfig
from sfumato.config.sections import ModelConfig
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_reward import TrainTextRewardConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.config.versions import describe_untested_versions
from sfumato.config.yaml_text import read_yaml
from sfumato.data.files.bad_rows import bad_row_limit
from sfumato.data.media.vision import MediaProcessor
from sfumato.data.text.answer_end import facts_of
from sfumato.errors import UnpredictedError, UserError, describe_file_error
from sfumato.models.diffusion.folder_parts import parts_without_weights
from sfumato.models.diffusion.load import read_index
from sfumato.models.estimate.kv_memory import KEYS_AND_VALUES
from sfumato.models.estimate.memory_plan import refuse_unpredicted
from sfumato.models.estimate.meta_models import language_model_on_meta
from sfumato.models.estimate.meta_vision import vision_on_meta
from sfumato.models.language.load import build_tokenizer, read_model_config
from sfumato.models.language.parts import source_of, where_described
from sfumato.models.language.router_config import (
    adds_router_loss,
    describe_router_loss,
    refuse_router_loss,
    router_loss_coefficient,
)
from sfumato.models.language.router_loss import check_router_settings
from sfumato.models.language.source_folder import describe_jitter, describe_left_out
from sfumato.models.language.untrained_tokens import describe_untrained_tokens
from sfumato.parallel.layout import Layout
from sfumato.tracking.folder import StartPlan, describe_absent_checkpoint, run_date
from sfumato.tracking.identity import identify
from sfumato.tracking.lock import refuse_held
from sfumato.tracking.run import quiet_libraries
from sfumato.tracking.trackers import check_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sfumato.config.tasks import TaskConfig

FITS, DOES_NOT_FIT, WRONG = 0, 1, 2
"""Exit codes."""


@dataclass
class Findings:
    """What ``check_config`` found about a configuration."""

    config: str
    task: str
    layout: Layout
    device: str
    device_bytes: int | None
    """Memory of one rank; None when it is not known."""
    on_gpu: bool
    data: DataFindings | None = None
    model: ModelFindings | None = None
    host: HostFindings | None = None
    problems: list[str] = field(default_factory=list)
    """What would stop the run."""
    notes: list[str] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)
    """What only the run finds out."""

    @property
    def needed_bytes(self) -> int | None:
        """Bytes of the rank that needs most, with an allowance for what is not predicted; None without a model."""
        return None if self.model is None else needed_bytes(self.model.largest, self.on_gpu)

    @property
    def exit_code(self) -> int:
        """2: the run would stop; 1: it does not fit; 0: nothing is wrong."""
        if self.problems:
            return WRONG
        return FITS if self.fits_devices and (self.host is None or self.host.fits) else DOES_NOT_FIT

    @property
    def fits_devices(self) -> bool:
        """Whether the memory of devices is enough, as far as it is known."""
        needed_bytes = self.needed_bytes
        # nothing to compare on an unknown machine, or with a model whose memory is not predicted
        return self.device_bytes is None or needed_bytes is None or needed_bytes <= self.device_bytes

    def to_json(self) -> str:
        """All of it for machines."""
        content = dataclasses.asdict(self)
        content |= {"needed_bytes": self.needed_bytes, "exit_code": self.exit_code}
        return json.dumps(content, indent=1)


def check_config(
    path: str | Path,
    overrides: dict[str, object] | None = None,
    task: str | None = None,
    num_ranks: int | None = None,
    device_gib: float | None = None,
    with_data: bool = True,
    show: bool = False,
    host_gib: float | None = None,
) -> Findings:
    """Checks a configuration without starting anything.

    Args:
        path: the YAML file.
        overrides: laid over it.
        task: which task it is for; None finds out.
        num_ranks: processes; None takes WORLD_SIZE, or the fewest that the sizes allow.
        device_gib: memory of one GPU; None looks at this machine.
        with_data: look at the data.
        show: say on stderr what is being done.
        host_gib: CPU memory of a machine; None looks at this one, unless ``device_gib`` says that it is another.

    Raises:
        ConfigError: when the configuration itself is wrong. What is wrong with data or model is in the findings.
    """
    quiet_libraries()
    overrides = overrides or {}
    pool = _actor_pool(path, overrides)
    # twice: the fewest ranks follow from the sizes in the configuration, which is then checked for that many; on Ray
    # the number of the actor's processes stands in the configuration itself
    name, config = load_for_task(path, overrides, task, None if pool else num_ranks)
    ranks = (
        pool
        or num_ranks
        or (world_size() if "WORLD_SIZE" in os.environ else 0)
        or smallest_number_of_ranks(config.train)
    )
    name, config = load_for_task(path, overrides, name, None if pool else ranks)
    layout = Layout.resolve(config.train, ranks)
    findings = Findings(str(path), name, layout, *_describe_device(config.train.device, ranks, device_gib))
    findings.notes += describe_untested_versions()
    if with_data:
        _print_progress("looking at the data", show)
        _look_at_data(findings, config)
    else:
        findings.not_looked_at.append("the data")
    _look_at_run_folder(findings, config)
    if isinstance(config, RLConfig):
        _look_for_programs(findings, config, is_for_here=device_gib is None)
    try:
        check_trackers(config.train.trackers)
    except UserError as error:
        findings.problems.append(str(error))
    if isinstance(config, (TrainOmniConfig, TrainImageTokenizerConfig)):  # whose models are not planned
        findings.notes.append(
            f"memory is not predicted for tasks/{name}.py: start a run of a few steps (train.max_steps)"
        )
        return findings
    _print_progress("building the model without memory, and predicting what it needs", show)
    try:
        _predict_memory(findings, config, layout, device_gib, host_gib, show)
        if isinstance(config, (TrainTextConfig, TextRLConfig)):
            _look_at_model_folder(findings, config)
        if isinstance(config.model, ModelConfig):
            findings.notes.extend(_describe_missing_weights(config.model))
        if isinstance(config, TextRLConfig) and findings.model is not None:
            _look_at_text_rl(findings, config, layout)
        if isinstance(config, DirectRLConfig):
            findings.notes.append(
                "not predicted: what autoencoder and rewards keep of the passes that gradients flow back through"
            )
    except UserError as error:
        findings.problems.append(str(error))
    return findings


def _predict_memory(
    findings: Findings,
    config: TaskConfig,
    layout: Layout,
    device_gib: float | None,
    host_gib: float | None,
    show: bool,
) -> None:
    """Predicts the memory of device and host; where a model's code does not allow it, a note says so."""
    assert not isinstance(config, (TrainOmniConfig, TrainImageTokenizerConfig)), "their models are not planned"
    where = str(config.model.model_path or config.model.config_path)
    try:
        with refuse_unpredicted(where, "its code does not run on tensors without memory"):
            findings.model = check_model(config, layout, findings.on_gpu, findings.device_bytes, show)
    except UnpredictedError as error:
        findings.notes.append(str(error))
        return
    is_here = device_gib is None and findings.device_bytes is not None
    sizes = (findings.model, findings.data, findings.on_gpu)
    findings.host = check_host(config, layout, *sizes, host_gib, is_here)


def _look_at_run_folder(findings: Findings, config: TaskConfig) -> None:
    """What the run would do where another one stands, or with the checkpoint that it is to go on from."""
    if absent := describe_absent_checkpoint(config):
        findings.problems.append(absent)
        return
    counted = findings.data.num_steps if findings.data is not None and findings.data.steps_are_exact else None
    total_steps = config.train.max_steps or counted
    try:
        refuse_held(Path(config.train.output_dir))
        plan = StartPlan(config)
        identify(config, {})
        if total_steps is not None:
            plan.check_steps(total_steps, plan.from_step)
    except UserError as error:
        findings.problems.append(str(error))
        return
    except OSError as error:  # files of another user
        findings.problems.append(describe_file_error(error) or str(error))
        return
    if text := plan.describe():
        findings.notes.append(text)
    if plan.from_step:
        findings.not_looked_at.append("whether the checkpoint is intact, and of this data and model")


def _look_for_programs(findings: Findings, config: RLConfig, is_for_here: bool) -> None:
    """What rewards need to be installed, which another machine may have."""
    programs = check_programs(config)
    findings.not_looked_at += programs.not_looked_at
    if is_for_here:
        findings.problems += programs.missing
    else:
        findings.notes += [f"not on this machine: {missing}" for missing in programs.missing]


def _look_at_text_rl(findings: Findings, config: TextRLConfig, layout: Layout) -> None:
    """What a prediction of RL of text rests on, and what the engine has room for."""
    try:
        config.refuse_described_model()
    except UserError as error:
        findings.notes.append(f"predicted by a description, which the run does not start from: {error}")
    if config.rollout.engine.is_server and findings.on_gpu:
        planned = build_planned_model(config, layout, findings.on_gpu)
        told, fits = describe_engine(config, planned, layout, findings.device_bytes)
        (findings.notes if fits else findings.problems).append(told)
    assert findings.model is not None
    if not config.sampler_evaluates and KEYS_AND_VALUES not in findings.model.largest.parts:
        findings.notes.append("not predicted: what this model keeps of tokens while they are drawn, no keys and values")


def _describe_missing_weights(model: ModelConfig) -> list[str]:
    """A note where a pipeline was predicted from its configuration files alone."""
    folder = Path(str(model.model_path))
    without = parts_without_weights(folder, read_index(folder)) if model.model_path is not None else []
    return [f"model.model_path {folder}: the run needs weights of {', '.join(without)}, too"] if without else []


def _actor_pool(path: str | Path, overrides: dict[str, object]) -> int | None:
    """The number of the actor's processes where roles live on Ray; None elsewhere.

    Read from the file as it is, since the configuration cannot be validated before the number of ranks is known.
    """
    runtime = merge(read_yaml(path), overrides).get("runtime") or {}
    if not isinstance(runtime, dict) or runtime.get("backend") != "ray":
        return None
    pools = runtime.get("pools")
    actor = pools.get("actor") if isinstance(pools, dict) else None
    count = actor.get("processes", 1) if isinstance(actor, dict) else 1
    return count if isinstance(count, int) and count > 0 else 1  # validation names what is wrong with it


def _print_progress(doing: str, show: bool) -> None:
    if show:
        print(f"check: {doing}", file=sys.stderr, flush=True)


def _look_at_data(findings: Findings, config: TaskConfig) -> None:
    """Puts what the data holds into the findings; what would stop the run becomes a problem."""
    tokenizer: PreTrainedTokenizerBase | None = None
    try:
        if isinstance(config, TrainTextConfig):
            tokenizer, reader = _tokenizer_of(findings, config)
            facts = facts_of(tokenizer)
            facts.date = run_date(config.train)
            facts.appends_end = not isinstance(config, TrainTextRewardConfig)
            findings.data = check_text_data(config, tokenizer, reader, findings.layout)
        elif isinstance(config, TextRLConfig):
            tokenizer, reader = _tokenizer_of(findings, config)
            facts_of(tokenizer).date = run_date(config.train)
            findings.data = check_text_prompt_data(config, tokenizer, reader)
        elif isinstance(config, DiffusionRLConfig):
            findings.data = check_prompt_data(config)
        elif isinstance(config, TrainOmniConfig):
            findings.notes.append("the data was not looked at: its images have no size before the parts are read")
            return
        else:
            findings.data = check_image_data(config, findings.layout)
    except UserError as error:
        findings.problems.append(str(error))
        return
    # a run leaves out that many bad rows; the prompts of RL have no such field
    limit = getattr(config.data, "max_bad_rows", 0)
    for part in (findings.data.training, findings.data.validation):
        lines, stops = bad_rows_of(part, bad_row_limit(limit, sum(source.num_rows for source in part)))
        (findings.problems if stops else findings.notes).extend(lines)
        if (
            stops
            and limit == 0
            and hasattr(config.data, "max_bad_rows")
            and not any(source.is_fatal for source in part)
        ):
            findings.notes.append("data.max_bad_rows leaves such rows out")
    findings.notes.extend(findings.data.notes)
    if isinstance(config, TrainTextConfig | TextRLConfig) and tokenizer is not None and config.model.lora is not None:
        folder = source_of(config.model)
        findings.notes.extend([] if folder is None else describe_untrained_tokens(folder, tokenizer))


def _look_at_model_folder(findings: Findings, config: TrainTextConfig | TextRLConfig) -> None:
    """Notes and problems from a language model's own configuration.

    These are fields that the run leaves out, noise in a router, and a router's loss, which the task may refuse.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    model = made_model(config.model)
    has_images = config.data.data_type.has_images
    described = read_model_config(model, has_images)
    auto_class = AutoModelForMultimodalLM if has_images else AutoModelForCausalLM
    cls = cast("type[PreTrainedModel] | None", auto_class._model_mapping.get(type(described), None))
    findings.notes.extend(describe_left_out(described, cls))
    if jitter := describe_jitter(described):
        (findings.problems if config.train.probe == "stop" else findings.notes).append(jitter)
    if type(config) is not TrainTextConfig:
        refuse_router_loss(cls, described, where_described(model))
    elif cls is not None:
        findings.notes.extend(describe_router_loss(cls, described))
        if router_loss_coefficient(described) and adds_router_loss(cls):
            check_router_settings(findings.layout, config.train.compiles("cuda" if findings.on_gpu else "cpu"))


def _tokenizer_of(
    findings: Findings, config: TrainTextConfig | TextRLConfig
) -> tuple[PreTrainedTokenizerBase, MediaProcessor | None]:
    """The tokenizer of a language model, and the reader of images, videos and audio where the data has some."""
    model = made_model(config.model)
    data_type = config.data.data_type
    if not data_type.has_images:
        return build_tokenizer(model), None
    findings.notes.append("predicted as if every token were one of an image, which takes the most memory")
    reader = vision_on_meta(model, language_model_on_meta(model, findings.on_gpu, sees=True), data_type).reader
    return reader.tokenizer, reader


def _describe_device(wanted: str, num_ranks: int, gib: float | None) -> tuple[str, int | None, bool]:
    """Name and bytes of one rank's device (None when not known), and whether it is a GPU.

    Args:
        wanted: ``train.device``.
        num_ranks: processes, which share the memory of a CPU.
        gib: memory of one GPU, if it was given; then no device of this machine is looked at.
    """
    if gib is not None:
        return f"GPU with {gib:g} GiB", round(gib * 2**30), True
    if torch.cuda.is_available() and wanted != "cpu":
        properties = torch.cuda.get_device_properties(0)
        return properties.name, properties.total_memory, True
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted == "cpu" or num_ranks <= (os.cpu_count() or 1):
        return f"CPU, memory shared by {num_ranks} processes" if num_ranks > 1 else "CPU", total // num_ranks, False
    return "unknown: give --device-memory", None, True
