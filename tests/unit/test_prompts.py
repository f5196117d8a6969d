"""Prompts of RL: which groups an iteration samples, what comes along with them, and which rows are refused."""

import json

import pytest

from sfumato.config.rl import PromptDataConfig
from sfumato.config.sections import GlyphConfig
from sfumato.data.images.prompts import FileSource, Prompt, describe_shared_prompts, load_prompts
from sfumato.data.prompt_loader import PromptLoader, check_prompts
from sfumato.data.synthetic.glyphs import is_held_out
from sfumato.errors import DataError
from sfumato.rewards.ocr import OcrReward


def make_loader(count=10, num_prompts=4, seed=0):
    return PromptLoader(count, num_prompts, group_size=3, seed=seed)


def numbers(loader, iterations):
    return [group for iteration in iterations for group in loader.groups(iteration)]


def config_of(tmp_path, train, evaluation=None, **options):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluation or train))
    paths = {"train_path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "eval.jsonl")}
    return PromptDataConfig(**paths, **options)


def test_groups_are_a_function_of_seed_and_iteration():
    loader, again = make_loader(), make_loader()
    forward = [numbers(loader, [i]) for i in range(12)]
    assert [numbers(again, [i]) for i in reversed(range(12))] == forward[::-1], "whatever was asked before"
    assert numbers(make_loader(seed=1), range(12)) != numbers(loader, range(12))


@pytest.mark.parametrize("num_prompts", [1, 2, 4, 7, 10])
def test_every_epoch_is_another_permutation(num_prompts):
    drawn = numbers(make_loader(num_prompts=num_prompts), range(70))[:70]
    epochs = [drawn[start : start + 10] for start in range(0, 70, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7


def test_more_groups_than_prompts():
    drawn = numbers(make_loader(count=3, num_prompts=8), range(3))
    assert len(drawn) == 24 and all(sorted(drawn[i : i + 3]) == [0, 1, 2] for i in range(0, 24, 3))


def test_other_columns_are_metadata(tmp_path):
    rows = [{"prompt": "a cat", "target": "CAT", "n": 1, "tags": ["x"]}, {"prompt": "a dog"}]
    prompts = load_prompts(config_of(tmp_path, rows), "train")
    assert [prompt.text for prompt in prompts] == ["a cat", "a dog"]
    assert prompts[0].metadata == {"target": "CAT", "n": 1, "tags": ["x"]} and prompts[1].metadata == {}
    assert [prompt.where for prompt in prompts] == [f"{tmp_path / 'train.jsonl'}, line {n}" for n in (1, 2)]
    assert sorted(PromptLoader(len(prompts), 2, 2, 0).groups(0)) == [0, 1]


def test_the_prompt_column_can_be_chosen_and_splits_differ(tmp_path):
    config = config_of(tmp_path, [{"caption": "a", "prompt": 3}], [{"caption": "b"}], prompt_key="caption")
    assert load_prompts(config, "train")[0].metadata == {"prompt": 3}
    assert [prompt.text for prompt in load_prompts(config, "eval")] == ["b"]


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    config = PromptDataConfig(train_path=str(tmp_path / "a.txt"), eval_path=str(tmp_path / "a.txt"))
    assert load_prompts(config, "train") == [
        Prompt("one", {}, f"{tmp_path / 'a.txt'}, line 1"),
        Prompt("two", {}, f"{tmp_path / 'a.txt'}, line 3"),
    ]


def test_a_limit_takes_the_first_and_asks_for_no_more_than_there_are(tmp_path):
    config = config_of(tmp_path, [{"prompt": f"p{i}"} for i in range(5)])
    assert [prompt.text for prompt in load_prompts(config, "eval", 3)] == ["p0", "p1", "p2"]
    with pytest.raises(DataError, match=r"data\.eval_path: has 5 rows, but 6 are asked for \(eval\.num_prompts\)"):
        load_prompts(config, "eval", 6)


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": ""}, {"prompt": 3}])
def test_a_row_without_a_prompt_is_named(tmp_path, row):
    with pytest.raises(DataError) as caught:
        load_prompts(config_of(tmp_path, [{"prompt": "a"}, row]), "train")
    assert str(caught.value).startswith(f"{tmp_path / 'train.jsonl'}, line 2: ") and "'prompt'" in str(caught.value)


def test_a_missing_file_is_named_with_its_option(tmp_path):
    config = PromptDataConfig(train_path=str(tmp_path / "no.jsonl"), eval_path=str(tmp_path / "no.jsonl"))
    for split in ("train", "eval"):
        with pytest.raises(DataError, match=rf"data\.{split}_path: file not found"):
            load_prompts(config, split)


def test_what_rewards_demand_is_checked_naming_file_and_row(tmp_path):
    rows = [{"prompt": 'a sign that says "HI"'}, {"prompt": "a cat", "target": "CAT"}, {"prompt": "a sign"}]
    prompts = load_prompts(config_of(tmp_path, rows), "train")
    check = OcrReward().check_row
    check_prompts(prompts[:2], [check])
    with pytest.raises(DataError) as caught:
        check_prompts(prompts, [lambda *_: None, check])
    message = str(caught.value)
    assert (
        message.startswith(f"{tmp_path / 'train.jsonl'}, line 3: ") and "finds no target for prompt 'a sign'" in message
    )


def test_glyph_prompts_are_training_words_and_held_out_words():
    config = PromptDataConfig(data_type="glyphs", glyphs=GlyphConfig(length=2))
    train, held_out = load_prompts(config, "train"), load_prompts(config, "eval", 20)
    assert not any(is_held_out(prompt.metadata["target"], config.glyphs) for prompt in train)
    assert len(held_out) == 20 and all(is_held_out(prompt.metadata["target"], config.glyphs) for prompt in held_out)
    assert len({prompt.text for prompt in train + held_out}) == len(train) + 20
    assert all(prompt.text == f'write "{prompt.metadata["target"]}"' for prompt in train + held_out)
    check_prompts(train + held_out, [OcrReward().check_row])


def test_prompts_of_the_evaluation_that_are_trained_on_are_said():
    def prompt(text, where, source=None):
        return Prompt(text, {}, where, source)

    trained = [prompt("a cat", "t 1"), prompt("a dog", "t 2"), prompt("a cat", "t 3")]
    [line] = describe_shared_prompts(trained, [prompt("a fox", "e 1"), prompt("a cat", "e 2")])
    assert "1 of the 2 evaluation rows are among the training rows (e 2 is t 1)" in line
    assert describe_shared_prompts(trained, [prompt("A cat", "e 1")]) == []
    image = FileSource([{}], 0, "source_image", 1)  # the same words for another picture
    assert describe_shared_prompts([prompt("make it blue", "t 1", image)], [prompt("make it blue", "e 1", image)]) == []
