"""Writes tests/data/templates/jinja_cases.json: small templates with what Jinja2 makes of them.

Usage: python3 tests/golden/make_jinja_cases.py (needs the package jinja2; 3.1.2 made the committed
file). The settings are those of the transformers library's chat templates; the sandbox is the
mutable one, because some templates call list.append. A template that Jinja2 refuses gets an "error"
member in place of "expected".
"""

import datetime
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = "2026-01-15T12:00:00"
MESSAGES = [{"role": "user", "content": " Hi <b>\u00e9\u4f60\U0001f600 \n"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "n": 1}]},
            {"role": "user", "content": [{"type": "text", "text": "It's \"so\""}]}]
VARIABLES = {
    "words": ["pear", "Apple", "fig", "apple", "Fig"], "numbers": [3, 1, 2, 2], "empty": [],
    "people": [{"name": "Ann", "age": 7, "pet": {"kind": "cat"}},
               {"name": "bob", "age": 5, "pet": {"kind": "dog"}},
               {"name": "Cy", "age": 7}],
    "d": {"b": 1, "A": 2.5, "c": None, "items": "own", "nested": {"x": [1, {"y": True}]}},
    "text": "  the quick-brown (fox) \u00fcber \u0414\u043e\u043c\n\nlast line ", "pi": 3.14159,
    "big": 12345678901234567890, "tiny": 1e-7, "huge": 1e22, "nil": None, "yes": True, "x": 5,
}

