"""Rows of preference data: the two conversations with a better and a worse answer to one prompt."""

from __future__ import annotations

from sfumato.data.text.chat_message import Messages
from sfumato.data.text.format import find_key
from sfumato.data.text.messages import as_turn, read_messages
from sfumato.errors import DataError


def read_pair(row: dict[str, object], keys: list[str], where: str) -> tuple[Messages, Messages]:
    """Both conversations from their beginning. The messages that they share are not in the loss.

    Args:
        row: of the data.
        keys: columns of the prompt, the better and the worse answer; two columns where conversations are whole.
        where: file and row, for messages.

    Returns:
        The conversation with the better answer, and the one with the worse.

    Raises:
        DataError: when they are equal, or differ in more than the assistant's answer.
    """
    *prompt_key, chosen_key, rejected_key = keys
    prompt_value = row.get(prompt_key[0]) if prompt_key else None
    answers = [row[find_key(row, [key], where)] for key in (chosen_key, rejected_key)]
    if prompt_value is None:
        chosen, rejected = (read_messages(answer, where, row.get("system")) for answer in answers)
    else:
        prompt = as_messages(prompt_value, "user", where, row.get("system"))
        chosen, rejected = (_after_prompt(prompt, as_messages(answer, "assistant", where), where) for answer in answers)
    if chosen == rejected:
        raise DataError(f"{where}: {chosen_key} and {rejected_key} are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    for name, messages in ((chosen_key, chosen), (rejected_key, rejected)):
        if shared == len(messages) or messages[shared].get("role") != "assistant":
            raise DataError(
                f"{where}: {chosen_key} and {rejected_key} must differ in the assistant's answer only, but "
                f"message {shared + 1} of {name} is {_role_at(messages, shared)}"
            )
    history = [{**message, "loss_mask": 0} for message in chosen[:shared]]
    return [*history, *chosen[shared:]], [*history, *rejected[shared:]]


def with_explicit_prompt(row: dict[str, object], where: str) -> dict[str, object]:
    """A row of two conversations that both begin with the prompt, with it in the column ``prompt`` and the answers
    alone; any other row is unchanged. Raises as ``read_pair``."""
    chosen_value = row.get("chosen")
    if row.get("completion") is not None or chosen_value is None:
        return row
    begins_with_answer = as_messages(chosen_value, "assistant", where)[0].get("role") == "assistant"
    if begins_with_answer and row.get("prompt") is not None:
        return row
    chosen, rejected = read_pair(row, ["prompt", "chosen", "rejected"], where)
    shared = 0
    while chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise DataError(f"{where}: chosen and rejected share no message, so that there is no prompt")
    return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def as_messages(value: object, role: str, where: str, system: object = None) -> Messages:
    """The messages of a conversation; a text becomes one message of ``role``. ``system`` is as in ``read_messages``."""
    return read_messages(as_turn(value, role), where, system)


def _after_prompt(prompt: Messages, answer: Messages, where: str) -> Messages:
    """The conversation of prompt and answer, where the column of the answer may repeat the prompt."""
    if answer[0].get("role") == "assistant":
        return prompt + answer
    if not all(message in answer for message in prompt):
        raise DataError(f"{where}: an answer that does not begin with the assistant must repeat the prompt")
    return answer


def _role_at(messages: Messages, index: int) -> str:
    return "missing" if index == len(messages) else f"of role {messages[index].get('role')!r}"
