"""GBNF: which texts a grammar matches, compared with a recognizer that tries everything."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from quire.server.structured.gbnf import parse
from quire.server.structured.gbnf_rules import rules_of
from quire.server.structured.structure import Structure
from tests.server.structured.walk import SPECIALS, TOKENIZER, accepts, ids, matcher


def check(grammar: str, yes: list[str], no: list[str]) -> None:
    structure = Structure(kind="grammar", value=grammar)
    assert [text for text in yes if not accepts(structure, text)] == []
    assert [text for text in no if accepts(structure, text)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (r'root ::= "\u0042\x43\U0001F600"', ["BC😀"], ["BC", r"\u0042"]),
        (r'root ::= "\[" "\]" "\-" "\"" "\\"', ['[]-"\\'], [""]),
        (r'root ::= "\t\r\n"', ["\t\r\n"], ["t"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab"]),
        ('root ::= ("a"?)* "c"', ["c", "aaac"], ["bc"]),
        ("root ::= ( [x]* )*", ["", "x", "xx"], ["y"]),
        ('root ::= (("a"?)* ("b"*)?)+ "c"', ["c", "abbac"], ["dc"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{ 1 , 2 }', ["aabd", "aabbccdd"], ["abd", "aabcccd", "aad"]),
        ('root ::=\n  "yes"\n  | "no"\n  | ( # comment\n "may"\n "be" )', ["yes", "no", "maybe"], ["may"]),
        ('root ::= "a" |\n "b"\nother ::= "c"', ["a", "b"], ["c"]),
        ('# first\nroot ::= x # "no"\n\n\nx ::= "y"\r\n', ["y"], [""]),
        ("root ::= | empty\nempty ::= ", [""], ["x"]),
        ("root ::= [a&&b]+", ["a&", "&&b"], ["c"]),
        ("root ::= [--/a~~c&&b]+", ["a", "-", "b", "~", "c", "&", "."], ["d", "`"]),
        ("root ::= [[:alpha:]+", ["a", "[", ":", "p"], ["b", "]"]),
        (r"root ::= [\[\]^/$.*+?(){}|\\ #]+", ["[]^/$.*+?(){}|\\ #"], ["a"]),
        (r"root ::= [^a-c\n]", ["d", "é", "-"], ["a", "c", "\n", ""]),
        (r"root ::= [^^]", ["a"], ["^"]),
        ("root ::= [a-]+", ["a-"], ["b"]),
        ("root ::= [-a]+", ["a-"], ["b"]),
        (r"root ::= [\x41-\x43\u0100-\u0102\U0001F600-\U0001F610]", ["B", "ā", "😃"], ["D", "é"]),
        ('root ::= ... "abc" ...', ["🔵🟠✅abc❌🟠\n"], ["aaabcccc", "abc"]),
        ("root ::= [ぁ-ゟ]+", ["あい"], ["a"]),
        ('root ::= a-b c_d E1\na-b ::= "1"\nc_d ::= "2"\nE1 ::= "3"', ["123"], ["12"]),
        ('root ::= [a-z]* "b"', ["b", "aab", "abab"], ["a", ""]),
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ac"]),
        ('root ::= "a" root "b" | "a" "bb" | ""', ["ab", "aabb", "abb", ""], ["aab"]),
        ('root ::= word root | word\nword ::= [a-z]+ ";"? ', ["ab", "a;b;c"], [";"]),
        ('root ::= "(" root ")" | [0-9]+ | [0-9]+ "." [0-9]*', ["((12))", "(1.)", "3.4"], ["(1", ".5"]),
        ('root ::= root "a" | "a"', ["a", "aaa"], ["", "b"]),  # left recursion
        ('root ::= x | "b"\nx ::= x "a"', ["b"], ["a", ""]),  # x matches nothing
    ],
)
def test_features(grammar, yes, no):
    check(grammar, yes, no)


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ("root ::= foo", "rule 'foo' is not defined"),
        ('answer ::= "yes"', "there is no rule root"),
        ("root ::= root", "rule root matches no text"),
        ('root ::= "a', "at line 1, '': a closing quote or bracket is missing"),
        ('root ::= "a"\nb ::= [a', "at line 2"),
        ('root ::= ("a"', "closing parenthesis"),
        ('root ::= "a")', "a rule must begin here"),
        ('root ::= "a"{,2}', "must be {n}, {n,} or {n,m}"),
        ('root ::= "a"{3,2}', "the second count is less"),
        (r'root ::= "\q"', r"\q is not an escape"),
        (r'root ::= "\u12"', "4 hexadecimal digits"),
        ("root ::= [z-a]", "ends before it begins"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= <nothing>", "<nothing> is not a special token"),
        ("root ::= *", "not part of a rule"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested more than 200"),
    ],
)
def test_mistakes(grammar, error):
    with pytest.raises(ValueError) as caught:
        matcher(Structure(kind="grammar", value=grammar))
    assert error in str(caught.value)


def test_tokens():
    check(
        "root ::= <tool> name </tool>\nname ::= !</tool>*",
        ["<tool>abc</tool>", "<tool></tool>", "<tool>a</think>b</tool>"],
        ["<tool>abc", "abc</tool>", "<tool></tool></tool>"],
    )
    check(f'root ::= <[{SPECIALS["<tool>"]}]> "x"+', ["<tool>xx"], ["xx", "<tool>"])
    check(f"root ::= (!<[{SPECIALS['<tool>']}]>)+ <tool>", ["a</tool><tool>"], ["<tool>"])


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
PROGRAM = """
root ::= (declaration)*
declaration ::= type space name "(" parameter? ")" "{" statement* "}"
type ::= "int" | "float" | "char"
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= type space name
space ::= [ \\t\\n]+
statement ::=
  type space name ws "=" ws expression ";"
  | "return" ws expression ";"
  | "while" "(" expression ")" "{" statement* "}"
