"""Rollouts that are read from the dumps of another run in the place of drawing: a run that trains only.

A step learns from that run's samples of the same step, however many ranks wrote them: the tokens, their
log-probabilities and versions, and the rewards, which are not computed again. Advantages and what follows are computed
anew, so another algorithm can be tried on the same samples; with the same one each update has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.debug.dumps import FOLDER, digest_vocabulary, dump_path, read_dump
from sfumato.rollout.text.tokens import TextRollout, TokenSequence


class DumpedRollouts:
    """The rollouts of a run folder, of which one step at a time is in memory."""

    def __init__(self, run_folder: Path | str, template: PromptTemplate, temperature: float) -> None:
        """
        Args:
            run_folder: that holds ``rollouts/``.
            template: has the tokenizer.
            temperature: of this run, which must be that of the dumps.

        Raises:
            ConfigError: when it has no rollouts.
        """
        self._folder = Path(run_folder)
        self._template = template
        self._temperature = temperature
        if not (self._folder / FOLDER).is_dir():
            raise ConfigError(
                f"rollout.load_dump: {self._folder} has no folder {FOLDER}, which a run with rollout.dump or "
                "rollout.rollout_only writes: name a run folder that has one"
            )
        self._vocabulary = digest_vocabulary(template.tokenizer)
        self._step = -1
        self._rollout: TextRollout | None = None
        self._scores: list[dict[str, float]] = []
        self.metrics: dict[str, float] = {}
        """Of the iteration that was read last, over all ranks' samples."""

    def draw(self, requests: Sequence[SampleRequest], iteration: int) -> tuple[TextRollout, list[Sample]]:
        """The samples of an iteration that are asked for, by their ids; as ``TextGenerator.draw_requests``.

        Raises:
            ConfigError: when they were drawn with another temperature or tokenizer.
            DataError: when a file is missing or damaged, lacks a sample or has it in another group, or holds tokens
                that the tokenizer has not.
        """
        if self._step != iteration:
            self._read(iteration)
        assert self._rollout is not None
        row_of = {sample_id: row for row, sample_id in enumerate(self._rollout.sample_ids)}
        missing = [request.sample_id for request in requests if request.sample_id not in row_of]
        # with another rollout.n answers to several prompts would be compared as one group
        moved = [
            request.sample_id
            for request in requests
            if request.sample_id not in missing
            and self._rollout.requests[row_of[request.sample_id]].group_id != request.group_id
        ]
        if missing or moved:
            problem = f"no sample {missing[0]}" if missing else f"sample {moved[0]} in another group"
            raise DataError(
                f"the rollouts of step {iteration + 1} in {self._folder} have {problem}: rollout.num_prompts and "
                "rollout.n must be those of the run that wrote them"
            )
        rows = [row_of[request.sample_id] for request in requests]
        chosen = self._rollout.rows(torch.tensor(rows, dtype=torch.int64))
        samples = [
            self._build_sample(request, sequences, self._scores[row])
            for request, sequences, row in zip(chosen.requests, chosen.sequences, rows, strict=True)
        ]
        return chosen, samples

    def _read(self, iteration: int) -> None:
        """Reads the files of all ranks of an iteration's step; raises as ``draw``."""
        first = dump_path(self._folder, iteration + 1)
        paths = sorted(first.parent.glob(first.name.replace("rank0", "rank*"))) or [first]
        dumps = [read_dump(path) for path in paths]
        for path, dump in zip(paths, dumps, strict=True):
            if dump.temperature not in (None, self._temperature):
                raise ConfigError(
                    f"rollout.temperature {self._temperature:g}: {path} was drawn with {dump.temperature:g}, and its "
                    "log-probabilities are of that: set it to the same"
                )
            if dump.vocabulary not in (None, self._vocabulary):
                raise ConfigError(
                    f"rollout.load_dump: {path} was drawn with another tokenizer than that of model.model_path, in "
                    "which its tokens mean something else: take a model of the same tokenizer"
                )
            if not dump.advantages.components and len(dump.rollout):
                raise DataError(f"{path} holds no rewards: it was written by an earlier version; draw it again")
        self._rollout = TextRollout.cat([dump.rollout for dump in dumps])
        self._scores = [
            {name: float(values[row]) for name, values in dump.advantages.components.items()}
            for dump in dumps
            for row in range(len(dump.rollout))
        ]
        sequences = [sequence for sample in self._rollout.sequences for sequence in sample]
        largest = max((int(sequence.token_ids.max(initial=0)) for sequence in sequences), default=0)
        if largest >= len(self._template.tokenizer):
            raise DataError(f"{paths[0]} holds the token {largest}, which the tokenizer of model.model_path has not")
        # tokens of one sample may be of several versions, in a run with partial rollouts
        versions = np.concatenate([sequence.versions[sequence.drawn] for sequence in sequences] or [np.zeros(0)])
        ages = iteration - versions if len(versions) else np.zeros(1)
        self.metrics = {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
        self._step = iteration

    def _build_sample(
        self, request: SampleRequest, sequences: Sequence[TokenSequence], scores: dict[str, float]
    ) -> Sample:
        """A sample as reports show it, with the rewards that it had; dumps hold no texts, so they are decoded."""
        tokens = [sequence.token_ids[sequence.drawn].tolist() for sequence in sequences]
        prompt = sequences[0].token_ids[: int(sequences[0].drawn.argmax())].tolist() if sequences else []
        return Sample(
            prompt=self._template.decode(prompt),
            group_id=request.group_id,
            text="".join(map(self._template.decode, tokens)),
            num_tokens=sum(map(len, tokens)),
            is_truncated=bool(sequences) and sequences[-1].finish_reason == "length",
            scores=scores,
            images=sequences[0].images if sequences else None,
        )
