"""Answers of language models, drawn as the evaluation of a run draws them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from sfumato.config.file_checks import read_json_object
from sfumato.config.paths import find_model_folder
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextDataConfig
from sfumato.config.text_rl import TextRLConfig, TextRLTrainConfig
from sfumato.config.text_rl_data import PLAIN, TextPromptDataConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.loader import open_validation_prompts
from sfumato.data.text.prompt_formats.base import PromptFormat
from sfumato.data.text.prompt_formats.files import Prompts
from sfumato.data.text.prompt_formats.images import ImagePrompts
from sfumato.data.text.prompt_template import PromptTemplate, build_prompt_template
from sfumato.data.text.prompts import TextPrompt, encode_rows, load_text_prompts
from sfumato.errors import ConfigError
from sfumato.evaluation.model_files import check_model_is_here, load_checkpoint
from sfumato.evaluation.options import OF_FOLDERS, GenerationOptions, build_section, follow_run, ignore_line
from sfumato.evaluation.sources import ModelSource, SourceRun, one_process, run_with_prompts
from sfumato.models.language.hf_config import changing_positions, max_positions
from sfumato.models.language.load import build_language_model
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.model_folder import GENERATION
from sfumato.models.lora import remove_adapters
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.engines.settings import Embedded
from sfumato.rollout.kinds.base import DrawnText, LengthLimits, RolloutKind, SampleKeys
from sfumato.rollout.kinds.single_turn import SingleTurn
from sfumato.rollout.text.policy import EVALUATION, build_text_template, stop_tokens
from sfumato.tracking.folder import run_date

if TYPE_CHECKING:
    from sfumato.data.files.row_table import RowTable

DEFAULT_SEED = 42
DEFAULT_NEW_TOKENS = 256
SHORTEST_CONTEXT = 512
"""Tokens of the shortest sequence that an engine is built for; longer ones build another of twice the length."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of the folder of a model that sees."""