expression ::= term (("+" | "-") term)*
term ::= name | [0-9]+ | "(" expression ")" | name "(" (expression ("," ws expression)*)? ")"
ws ::= ([ \\t\\n]+)?
"""


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (
            JSON,
            ['{"a": [1, -2.5e3, {"x": true}], "b,": "q\\"\\u0041"}', "{}", '{ "a":\n  null }\n'],
            ['{"a":}', '{"a":1,}', "[]", '{"a" 1}', '{"a":01}'],
        ),
        (
            ARITHMETIC,
            ["a1+2=3\n", "(x *2)/y= 7\n\n", "a=b\nc=d\n"],
            ["a=\n", "a+=b\n", "a=b", "(a=b\n"],
        ),
        (
            PROGRAM,
            ["int f(int x){int y = g(x, 2)+(3);return y;}", "", "char a(){while(integer){return 1;}}"],
            ["int f(", "intf(){}", "int f(){return;}"],
        ),
    ],
)
def test_recursive_grammars(grammar, yes, no):
    check(grammar, yes, no)


# ---- differences between llguidance's own converter and ours


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= word "b"\nword ::= [a-z]*\n', "aab"),  # llguidance reads the longest terminal
        ('root ::= x "bc"\nx ::= "a" | "ab"\n', "abc"),
        (ARITHMETIC, "a1+2=3\n"),
        (PROGRAM, "int f(){return 1;}"),  # lines that are broken anywhere
        ("root ::= [a&&b]+\n", "a&"),  # another syntax of sets
        ("root ::= <tool>\n", "<tool>"),
        ('root ::= "a"{2} | "x"{0} "c"\n', "c"),
        ('root ::= ("a"?)* "c"\n', "aac"),
    ],
)
def test_the_librarys_own_converter_reads_less(grammar, text):
    assert accepts(Structure(kind="grammar", value=grammar), text)
    try:
        lark = '%llguidance {"no_forcing": true}' + gbnf_to_lark(grammar).removeprefix("%llguidance {}")
    except Exception:  # it says so with exceptions of any kind
        return
    state = LLMatcher(TOKENIZER, lark, log_level=0)
    assert state.try_consume_tokens(ids(text)) < len(ids(text)) or not state.is_accepting()


def test_a_grammar_is_divided_only_where_terminals_read_into_each_other():
    """A string of JSON is one terminal: by characters, a mask takes a hundred times as long."""
    lark = rules_of(parse(JSON, lambda text: None)).splitlines()
    assert len(lark) < 20
    assert any("bfnrt" in line.replace("\\u{5c}", "") and "{4" in line for line in lark)


# ---- any grammar, compared with a recognizer

ALPHABET = "abc"
EXPRESSIONS = st.recursive(
    st.one_of(
        st.text(ALPHABET, max_size=2).map(lambda text: f'"{text}"'),
        st.sampled_from(["[ab]", "[^a]", ".", "x", "y", "z", "root"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: f"({' '.join(items)})"),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: f"({' | '.join(items)})"),
        st.builds(lambda item, count: f"{item}{count}", inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{0}"])),
    ),
    max_leaves=5,
)


def recognizes(rules: dict, text: str) -> bool:
    """By trying everything: the ends of what an expression matches from a place on, until nothing is added."""
    known: dict[tuple[str, int], set[int]] = {}

    def ends(node, at: int) -> set[int]:
        kind = type(node).__name__
        if kind == "Chars":
            return {at + 1} if at < len(text) and any(a <= ord(text[at]) <= b for a, b in node.ranges) else set()
        if kind == "Ref":
            return known.setdefault((node.name, at), set())
        if kind == "Alt":
            return set().union(*(ends(item, at) for item in node.items))
        if kind == "Seq":
            places = {at}
            for item in node.items:
                places = set().union(*(ends(item, place) for place in places))
            return places
        places, found, seen = {at}, set() if node.least else {at}, set()
        for count in range(1, (node.most if node.most is not None else node.least + len(text) + 1) + 1):
            places = set().union(*(ends(node.item, place) for place in places))
            if count >= node.least:
                found |= places
            if (state := (frozenset(places), count >= node.least)) in seen:
                break
            seen.add(state)
        return found

    changed = True
    while changed:
        ends(rules["root"], 0)
        before = {key: len(value) for key, value in known.items()}
        for name, at in list(known):
            known[name, at] |= ends(rules[name], at)
        changed = before != {key: len(value) for key, value in known.items()}
    return len(text) in ends(rules["root"], 0)


@cache
def texts() -> list[str]:
    found = [""]
    for _ in range(4):
        found += [text + char for text in found[-(3 ** (len(found[-1]))) :] for char in ALPHABET]
    return list(dict.fromkeys(found))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, st.randoms(use_true_random=False))
def test_any_grammar_matches_what_it_says(root, x, y, z, random):
    grammar = f"root ::= {root}\nx ::= {x}\ny ::= {y}\nz ::= {z}"
    rules = parse(grammar, lambda text: None)
    try:
        start = matcher(Structure(kind="grammar", value=grammar))
    except ValueError as error:
        assert "matches no text" in str(error), error
        assert not any(recognizes(rules, text) for text in texts())
        return
    for text in random.sample(texts(), 25):
        state = start.deep_copy()
        accepted = state.try_consume_tokens(list(text.encode())) == len(text) and state.is_accepting()
        assert accepted == recognizes(rules, text), (grammar, text)
