from __future__ import annotations

import html
import math
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plumbline.report.text import compact, markdown, markdown_code, markdown_table_code, printable, shortened

any_text = st.text(st.characters(exclude_categories=()))
signs = st.text("|\\`<>&*_~$[]()!#-+.: \nab")


def rendered(source: str) -> str:
    """Return what a reader sees of a paragraph or table, by an independent Markdown renderer."""
    renderer = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    page: str = renderer.render(source)
    return page


def seen(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@given(any_text)
@example("\x1b[31mred\x1b[0m \x1b]0;title\x07\u202e\u2028\r\n\t\x00")
def test_nothing_printable_moves_the_terminal(text: str) -> None:
    line = printable(text)
    assert not [sign for sign in line if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    line.encode()


def test_a_colour_leaves_nothing_behind() -> None:
    assert printable("\x1b[1;31mred\x1b[0m\nand \x1b]8;;http://x\x1b\\link") == "red and link"


@given(signs)
def test_markdown_shows_the_text_and_nothing_else(text: str) -> None:
    page = rendered(f"x {markdown(text)} x")
    assert " ".join(seen(page).split()) == " ".join(f"x {printable(text)} x".split())
    assert re.findall(r"<(\w+)", page) == ["p"]


@given(signs)
def test_a_code_span_shows_the_text_and_nothing_else(text: str) -> None:
    page = rendered(f"x {markdown_code(text)} x")
    assert " ".join(seen(page).split()) == " ".join(f"x {printable(text)} x".split())
    assert set(re.findall(r"<(\w+)", page)) <= {"p", "code"}


@given(signs)
def test_a_tables_cell_stays_one_cell(text: str) -> None:
    page = rendered(f"| a | b |\n| --- | --- |\n| {markdown_table_code(text)} | end |\n")
    assert page.count("<td>") == 2
    assert seen(page).split()[2:] == [*printable(text).split(), "end"]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.8, "0.80"),
        (3.2, "3.2"),
        (0.0, "0"),
        (9.96, "10"),
        (99.96, "100"),
        (57.3, "57"),
        (9999.0, "9999"),
        (9999.9, "1.0e4"),
        (2e6, "2.0e6"),
        (1.9e-7, "1.9e-7"),
        (math.inf, "inf"),
        (math.nan, ""),
    ],
)
def test_numbers_are_compact(number: float, shown: str) -> None:
    assert compact(number) == shown


@given(st.floats(-1e300, 1e300))
def test_a_compact_number_is_near_the_number(number: float) -> None:
    assert len(compact(number)) <= len("-1.9e-300")
    assert math.isclose(float(compact(number)), number, rel_tol=0.51, abs_tol=5e-324)


def test_what_is_shortened_ends_with_a_whole_word() -> None:
    assert shortened("call set_epoch before it", 17) == "call set_epoch…"
    assert shortened("call set_epoch before it", 15) == "call set_epoch…"
    assert shortened("in /a/very/long/path", 12) == "in /a/very/…", "but for one that is most of it"


def test_shortening_says_so() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abcde…"
