"""Chat templates that would loop for hours or fill the memory."""

from __future__ import annotations

import resource
import time

import pytest

from sfumato.data.text.chat import build_chat_template
from sfumato.data.text.template_limits import TemplateLimitError, limit_rendering, limit_template
from sfumato.errors import ConfigError, DataError
from sfumato.models.language.parts import build_byte_tokenizer

IN_A_LOOP = "{% set ns = namespace(x=FIRST) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"
BOMBS = {
    "loops within loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "a constant": "{{ 'a' * 6000000000 }}",
    "constants within a list": "{{ ['a' * 1000000] * 100000 }}",
    "a constant of a filter": "{{ 'a'|center(6000000000) }}",
    "a length": "{{ messages[0].content * 6000000000 }}",
    "a method": "{{ messages[0].content.center(6000000000) }}",
    "a filter": "{{ messages|map(attribute='content')|map('center', 6000000000)|list }}",
    "a width": "{{ '{:>6000000000}'.format(messages[0].content) }}",
    "a width that is an argument": "{{ '{:>{}}'.format(messages[0].content, 6000000000) }}",
    "an old width": "{% set n = 6000000000 %}{{ '%*d' % (n, 1) }}",
    "bytes of a number": "{{ (1).to_bytes(6000000000, 'big') }}",
    "replacements": "{% set x = messages[0].content * 1000000 %}{{ x.replace('h', x) }}",
    "a joined text": "{% set x = messages[0].content * 1000000 %}{{ x.join(x) }}",
    "texts that double": IN_A_LOOP.replace("FIRST", "'aaaaaaaa'").replace("NEXT", "ns.x ~ ns.x"),
    "sums that double": IN_A_LOOP.replace("FIRST", "'aaaaaaaa'").replace("NEXT", "ns.x + ns.x"),
    "lists that double": IN_A_LOOP.replace("FIRST", "[1]").replace("NEXT", "[ns.x, ns.x]"),
    "mappings that double": IN_A_LOOP.replace("FIRST", "[1]").replace("NEXT", "dict(a=ns.x, b=ns.x)"),
    "namespaces that double": IN_A_LOOP.replace("FIRST", "[1]").replace("NEXT", "namespace(a=ns.x, b=ns.x)"),
    "numbers that double": IN_A_LOOP.replace("FIRST", "9").replace("NEXT", "ns.x * ns.x"),
    "a power": "{% set n = 99999 %}{{ n ** n ** n }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a loop that calls itself": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "the text itself": "{% set x = messages[0].content * 9000000 %}{% for i in range(99) %}{{ x }}{% endfor %}",
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "length of the template": "a" * 2_000_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_too_much_is_refused_with_the_row(name: str) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = BOMBS[name]
    start = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ConfigError, DataError), match=r"data.chat_template|a\.jsonl, row 3") as caught:
        build_chat_template(None, tokenizer).render([{"role": "user", "content": "hello"}], "a.jsonl, row 3")
    more_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert "made to exhaust" in str(caught.value)
    assert more_kib < 2**20
    assert time.monotonic() - start < 30


SAME = """{%- for m in messages %}{{ '<|' ~ m.role ~ '|>' + m['content'] | trim ~ loop.index ~ loop.last ~ loop.length
}}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ {'a': [1, (2, 3)], 'b': none} | tojson }}
{{ ['a', 'b'] | join(', ') }}{% set a, b = 1, 2 %}{{ a + b * 3 - 1 }}{{ '%s %5d' % ('x', 3) }}{{ '{0:>4}'.format(1) }}
{% macro f(x, y=[1]) %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{% for k, v in {'x': 1}.items() if v %}{{ k }}{% else %}
{% endfor %}{{ undefined_name ~ 'x' }}{% for x in undefined_name %}{% endfor %}{{ messages[1:] | length }}{{ 7 // 2 }}
{% for a in [1, [2, 3]] recursive %}{% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}{% endif %}{% endfor %}"""


def test_what_other_templates_make_stays_the_same() -> None:
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template, render_jinja_template

    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "größer"}]
    plain = _cached_compile_jinja_template(SAME).render(messages=messages, tools=None, documents=None)
    with limit_rendering(SAME):
        texts, _ = render_jinja_template(conversations=[messages], chat_template=SAME)
        marked, spans = render_jinja_template(
            conversations=[messages], chat_template=SAME, return_assistant_tokens_mask=True
        )
    assert texts == marked == [plain]
    assert [plain[start:end] for start, end in spans[0]] == [" hi ", "größer"]


def test_limits_hold_for_what_transformers_renders_by_itself() -> None:
    """They are in the compiled template that it keeps."""
    limit_template(BOMBS["loops within loops"])
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = BOMBS["loops within loops"]
    with pytest.raises(TemplateLimitError):
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
