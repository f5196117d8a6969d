"""``sfumato evaluate``: how good models are, with intervals, beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.generation_options import (
    add_generation,
    add_prompts,
    generation_options,
    parse_natural,
    prompt_choice,
    say,
)
from sfumato.commands.options import parse_positive
from sfumato.config.trust import code_of_configurations
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "evaluate",
        help="score one or several models by rewards, benchmarks or distances, with intervals",
        description="Draws samples of each model for the same prompts and seeds, scores them, and compares every model "
        "with the first: means, and differences over pairs of equal prompt and seed, with 95 % bootstrap intervals.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="as of `sfumato sample`; with --reference also a folder of pictures",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="TYPE",
        help="a reward: its type, a YAML mapping, or module:Class; may be repeated (default: the run's)",
    )
    parser.add_argument("--by", metavar="COLUMN", help="also a mean for each value of a column of the prompts")
    parser.add_argument("--samples", type=parse_positive, default=1, metavar="N", help="of each prompt and model (1)")
    parser.add_argument("--no-base", action="store_true", help="without the model that a run started from")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: evaluation-1, ...)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    distances = parser.add_argument_group("FID and KID of pictures (extra evaluation)")
    distances.add_argument("--reference", type=Path, metavar="FOLDER", help="pictures that those of models are like")
    distances.add_argument(
        "--features",
        type=Path,
        metavar="PATH",
        help="inception-2015-12-05.pt (TorchScript), or the folder of a CLIP or DINOv2 model",
    )
    tasks = parser.add_argument_group("benchmarks of language models by lm-evaluation-harness (extra evaluation)")
    tasks.add_argument("--tasks", metavar="NAME,...", help="tasks of the harness")
    tasks.add_argument("--task-folder", type=Path, metavar="DIR", help="folder with YAML files of further tasks")
    tasks.add_argument("--num-fewshot", type=parse_natural, metavar="N")
    tasks.add_argument("--limit", type=parse_positive, metavar="N", help="the first N documents of each task")
    tasks.add_argument("--apply-chat-template", action="store_true", help="documents as messages of a chat")
    add_prompts(parser)
    add_generation(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluates, prints a table and writes the folder; 0 when it is written."""
    # torch is imported by these
    from sfumato.evaluation.evaluate import evaluate_pictures_in_folders, evaluate_samples, evaluate_tasks
    from sfumato.evaluation.evaluation_folder import print_table, write_evaluation
    from sfumato.evaluation.samples_folder import choose_folder
    from sfumato.evaluation.sources import find_sources, is_picture_folder
    from sfumato.tracking.progress import quiet_libraries

    quiet_libraries()
    prompts = prompt_choice(options)
    settings = generation_options(options)
    if options.features is not None and options.reference is None:
        raise ConfigError("--features is for --reference FOLDER: give both")
    if options.reference is not None and options.features is None:
        raise ConfigError(
            "--reference needs the network that sees pictures: --features inception-2015-12-05.pt for FID as it is "
            "published, or the folder of a CLIP or DINOv2 model"
        )
    if options.tasks is not None and (options.reward or options.reference is not None):
        raise ConfigError("--tasks brings prompts and metrics of its own: leave --reward and --reference out")
    asks = options.prompt or options.prompts or options.num_prompts or options.samples > 1 or options.by
    if options.tasks is not None and asks:
        raise ConfigError(
            "--tasks brings documents of its own: leave --prompt, --prompts, --num-prompts (of tasks --limit), "
            "--samples and --by out"
        )
    of_tasks = options.task_folder or options.num_fewshot or options.limit or options.apply_chat_template
    if options.tasks is None and of_tasks:
        raise ConfigError("--task-folder, --num-fewshot, --limit and --apply-chat-template are for --tasks")
    with code_of_configurations(options.trust_code):
        if options.reference is not None and any(is_picture_folder(Path(name)) for name in options.models):
            if options.reward:
                raise ConfigError("--reward scores what models draw: leave it out for folders of pictures")
            assert options.features is not None  # checked above
            samples = None
            evaluation = evaluate_pictures_in_folders(
                [Path(name) for name in options.models], options.reference, options.features, settings
            )
        else:
            sources = find_sources(options.models, not options.no_base, say)
            if options.tasks is not None:
                samples = None
                evaluation = evaluate_tasks(
                    sources,
                    options.tasks.split(","),
                    settings,
                    task_folder=options.task_folder,
                    num_fewshot=options.num_fewshot,
                    limit=options.limit,
                    with_chat_template=options.apply_chat_template,
                )
            else:
                evaluation, samples = evaluate_samples(
                    sources,
                    prompts,
                    settings,
                    rewards=options.reward,
                    num_samples=options.samples,
                    by=options.by,
                    reference=options.reference,
                    features=options.features,
                    out=options.out,
                )
    folder = choose_folder(options.out, "evaluation") if samples is None else samples.folder
    page = write_evaluation(folder, evaluation, samples)
    print_table(evaluation, options.json)
    say(f"written: {page}")
    return 0
