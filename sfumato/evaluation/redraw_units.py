"""Which samples a run of RL drew together with one of its samples."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.config.rl import RLConfig
from sfumato.data.prompt_loader import PromptLoader
from sfumato.data.text.prompts import TextPromptLoader
from sfumato.errors import DataError
from sfumato.evaluation.recorded import RecordedSample
from sfumato.parallel.mesh import range_of_rank
from sfumato.rollout.batch import SampleRequest, requests_of
from sfumato.tracking.folder import read_environment


def training_unit(recorded: RecordedSample, loader: PromptLoader) -> list[SampleRequest]:
    """The requests that a rank of the run drew together with a training sample.

    Raises:
        DataError: when the configuration has no such sample.
    """
    config = recorded.run.config
    iteration = recorded.step - 1
    size = loader.group_size
    group = recorded.sample_id // size
    if group >= loader.num_prompts:
        return _replacing_group(recorded, loader, group)
    num_ranks = count_ranks(recorded, is_training=True)
    for rank in range(num_ranks):
        requests = requests_of(loader, iteration, rank, num_ranks)
        # dynamic sampling draws each group by itself
        length = size if getattr(config.rollout, "max_extra_groups", 0) else config.rollout.micro_batch_size
        for start in range(0, len(requests), length):
            unit = requests[start : start + length]
            if any(request.sample_id == recorded.sample_id for request in unit):
                return unit
    raise DataError(f"{recorded}: the run's configuration draws no such sample")


def _replacing_group(recorded: RecordedSample, loader: PromptLoader, group: int) -> list[SampleRequest]:
    """A group that was drawn in the place of one without spread."""
    rollout = recorded.run.config.rollout
    number = group - loader.num_prompts
    prompts: list[int] = []
    if isinstance(loader, TextPromptLoader):
        prompts = loader.replacements(recorded.step - 1, getattr(rollout, "max_extra_groups", 0))
    if number >= len(prompts):
        raise DataError(f"{recorded}: the run's configuration draws no such sample")
    first = group * loader.group_size
    return [
        SampleRequest(first + member, group, prompts[number], is_first=member == 0)
        for member in range(loader.group_size)
    ]


def evaluated_rows(recorded: RecordedSample, count: int) -> list[int]:
    """The rows of ``count`` held-out prompts that a rank of the run drew with an evaluation's sample.

    Raises:
        DataError: when there is no such row.
    """
    num_ranks = count_ranks(recorded, is_training=False)
    for rank in range(num_ranks):
        rows = list(range_of_rank(count, rank, num_ranks))
        if recorded.sample_id in rows:
            return rows
    raise DataError(f"{recorded}: the run's evaluation has {count} prompts in its data now")


def count_ranks(recorded: RecordedSample, is_training: bool) -> int:
    """The data-parallel ranks that drew a sample."""
    config = recorded.run.config
    if not isinstance(config, RLConfig):
        return 1  # a grid is drawn by all ranks alike
    runtime = config.runtime
    if runtime.backend != "ray":
        processes = read_environment(recorded.run.folder).get("num_processes")
        processes = processes if isinstance(processes, int) and processes > 0 else 1
        return max(processes // config.train.ranks_per_sample, 1)
    has_sampler = not config.rollout.hybrid_engine
    if has_sampler and (is_training or config.sampler_evaluates):
        return max(runtime.pools.sampler.processes // runtime.sampler_train(config.train).ranks_per_sample, 1)
    return max(runtime.actor_processes // config.train.ranks_per_sample, 1)


def check_prompt(recorded: RecordedSample, prompt: str) -> None:
    """Raises DataError when the data has another prompt than the run had for a sample."""
    if prompt != recorded.prompt:
        raise DataError(
            f"{recorded} was drawn for the prompt {recorded.prompt[:80]!r}, and the data of the run's configuration "
            f"has {prompt[:80]!r} there now: put the data back"
        )


def place_of(ids: Sequence[int], recorded: RecordedSample) -> int:
    """Where a sample stands among those that are drawn together."""
    return list(ids).index(recorded.sample_id)