@dataclass(frozen=True)
class TextSettings:
    """How answers are drawn."""

    sampling: Sampling
    max_new_tokens: int
    seed: int
    kind: RolloutKind = SingleTurn()  # noqa: RUF009  (it is frozen)
    max_length: int | None = None
    """Tokens of the longest sample, prompt included; None: as the model allows."""

    def describe(self) -> str:
        """One line for people."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return f"the likeliest token each time, at most {self.max_new_tokens} new tokens"
        parts = [f"temperature {sampling.temperature:g}"]
        parts += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        parts += [f"top_k {sampling.top_k}"] if sampling.top_k else []
        return f"{', '.join(parts)}, seed {self.seed}, at most {self.max_new_tokens} new tokens"


class TextModel:
    """A language model with the weights of one source."""

    def __init__(
        self,
        model: LanguageModel,
        template: PromptTemplate,
        data_type: PromptFormat,
        settings: TextSettings,
        say: Callable[[str], None] = print,
    ) -> None:
        """Builds no engine yet.

        Args:
            model: on the device.
            template: renders prompts.
            data_type: reads the rows of prompts.
            settings: how answers are drawn.
            say: takes lines about prompts.
        """
        self.model = model
        self.template = template
        self.data_type = data_type
        self.settings = settings
        self.say = say
        self._engine: Engine | None = None
        self._engine_length = 0
        self._is_for_training = False

    prompts_at_once: ClassVar[int] = 2**31
    """Prompts that are drawn together: all, which the engine batches as it has room."""

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that the model takes; None where it knows no limit."""
        config = self.model.plain.config
        limits = [max_positions(config.get_text_config()), changing_positions(config), self.settings.max_length]
        return min((limit for limit in limits if limit is not None), default=None)

    def engine(self, num_tokens: int, is_for_training: bool = True) -> Engine:
        """An engine for sequences of that length.

        Args:
            num_tokens: of the longest sequence, its prompt included.
            is_for_training: whether answers are to be those that a run would learn from: see ``choose_rows``.

        Raises:
            ConfigError: when the model has not as many positions.
        """
        longest = self.longest
        if longest is not None and num_tokens > longest:
            raise ConfigError(f"a prompt with its answer may have {num_tokens} tokens, and the model takes {longest}")
        if self._engine is None or num_tokens > self._engine_length or is_for_training > self._is_for_training:
            length = SHORTEST_CONTEXT
            while length < num_tokens:
                length *= 2
            length = length if longest is None else min(length, longest)
            length = self.settings.max_length or length
            self._engine = Embedded().build_for_module(self.model.plain, self.model, length, is_for_training)
            self._engine_length = length
            self._is_for_training = is_for_training
        return self._engine

    def flush_engine(self) -> None:
        """Forgets keys and values, since the weights have changed in place."""
        if self._engine is not None:
            self._engine.flush()

    def drop_engine(self) -> None:
        """Forgets the engine, with the keys and values of other weights."""
        self._engine = None

    def limits(self, longest_prompt: int, settings: TextSettings | None = None) -> LengthLimits:
        """The limits of answers to prompts of at most so many tokens, by these settings, or by the model's own."""
        settings = settings or self.settings
        wanted = longest_prompt + settings.max_new_tokens
        whole = settings.max_length or (wanted if self.longest is None else min(wanted, self.longest))
        return LengthLimits(settings.max_new_tokens, whole)

    def draw(self, prompts: Sequence[TextPrompt], ids: Sequence[int], repetition: int = 0) -> list[Sample]:
        """One answer to each prompt.

        Args:
            prompts: B prompts.
            ids: B numbers that key the noise, with the seed.
            repetition: which of several samples of a prompt; it is added to the seed.

        Returns:
            B samples, whose group ids are ``ids``.

        Raises:
            ConfigError: when a prompt is longer than the model takes.
        """
        seed = self.settings.seed + repetition
        keys = [SampleKeys(seed, 0, sample_id, EVALUATION) for sample_id in ids]
        texts = self.draw_texts(prompts, keys, self.settings)
        return [text.sample(prompt, group) for text, prompt, group in zip(texts, prompts, ids, strict=True)]

    def draw_texts(
        self, prompts: Sequence[TextPrompt], keys: Sequence[SampleKeys], settings: TextSettings
    ) -> list[DrawnText]:
        """Answers with their tokens, to B prompts, with the noise of B keys.

        Raises:
            ConfigError: when a prompt is longer than the model takes.
        """
        limits = self.limits(max(len(prompt.token_ids) for prompt in prompts), settings)
        engine = self.engine(limits.max_sequence_tokens)

        async def draw_all() -> list[DrawnText]:
            draws = [
                settings.kind.draw(engine, prompt, key, settings.sampling, self.template, limits)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
            return await asyncio.gather(*draws)

        return [text.mark_unknown_tokens(self.template.without_text) for text in asyncio.run(draw_all())]

    def prompts_of(self, rows: Sequence[Mapping[str, object]]) -> list[TextPrompt]:
        """Prompts of rows that are in memory, as a file would hold them; paths are relative to the working folder.

        Raises:
            DataError: when a row is broken, or has an image that this model does not take.
        """
        table = cast("RowTable", _RowsInMemory(rows))  # it has what is asked for
        # whatever columns the run's own rows have
        data_type = ImagePrompts() if self.template.reader is not None else Prompts()
        return encode_rows(range(len(rows)), table, data_type.read, self.template, self.settings.kind.tools())


class _RowsInMemory:
    """Rows of the command line as a table."""

    def __init__(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> FiledRow:
        return FiledRow(self.rows[index])

    def describe(self, index: int) -> str:
        """The row, for messages."""
        return f"prompt {index + 1}"


def text_models(sources: Sequence[ModelSource], options: GenerationOptions) -> Iterator[tuple[ModelSource, TextModel]]:
    """The models one after the other. Those of one run, and adapters of one model, share what is in memory.

    Raises:
        ConfigError, CheckpointError: when one cannot be loaded.
    """
    device = options.find_device()
    loaded_from: Path | None = None
    text_model: TextModel | None = None
    settings: TextSettings | None = None
    for source in sources:
        architecture = _architecture_folder(source, options)
        if text_model is None or architecture != loaded_from:
            text_model = None  # frees the memory before the next one is loaded
            text_model = _load(source, architecture, options, device, settings)
            settings = text_model.settings  # all are compared by the same ones
            loaded_from = architecture
        take_weights(text_model, source, device)
        yield source, text_model


def find_prompted_run(sources: Sequence[ModelSource]) -> SourceRun:
    """The first run among the sources, whose evaluation answers prompts.

    Raises:
        ConfigError: when there is none, or it has no evaluation data; this is seen before a model is loaded.
    """
    run = run_with_prompts(sources)
    config = run.config
    if not isinstance(config, TextRLConfig):
        if run.task != "train_text":
            raise ConfigError(
                f"{run.folder}: tasks/{run.task}.py answers no prompts in its evaluation: give --prompt TEXT or "
                "--prompts FILE"
            )
        if config.data.eval_path is None and config.data.synthetic is None:
            raise ConfigError(
                f"{run.folder}: the run has no validation prompts, as its data.eval_path is null: give --prompt TEXT "
                "or --prompts FILE"
            )
    return run


def text_prompts(model: TextModel, sources: Sequence[ModelSource], limit: int | None) -> list[TextPrompt]:
    """The prompts of the evaluation of the first run among the sources.

    Args:
        model: renders them.
        sources: models.
        limit: most prompts; None: as many as the run answers.

    Raises:
        ConfigError: when no run is among them, or it has no evaluation data.
        DataError: when the run's data is missing or broken.
    """
    run = find_prompted_run(sources)
    config = run.config
    if isinstance(config, TextRLConfig):
        count = config.eval.num_prompts if limit is None else min(limit, config.eval.num_prompts)
        settings = {"seed": config.train.seed, "tools": model.settings.kind.tools(), "log": ignore_line}
        return load_text_prompts(config.data, model.template, "eval", limit=count, **settings)
    answered = open_validation_prompts(config, model.model.tokenizer, model.model.vision, ignore_line)
    if not answered:
        raise ConfigError(f"{run.folder}: the run has no validation prompts: give --prompt TEXT or --prompts FILE")
    decode = model.template.decode
    return [
        TextPrompt(
            tuple(prompt.input_ids),
            decode(prompt.input_ids, stop=(), is_cut=False),
            None,
            {"answer": decode(prompt.answer, is_cut=False)},
            f"validation prompt {index}",
            images=prompt.images,
        )
        for index, prompt in enumerate(answered[:limit])
    ]


def make_rows_of_words(texts: Sequence[str], images: Sequence[Path]) -> list[dict[str, object]]:
    """Rows of prompts of the command line.

    Args:
        texts: the prompts.
        images: images that precede them: none, one for all of them, or one for each.

    Raises:
        ConfigError: for another number of images.
    """
    if len(images) not in (0, 1, len(texts)):
        raise ConfigError(f"{len(images)} times --image for {len(texts)} prompts: give one, or one for each prompt")
    paths = [*images] * len(texts) if len(images) == 1 else [*images] or [None] * len(texts)
    return [user_row(text, path) for text, path in zip(texts, paths, strict=True)]


def user_row(text: str, image: Path | None) -> dict[str, object]:
    """A row whose prompt is one message of the user, perhaps with an image before the text."""
    if image is None:
        return {"prompt": text}
    parts = [{"type": "image", "path": str(image.absolute())}, {"type": "text", "text": text}]
    return {"prompt": [{"role": "user", "content": parts}]}


def read_text_prompts_file(model: TextModel, path: str, key: str | None, limit: int | None) -> list[TextPrompt]:
    """The prompts of a file, read as the run's data section, or as ``prompts``, says. Raises DataError."""
    longest = model.longest
    data_type = model.data_type
    if key is not None:
        if not isinstance(data_type, Prompts):
            raise ConfigError(
                f"--prompt-key {key}: the run reads its prompts as {data_type.type}, which has no such key"
            )
        data_type = replace(data_type, prompt_key=key)
    fields = {"data_type": data_type, "train_path": path, "eval_path": path, "max_prompt_tokens": longest or 2**20}
    config = build_section(TextPromptDataConfig, fields)
    tools = model.settings.kind.tools()
    return load_text_prompts(config, model.template, "eval", tools=tools, log=model.say)[:limit]


def _architecture_folder(source: ModelSource, options: GenerationOptions) -> Path:
    """The folder of the run or of the model that a model is built of."""
    if source.kind in ("run", "checkpoint"):
        assert source.run is not None
        return source.run.folder
    if source.kind == "transformers":
        return source.folder
    return _base_of(source, options)


def _base_of(source: ModelSource, options: GenerationOptions) -> Path:
    """The folder of the model that adapters belong to. Raises ConfigError where nothing says."""
    if options.base is not None:
        return options.base
    named = read_json_object(source.folder / "adapter_config.json").get("base_model_name_or_path")
    if source.run is not None and source.run.config.model.model_path is not None:
        named = source.run.config.model.model_path
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{source.folder} holds adapters, and nothing says of which model: give its folder as --base")
    folder = Path(find_model_folder(named))
    if not folder.is_dir():
        raise ConfigError(f"{source.folder}: its adapters belong to {named}, which is not here: give --base FOLDER")
    return folder


def _load(
    source: ModelSource,
    architecture: Path,
    options: GenerationOptions,
    device: torch.device,
    settings: TextSettings | None,
) -> TextModel:
    """The model before it takes the weights of a source; ``settings`` are those of the models before it."""
    run = source.run if source.kind in ("run", "checkpoint") else None
    if run is None:
        return _load_folder(architecture, options, device, settings)
    check_model_is_here(run)
    config = run.config
    train = one_process(config.train)
    follow_run(config, device)
    options.refuse(OF_FOLDERS, "on a run, which keeps its own")
    model = build_language_model(
        config.model, train, data_type=config.data.data_type, with_router_loss=not isinstance(config, TextRLConfig)
    )
    model.parallelize(Mesh(Layout(), device), train)
    reader = None if model.vision is None else model.vision.reader
    facts_of(model.tokenizer).date = run_date(config.train)
    if isinstance(config, TextRLConfig):
        template = build_text_template(config, model.tokenizer, reader)
        if options.chat_template is not None:
            asked = _choose_template(model, None, options)
            template = replace(asked, stop=template.stop, without_text=template.without_text)
        elif options.system_prompt is not None:
            template = replace(template, system_prompt=options.system_prompt)
        config.rollout.kind.prepare(template)
        stops = {"stop_token_ids": stop_tokens(template), "stop": template.stop}
        settings = settings or TextSettings(
            Sampling(config.eval.temperature, **stops),
            config.eval.max_new_tokens or config.rollout.max_new_tokens,
            config.eval.seed,
            config.rollout.kind,
            config.max_seq_len,
        )
        return TextModel(model, template, config.data.data_type, replaced_settings(settings, options), options.say)
    data_type = ImagePrompts() if reader is not None else Prompts()
    template = _choose_template(model, config.data, options)
    template = replace(template, stop=tuple(config.eval.stop))
    stops = {"stop_token_ids": stop_tokens(template), "stop": template.stop}
    settings = settings or TextSettings(Sampling(0.0, **stops), config.eval.max_new_tokens, config.train.seed)
    return TextModel(model, template, data_type, replaced_settings(settings, options), options.say)


def _load_folder(
    folder: Path, options: GenerationOptions, device: torch.device, settings: TextSettings | None
) -> TextModel:
    """A model of transformers' own folder."""
    sees = any((folder / name).is_file() for name in PROCESSORS)
    data_type = ImagePrompts() if sees else Prompts()
    section = LanguageModelConfig(model_path=str(folder), dtype=options.dtype_on(device), attention="sdpa")
    train = one_process(TextRLTrainConfig.model_validate({"output_dir": str(folder)}))
    model = build_language_model(section, train, frozen=True, data_type=data_type)
    model.parallelize(Mesh(Layout(), device), train)
    template = _choose_template(model, None, options)
    if settings is None:
        settings = generation_settings(folder, template)
    return TextModel(model, template, data_type, replaced_settings(settings, options), options.say)


def generation_settings(folder: Path, template: PromptTemplate) -> TextSettings:
    """What a folder's ``generation_config.json`` says, as transformers would draw by it."""
    try:
        generation = read_json_object(folder / GENERATION)
    except (OSError, ValueError):  # absent: transformers draws greedily then
        generation = {}
    stops = {"stop_token_ids": stop_tokens(template), "stop": template.stop}
    sampling = Sampling(0.0, **stops)
    if generation.get("do_sample"):
        sampling = Sampling(
            float(generation.get("temperature") or 1.0),
            float(generation.get("top_p") or 1.0),
            int(generation.get("top_k") or 0),
            **stops,
        )
    max_new_tokens = generation.get("max_new_tokens")
    return TextSettings(
        sampling, max_new_tokens if isinstance(max_new_tokens, int) else DEFAULT_NEW_TOKENS, DEFAULT_SEED
    )


def _choose_template(model: LanguageModel, data: TextDataConfig | None, options: GenerationOptions) -> PromptTemplate:
    """The template of prompts: the one asked for, that of a run's ``data``, the tokenizer's own, or none."""
    chosen = options.chat_template or (None if data is None else data.chat_template)
    if chosen is None and not model.tokenizer.chat_template:
        chosen = PLAIN
    fields: dict[str, object] = {"train_path": "-", "eval_path": "-", "chat_template": chosen}
    if data is not None and options.chat_template is None:
        fields["chat_template_options"] = data.chat_template_options
    if chosen != PLAIN:
        fields["system_prompt"] = options.system_prompt
    section = build_section(TextPromptDataConfig, fields)
    return build_prompt_template(section, model.tokenizer, None if model.vision is None else model.vision.reader)


def replaced_settings(settings: TextSettings, options: GenerationOptions) -> TextSettings:
    """Settings with what the options give in their place.

    Raises:
        ConfigError: for an option that changes nothing, since the likeliest token is taken.
    """
    sampling = replace(settings.sampling, **options.given(("temperature", "top_p", "top_k")))
    if sampling.temperature == 0:
        options.refuse(("top_p", "top_k"), "at temperature 0, which takes the likeliest token each time")
    max_new_tokens = options.max_new_tokens or settings.max_new_tokens
    max_length = settings.max_length
    if max_length is not None:  # of a run: room for longer answers than its own
        max_length += max(max_new_tokens - settings.max_new_tokens, 0)
    return replace(
        settings,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        seed=settings.seed if options.seed is None else options.seed,
    )


def take_weights(text_model: TextModel, source: ModelSource, device: torch.device) -> None:
    """Gives a model the weights of a source; those of the run's start, and of a folder, it has already."""
    model = text_model.model
    if source.kind == "checkpoint":
        load_checkpoint(model.trained, source, device)
        # what the engine has tried of the model holds for all of its weights, and takes longer than an answer
        text_model.flush_engine()
    if source.kind == "peft_adapter":
        plain = cast(Any, model.plain)
        remove_adapters(plain)
        plain.load_adapter(str(source.folder))
        plain.eval()
        text_model.drop_engine()