EXPRESSIONS = r"""
1 + 2 * 3 - 4
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7.5 // 2, -7.5 % 2
7 / 2, 6 / 2, 2 ** 10, 2 ** -1, 2 ** 3 ** 2
-x ** 2, -x, +x, - - x
1_000 + 0x1f + 0b101 + 0o17
1.5e3, 2.0, 1e16, 123456.789, 0.1 + 0.2, 1e-5, 100000000000000000000.0
big, tiny, huge, pi, big + 1
true, True, false, none, None, nil
"a" ~ 1 ~ none ~ true ~ 1.0 ~ [1]
"a" "b" 'c'
'esc \n\t\\ \' \x41 \u00e9 \q \101'
"ab" * 3, [1, 2] * 2, 2 * "xy"
[1, 'a', "it's", 'q"', "both'\"", none, 2.0, (1,), (), {'k': [1]}]
{'a': 1, 2: 'b', none: true, 1.5: 0, 'a': 3}
"tab\tnl\n\x00\x7f\u200b\xa0\u00e9"|list
[1, 2] + [3], (1,) + (2, 3)
1 == 1.0, 1 == true, "a" == 'a', [1] == [1], (1,) == [1], {'a': 1} == {'a': 1.0}
1 < 2 < 3, 1 < 2 > 5, 3 >= 3 != 4
"a" < "b", [1, 2] < [1, 3], "Z" < "a", 1 < 1.5
"ell" in "hello", 2 in numbers, "b" in d, 9 not in numbers, "x" not in d
not true, not 0 and 1, 0 or "" or "z", 1 and [] and 2, not not x
"t" if x > 3 else "f", ("no" if x > 9), 1 if 0 else 2 if 0 else 3
undefined_name, [undefined_name], undefined_name|length, undefined_name == other_undefined
undefined_name.attribute
undefined_name + 1
undefined_name()
undefined_name < 1
undefined_name is defined, x is defined, d.zzz is defined, nil is defined
undefined_name.zzz is defined
nil.foo, nil['foo'] is defined
x.foo is defined, "s".foo is defined, x[0] is defined
d.b, d['b'], d.nested.x[1].y, d["nested"]["x"][0], d.zzz
d['items'], d.items() | list | length, d.get('items'), d.keys() | list
d.get('b'), d.get('q'), d.get('q', 7), d.get('c', 8)
numbers[0], numbers[-1], numbers[9], numbers.0, numbers["0"] is defined
words[1:], words[:2], words[-2:], words[::2], words[::-1], words[1:-1], words[10:], words[3:1]
text[2:5], text[-5:], text[::-1], text[0], text[-2], "é你😀"[1], "é你😀"[::-1], "é你😀"|length
numbers[1:none], (1, 2, 3)[1:]
"abc"[::0]
text.split(), text.split(' ', 2), text.split('\n'), "a,b,,c".split(','), "".split(), "".split(',')
" a  b c ".split(none, 1), " a  b c ".rsplit(none, 1), "a,b,c".rsplit(',', 1)
"abc".split('')
text.strip(), text.lstrip(), text.rstrip(), "xxaxx".strip('x'), "xyaxy".lstrip('yx'), "aé".rstrip('é')
"\u3000\xa0a\u2003".strip(), "abc".strip('')
text.upper(), text.lower(), text.title(), text.strip().capitalize(), "ß".upper(), "they're x2y".title()
"abc".startswith('ab'), "abc".endswith('bc'), "abc".startswith(('x', 'a')), "abc".endswith('')
"aXbXc".replace('X', '-'), "aXbXc".replace('X', '-', 1), "ab".replace('', '.'), "é".replace('', '.')
"-".join(['a', 'b']), ",".join(words), "".join([])
",".join([1, 2])
"hello".find('l'), "hello".rfind('l'), "hello".find('z'), "hello".index('e'), "hello".count('l'), "éa".find('a')
"hello".index('z')
"abc1".isalnum(), "abc".isalpha(), "12".isdigit(), " ".isspace(), "AB".isupper(), "ab1".islower(), "".isalpha()
"a\nb\r\nc\n".splitlines(), "a=b=c".partition('='), "a=b=c".rpartition('='), "abc".partition('x')
"prefix-x".removeprefix('prefix-'), "x.txt".removesuffix('.txt'), "ab".removeprefix('z')
"ab".center(7), "ab".ljust(5) ~ '|', "ab".rjust(5, '*'), "abc".center(6, '.')
words|length, d|length, "abc"|count
x|length
words|join(', '), words|join, numbers|join('-'), people|join(',', attribute='name'), [none, true, 1.0]|join(' ')
words|first, words|last, empty|first, "abc"|first, "abc"|last
words|sort, words|sort(case_sensitive=true), numbers|sort(reverse=true), people|sort(attribute='age')|map(attribute='name')|list
[1, 'a']|sort
words|unique|list, words|unique(case_sensitive=true)|list, numbers|unique|list
numbers|sum, people|sum(attribute='age'), [0.5, 1]|sum, numbers|max, numbers|min, words|max, empty|max
words|reverse|list, "abc"|reverse, (1, 2)|reverse|list
words|map('upper')|list, words|map('replace', 'p', 'q')|list, people|map(attribute='pet')|list
people|map(attribute='pet.kind')|list
people[:2]|map(attribute='pet.kind')|list, people|map(attribute='nick', default='?')|list
people|selectattr('age', 'equalto', 7)|map(attribute='name')|list, people|rejectattr('age', 'gt', 6)|map(attribute='name')|list
people|selectattr('pet')|list|length, people|selectattr('pet', 'undefined')|list|length
numbers|select('odd')|list, numbers|reject('odd')|list, [0, 1, '', 'a']|select|list, words|reject('equalto', 'fig')|list, numbers|select('in', [1, 3])|list
d|dictsort, {'b': 1, 'A': 2}|dictsort(true), {'b': 1, 'A': 2}|dictsort(by='value', reverse=true)
d|items|list, undefined_name|items|list
x|items|list
d|list, "abc"|list, undefined_name|list
x|list
numbers|batch(3)|list, numbers|batch(3, 0)|list
people|groupby('age')|map('last')|map('length')|list, people|groupby('age')|map('first')|list
x|string, x|string|length, nil|string, 3.0|string, d.b|string ~ '!'
text|trim, "xxaxx"|trim('x'), 5|trim
text|title, "a-b c(d)"|title, "hELLO wORLD"|capitalize, "MiX"|lower, "MiX"|upper
"a.b.a"|replace('a', 'x'), "a.b.a"|replace('a', 'x', 1), 5|replace(5, 6)
"a\nb\n\nc"|indent, "a\nb\n\nc"|indent(2, true), "a\n\nb"|indent(2, blank=true), "a\nb\n"|indent('> '), ""|indent
nil|default('n'), undefined_name|default('u'), ''|default('e', true), undefined_name|d, 0|default(1, boolean=true)
"42"|int, "4.7"|int, "x"|int, "x"|int(9), 3.9|int, -3.9|int, "0x1f"|int(base=16), nil|int, " 7 "|int, true|int
"2.5"|float, "x"|float, 3|float, "1e3"|float, "x"|float(1.5)
2.5|round, 3.5|round, 2.567|round(2), 2.1|round(method='ceil'), 2.9|round(0, 'floor'), 7|round, 1234|round(-2), 0.15|round(1)
-5|abs, -2.5|abs, 5|abs, (-5)|abs
"<a href='x'>&\""|e
"<b>"|escape ~ 1
"<b>"|safe
"%s is %d or %.2f (%5s|%-5s|%05d|%x|%r|%%)"|format('pi', 3, 3.14159, 'r', 'l', 42, 255, 'q')
"%s-%s" % ('a', 1), "%s" % 5, "%(a)s" % {'a': 'b'}
"%d" % 'a'
"%s %s" % ('a',)
"one two  three"|wordcount, "ab"|center(6) ~ '|'
d|attr('get') is callable, d|attr('b') is defined
d|tojson, numbers|tojson, "é\"\\/<>&'\n\t\x01\x7f"|tojson, none|tojson, 1.0|tojson, huge|tojson, big|tojson
d|tojson(indent=2), {}|tojson(indent=2), []|tojson(indent=4), {'a': [], 'b': [1, [2]]}|tojson(indent=1)
d|tojson(separators=(',', ':')), {'b': 1, 'a': 2}|tojson(sort_keys=true), "é😀"|tojson(ensure_ascii=true), (1, 2)|tojson, {1: 2, none: 3, true: 4, 1.5: 5}|tojson
undefined_name|tojson
[undefined_name]|tojson
x is string, "s" is string, x is number, 1.5 is float, x is integer, true is integer, true is number, nil is none
d is mapping, words is iterable, x is iterable, "s" is iterable, words is sequence, d is sequence, x is sequence, undefined_name is iterable
x is odd, x is even, x is divisibleby 5, x is divisibleby(2), x is not even, "ab" is lower, "AB" is upper
x is eq 5, x is equalto 5, x is ne 4, x is gt 4, x is ge 5, x is lt 5, x is le 5, x is in numbers, 2 is in [1, 2], x is sameas 5, nil is sameas none
yes is true, yes is boolean, yes is false, 1 is true, x is not none and x is defined, range is callable, x is callable
"upper" is filter, "nope" is filter
x is nosuchtest
x|nosuchfilter
range(3)|list, range(2, 5)|list, range(10, 0, -3)|list, range(3, -1, -1)|list, range(0)|list
range(1, 2, 0)
dict(a=1, b='x'), dict([('k', 'v')]), dict({'q': 1}, w=2)
namespace(a=1).a, namespace({'z': 2}).z, namespace().nope is defined
strftime_now('%Y-%m-%d'), strftime_now('%d %b %Y %H:%M:%S %A'), strftime_now('%j|%z|%%|%y')
raise_exception('refused')
x()
"a" + 1
1 + "a"
[1] + (2,)
1 / 0
1 % 0
"a" < 1
1 in 5
1 in "a"
{[1]: 2}
d.get()
"a".nosuch()
numbers.index(2), numbers.count(2), words.index('fig'), (1, 2).index(2)
numbers.index(99)
messages[0].content, messages[1].tool_calls[0]['name'], messages|length, messages[2]
messages|map(attribute='role')|unique|join('/'), messages[1].content is none, messages[-1].content is string
(x, 1)[0], (x), (x,), ()
x|string|int + 1, -x|abs, 2 * 3|string, ("a" ~ "b")|upper, "a" ~ "b"|upper
{'a': {'b': [10, 20]}}.a.b[1], {'x': 1}['x'], [[1, 2], [3]][0][1], {'a': 1}.keys()|list
1 if false, [1 if false], (1 if false) is defined
foo.bar if foo is defined else 'none', (foo or {}).bar is defined
'}}' ~ "%}" ~ '{{', {'a': {}}
10 ** 18 * 10 ** 18, 9223372036854775807 + 1, -9223372036854775808 - 1
not x == 5, not (x == 5), x != 5 or x == 5 and false
"abc".upper().lower().title()[0:2].strip().replace('A', 'z')
1.0 // 0.3, 5 // 0.5, 2 ** 0.5, 1e3 == 1000, 7 % 2.5
messages is iterable and messages is not string and messages is not mapping
1 +
(1
{{ }}
a b
1 2
'unclosed
foo(a=1, 2)
x is string is string
"""

