"""Which templates may share a plan between conversations."""

import jinja2
import pytest

from warpbus.models.templates.verbatim import is_verbatim

LOOP = "{% for m in messages %}BODY{% endfor %}"


def judge(source: str) -> bool:
    return is_verbatim(jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "no messages at all",
        LOOP.replace("BODY", "<|{{ m['role'] }}|>\n{{ m['content'] }}"),
        LOOP.replace("BODY", "{{ '<|' + m.role + '|>' ~ m.content + eos_token }}"),
        LOOP.replace("BODY", "{% if m.role | upper == 'USER' and loop.first %}{{ m.content }}{% endif %}"),
        LOOP.replace("BODY", "{% if m['role'] != messages[loop.index0 - 1]['role'] %}{{ m.content }}{% endif %}"),
        LOOP.replace("BODY", "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m['content'] }}"),
        "{% set rest = messages[1:] %}{{ messages[0].content }}{% for m in rest %}{{ m.content }}{% endfor %}",
        "{% if messages | length > 1 %}{{ (messages | last).content }}{% endif %}",
        "{% if messages[-1].role == 'user' %}{{ raise_exception('no') }}{% endif %}",
    ],
)
def test_contents_go_out_as_they_are(source: str) -> None:
    assert judge(source)


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("BODY", "{{ m.content | trim }}"),
        LOOP.replace("BODY", "{{ m.content.strip() }}"),
        LOOP.replace("BODY", "{{ m.content[0] }}"),
        LOOP.replace("BODY", "{{ m.content * 2 }}"),
        LOOP.replace("BODY", "{{ (m.content ~ '') | upper }}"),
        LOOP.replace("BODY", "{% if m.content %}x{% endif %}"),
        LOOP.replace("BODY", "{% if 'x' in m['content'] %}x{% endif %}"),
        LOOP.replace("BODY", "{% set c = m.content %}{{ c | trim }}"),
        LOOP.replace("BODY", "{% set x %}{{ m.content }}{% endset %}{{ x | trim }}"),
        LOOP.replace("BODY", "{% filter upper %}{{ m.content }}{% endfilter %}"),
        LOOP.replace("BODY", "{{ m | tojson }}"),
        LOOP.replace("BODY", "{{ m }}"),
        LOOP.replace("BODY", "{{ m.get('content') }}"),
        LOOP.replace("BODY", "{% for k, v in m.items() %}{{ v | trim }}{% endfor %}"),
        LOOP.replace("BODY", "{% for k in m %}{{ m[k] | trim }}{% endfor %}"),
        LOOP.replace("BODY", "{% set k = 'content' %}{{ m[k] | trim }}"),
        LOOP.replace("BODY", "{{ loop.previtem.content | trim }}"),
        LOOP.replace("BODY", "{{ loop['nextitem'].content | trim }}"),
        LOOP.replace("BODY", "{{ m['content'] }}{{ strftime_now('%S') }}"),
        LOOP.replace("BODY", "{% for c in m.content %}{{ c }}-{% endfor %}"),
        "{% macro f(m) %}{{ m.content }}{% endmacro %}{{ f(messages[0]) | trim }}",
        "{% set n = namespace(m=messages[0]) %}{{ n.m.content | trim }}",
        "{% set n = namespace() %}{% set n.m = messages[0] %}{{ n.m.content | trim }}",
        "{% set a, b = messages[0], 1 %}{{ a.content | trim }}",
        "{% with m = messages[0] %}{{ m.content | trim }}{% endwith %}",
        "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ messages | selectattr('content', 'equalto', 'x') | list | length }}",
        "{{ messages }}",
    ],
)
def test_contents_decide_or_are_changed(source: str) -> None:
    assert not judge(source)
