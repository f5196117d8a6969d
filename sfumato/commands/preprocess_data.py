"""``sfumato preprocess``: makes what a run on text would make of its data before the first step, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from sfumato.commands.check_model import made_model
from sfumato.commands.find_task import load_for_task
from sfumato.config.characters import printable
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_reward import TrainTextRewardConfig
from sfumato.data.files.bad_rows import bad_row_limit
from sfumato.data.files.sources import open_sources
from sfumato.data.media.cache import build_media_cache
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.format import build_transform, has_media
from sfumato.data.text.token_store import build_token_store
from sfumato.errors import ConfigError
from sfumato.models.language.load import build_reader
from sfumato.tracking.folder import run_date
from sfumato.tracking.progress import show_progress
from sfumato.tracking.run import quiet_libraries


def preprocess(
    path: str | Path,
    overrides: Mapping[str, object] | None = None,
    task: str | None = None,
) -> Path:
    """Tokenises the data of a configuration and, with ``data.cache_media``, opens its media; a run finds both.

    Args:
        path: the YAML file.
        overrides: laid over it.
        task: which task it is for; None finds out.

    Returns:
        The folder of what was made.

    Raises:
        UserError: when the configuration or the data is wrong, or the task makes nothing beforehand.
    """
    quiet_libraries()
    name, config = load_for_task(path, dict(overrides or {}), task)
    if not isinstance(config, TrainTextConfig):
        raise ConfigError(
            f"sfumato preprocess is for tasks that train on text and what stands in it; tasks/{name}.py makes what it "
            "keeps (data.cache_dir) when it starts"
        )
    data = config.data
    train = config.train
    if data.datasets_type != "mapping":
        raise ConfigError("data.datasets_type iterable keeps nothing: take mapping")
    tokenizer, reader = build_reader(made_model(config.model), train, data.data_type)
    # what changes tokens must be set as in the run itself, or the run would not find these
    facts = facts_of(tokenizer)
    facts.date = run_date(train)
    facts.appends_end = not isinstance(config, TrainTextRewardConfig)
    transform = build_transform(data, tokenizer, reader)
    sources = open_sources(data)
    folder = Path(data.cache_dir or Path(train.output_dir) / "tokens")
    limit = bad_row_limit(data.max_bad_rows, sum(map(len, sources.rows)))
    tokenise = partial(show_progress, label="tokenise")
    store = build_token_store(sources, transform, folder, data.num_workers, limit, _say, tokenise)
    _say(f"{len(store):,} samples of {int(store.lengths.sum()):,} tokens in {folder}")
    if data.cache_media:
        assert has_media(transform)  # the configuration refuses other formats
        open_media = partial(show_progress, label="open media")
        build_media_cache(store, sources.rows, transform, folder, data.num_workers, _say, open_media)
    return folder


def _say(text: str) -> None:
    print(printable(text))