TEMPLATES = [
    "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "a\n  {% if true %}  \n  b\n  {% endif %}\nc\n\n",
    "  {{ x }}  \n  {# c #}  \nz",
    "a  {%- if true -%}  b  {%- endif -%}  c",
    "a \n {{- x -}} \n b {{+ x }} c",
    "a\n  {%+ if true +%}\n b\n  {%+ endif %}\nc",
    "x {# comment {{ }} #} y\n{#- strip -#}\n z\n  {# line #}\nq",
    "{% raw %}{{ x }} {% if %}{% endraw %}|{%- raw -%}  a  {%- endraw -%}  b",
    "a\n  {% raw %}\n b\n  {% endraw %}\nc",
    "a\r\nb\rc\n{% if x %}\r\nd{% endif %}\r\n",
    "{ x } {% if x == 5 %}{% {% endif %}", "{ x } {% if x == 5 %}{ % }} %}{% endif %} {",
    "{{ x }}{{ '\\n' }}{{ x }}\n{{ x }}\n\n",
    "\t{% set a = 1 %}\t\n{{ a }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ m.role }};{% endfor %}",
    "{% for n in numbers %}{{ loop.previtem }}<{{ n }}>{{ loop.nextitem }} {{ loop.cycle('a', 'b') }}{{ loop.changed(n) }} {% endfor %}",
    "{% for n in numbers if n > 1 %}{{ loop.index }}:{{ n }}{{ loop.last }} {% else %}none{% endfor %}",
    "{% for n in empty %}x{% else %}none{% endfor %}|{% for n in undefined_name %}x{% else %}u{% endfor %}",
    "{% for n in numbers %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}|{% for n in numbers %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}",
    "{% for n in numbers %}{% break %}{% else %}e{% endfor %}",
    "{% for n in numbers %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% else %}e{% endfor %}",
    "{% for n in numbers %}{% continue %}{% else %}e{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}",
    "{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}",
    "{% for c in 'héy' %}[{{ c }}]{% endfor %}{% for i in 1, 2 %}{{ i }}{% endfor %}",
    "{% for n in numbers recursive %}{{ n }}{{ loop.depth }}{% if n == 3 %}({{ loop([8, 9]) }}){% endif %}{% endfor %}",
    "{% for a in [1, 2] %}{% for b in [3] %}{{ loop.index }}{{ a }}{{ b }}{% endfor %}{{ loop.index }}{% endfor %}{{ loop is defined }}",
    "{% set a = 1 %}{% for i in [1, 2] %}{{ a }}{% set a = i + 10 %}{{ a }}{% endfor %}{{ a }}",
    "{% if true %}{% set a = 1 %}{% endif %}{{ a }}{% if a == 2 %}x{% elif a == 1 %}y{% else %}z{% endif %}",
    "{% set ns = namespace(n=0, seen=[]) %}{% for i in numbers %}{% set ns.n = ns.n + i %}{% set _ = ns.seen.append(i) %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "{% set a, b = 1, 2 %}{{ b }}{{ a }}{% set t = 1, 2 %}{{ t }}{% set (c, e) = (3, 4) %}{{ c + e }}",
    "{% set d.zzz = 1 %}",
    "{% set a %}x{{ x }} y{% endset %}{{ a }}{{ a|length }}{% set b | upper | replace('X', 'z') %}x y{% endset %}{{ b }}",
    "{% filter upper %}abc {{ text|trim }}{% endfilter %}{% filter replace('a', 'b') | title %}aaa{% endfilter %}",
    "{% macro m(a, b=2, c=a) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=5, a=4) }}{{ m() }}{{ m(*[1, 2], **{'c': 9}) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, z=4) }}{{ m(1) }}",
    "{% macro fact(n) %}{{ 1 if n < 2 else n * (fact(n - 1) | int) }}{% endmacro %}{{ fact(10) }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in {{ x }}{% endcall %}",
    "{% macro m(l) %}{% for i in l %}{{ caller(i, b=2) }}{% endfor %}{% endmacro %}{% call(a, b) m([1, 2]) %}{{ a }}{{ b }};{% endcall %}",
    "{% macro m() %}{{ later }}{% endmacro %}{% set later = 7 %}{{ m() }}",
    "{% macro m() %}{% set inner = 1 %}{{ inner }}{% endmacro %}{{ m() }}{{ inner is defined }}",
    "{%- macro m(x) -%}  {{- x -}}  {%- endmacro -%} {{ m('a') + m('b') }} {{ m(1)|length }}",
    "{% with a = 1, b = x %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}",
    "{% generation %}out {{ x }}{% endgeneration %}!",
    "{% set l = [1] %}{% set m = l %}{% set _ = m.append(2) %}{{ l }}{% set _ = l.extend([3]) %}{{ m.pop() }}{{ m.pop(0) }}{{ l }}{% set _ = l.insert(0, 9) %}{{ l }}{% set _ = l.remove(9) %}{{ l }}",
    "{% set q = {'a': 1} %}{% set _ = q.update({'b': 2}) %}{% set _ = q.update(c=3) %}{{ q }}{{ q.pop('a') }}{{ q.pop('zz', 0) }}{{ q.setdefault('n', 5) }}{{ q }}{{ q.values()|list }}",
    "{% set l = [3, 1, 2] %}{% set _ = l.sort() %}{{ l }}{% set _ = l.reverse() %}{{ l }}{% set _ = l.sort(reverse=true) %}{{ l }}", "{{ [].pop() }}",
    "{% if messages[0]['role'] == 'user' and messages[0].content %}{{ messages[0]['content'] | trim }}{% endif %}",
    "{% for m in messages[::-1] %}{% if m.role == 'user' and not loop.first %}{{ loop.index0 }}{% endif %}{% endfor %}",
    "{{ raise_exception('bad ' ~ x) }}",
    "{% for i in [1, 2, 3] -%}\n  {{ i }}\n{%- endfor %}\n\nend",
    "{% for i in x %}{% endfor %}",
    "{% if %}{% endif %}", "{% endif %}", "{% if x %}", "{% for in y %}{% endfor %}", "{% unknown %}",
    "{{ x", "{% if x", "{# open", "{% raw %}x", "{% set true = 1 %}", "{% break %}",
    "{% for i in [1] %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}",
    "{% macro m(a=1, b) %}{% endmacro %}", "{{ x }}}", "{{ {'a': 1}}}", "{{ (x }}", "{{ x) }}",
    "{% call x %}{% endcall %}", "{% if x %}{% else %}{% else %}{% endif %}",
    "{%set a=1%}{{a}}{%if a==1-%} b{%-endif%}", "{{-5}}{{ -5 }}{{ '-' -}}   z",
]


class GenerationTag(jinja2.ext.Extension):
    """Prints the body of {% generation %}, as transformers does outside of training."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def make_environment():
    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag])

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime.fromisoformat(NOW).strftime
    return environment


def render(source):
    """{"template": ..., "expected": ...} or with "error"."""
    variables = json.loads(json.dumps({"messages": MESSAGES, "tools": None, "documents": None,
                                       "add_generation_prompt": True, **VARIABLES}))
    try:
        return {"template": source, "expected": make_environment().from_string(source).render(variables)}
    except Exception as error:  # any failure is the expected outcome
        return {"template": source, "error": f"{type(error).__name__}: {error}"}


def main():
    lines = [line for line in EXPRESSIONS.splitlines() if line]
    cases = [render("{{ " + line + " }}") for line in lines] + [render(t) for t in TEMPLATES]
    content = {"about": f"made by tests/golden/make_jinja_cases.py with Jinja2 {jinja2.__version__}",
               "now": NOW, "messages": MESSAGES, "variables": VARIABLES, "cases": cases}
    path = pathlib.Path(__file__).parents[1] / "data/templates/jinja_cases.json"
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {sum('error' in case for case in cases)} of them refusals")


if __name__ == "__main__":
    main()
