"""Explanations of JSON text that does not match the grammar of `json_text`.

In: a window of text and a position. Out: the JSON path inside the entry, the exact position, and a complaint.
`json_text` calls this module only after a mismatch, so an error here cannot make it accept invalid text. This
module makes one pass without recursion, so hostile text costs only linear time.
"""

from __future__ import annotations

import re
import sys

from teraio.units import printable_line

Finding = tuple[str, int, str]  # JSON path inside the expected entry, position, complaint

_SPACE = re.compile(r"[ \t\n\r]*+")
# A possessive repetition (`*+`) never gives back text that it has matched, so matching takes linear time.
# Python before 3.11.5 has a bug (python/cpython#106052): a possessive repetition of a group consumes the
# start of an iteration that does not match. For such versions, groups repeat without `+`. Matching can then
# backtrack, which takes some memory.
ONCE = "+" if sys.version_info >= (3, 11, 5) else ""
INSIDE = rf'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}})[^"\\\x00-\x1f]*+)*{ONCE}'
_STRING = re.compile(f'"({INSIDE})"')
_STRING_START = re.compile(f'"{INSIDE}')
_WORD = re.compile(r'[^\s"\[\]{},:]++')
_INTEGER = re.compile(r"0|[1-9][0-9]*+")
_NUMBER = re.compile(r"-?[0-9]++(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]*+)?")
_BAD_NUMBERS = (
    (re.compile(r"-?(?:NaN|nan|Infinity|inf)"), ", which JSON does not have; expected an integer"),
    (re.compile(r"null"), "; leave the key out instead"),
    (re.compile(r"-[0-9]++"), "; expected an integer of at least 0"),
    (re.compile(r"[0-9]++"), "; integers have no leading zero"),
    (_NUMBER, "; expected an integer (bytes and nanoseconds are whole)"),
)
_SPACES = "more white space than one entry may have; write one entry per line"
_CUT = "the text ends here, in the middle; was the file truncated?"


def explain_mismatch(text: str, pos: int, at_end: bool, expected: str) -> Finding:
    """Explain the mismatch at `pos`. `at_end` is True if the text ends where the file ends."""
    match expected:
        case "key" | "name":
            return _find_string_error(text, pos, at_end)
        case "value":
            return _find_value_error(text, pos, at_end, "a number or a string")[:3]
        case _:
            return _find_object_error(text, pos, at_end)


def describe_unexpected_mark(text: str, pos: int, expected: str) -> str:
    """Describe the text at `pos`, where a punctuation mark such as `,` was expected."""
    if pos >= len(text):
        return f"the text ends here; expected {expected}; was the file truncated?"
    if text[pos] in " \t\r\n":
        return _SPACES
    word = _WORD.match(text, pos)
    return f"found {printable_line(word[0] if word else text[pos], 20)}; expected {expected}"


def _find_object_error(text: str, pos: int, at_end: bool) -> Finding:
    """Find the first error in an object that contains no other object."""
    if text[pos : pos + 1] != "{":
        return _describe_unexpected(text, pos, at_end, "an object")
    at, path = _skip_whitespace(text, pos + 1), ""
    if text[at : at + 1] == "}":
        return "", pos, "is an empty object"
    while True:
        key = _STRING.match(text, at)
        if key is None:
            return (path, *_find_string_error(text, at, at_end)[1:])
        path = f".{printable_line(key[1], 40)}"
        at = _skip_whitespace(text, key.end())
        if text[at : at + 1] != ":":
            return _describe_unexpected(text, at, at_end, ":", path)
        _, where, what, end = _find_value_error(
            text, _skip_whitespace(text, at + 1), at_end, "a number, a string or a list of ticks"
        )
        if what:
            return path, where, what
        at = _skip_whitespace(text, end)
        mark = text[at : at + 1]
        if mark != ",":
            return (
                _describe_unexpected(text, at, at_end, ", or }", path)
                if mark != "}"
                else (path, at, "cannot be read here")
            )
        at = _skip_whitespace(text, at + 1)


def _find_value_error(text: str, pos: int, at_end: bool, expected: str) -> tuple[str, int, str, int]:
    """Find the error in one value.

    Return a path (always empty), the error's position, a complaint ("" without an error), and the value's
    end.
    """
    mark = text[pos : pos + 1]
    if mark == '"':
        whole = _STRING.match(text, pos)
        if whole:
            return "", pos, "", whole.end()
        return (*_find_string_error(text, pos, at_end), pos)
    if mark == "[" and "list" in expected:
        return _find_integer_list_error(text, pos, at_end)
    word = _WORD.match(text, pos)
    if word is None:
        return (*_describe_unexpected(text, pos, at_end, expected), pos)
    if word.end() == len(text) and at_end:
        return "", pos, _CUT, pos
    return "", pos, "" if word[0] in ("true", "false") else _integer_complaint(word[0]), word.end()


def _find_integer_list_error(text: str, pos: int, at_end: bool) -> tuple[str, int, str, int]:
    """Find the first error in a list of integers. Return a tuple as `_find_value_error` does."""
    at = _skip_whitespace(text, pos + 1)
    if text[at : at + 1] == "]":
        return "", pos, "", at + 1
    while True:
        word = _WORD.match(text, at)
        if word is None:
            return (*_describe_unexpected(text, at, at_end, "an integer"), at)
        if what := _integer_complaint(word[0]):
            return "", at, _CUT if word.end() == len(text) and at_end else what, at
        at = _skip_whitespace(text, word.end())
        mark = text[at : at + 1]
        if mark == "]":
            return "", pos, "", at + 1
        if mark != ",":
            return (*_describe_unexpected(text, at, at_end, ", or ]"), at)
        at = _skip_whitespace(text, at + 1)


def _integer_complaint(word: str) -> str:
    """Return a complaint about `word`, which stands where an integer must stand. Return "" if `word` is
    valid.
    """
    if _INTEGER.fullmatch(word):
        return (
            "" if len(word) <= 16 else "is a number of more than 16 digits; expected an integer below 2**53"
        )
    for pattern, what in _BAD_NUMBERS:
        if pattern.fullmatch(word):
            return f"is {printable_line(word, 24)}{what}"
    return f"is {printable_line(word, 24)}, which is not JSON; expected an integer"


def _find_string_error(text: str, pos: int, at_end: bool) -> Finding:
    """Explain why the text at `pos` is not a valid string."""
    start = _STRING_START.match(text, pos)
    if start is None:
        return _describe_unexpected(text, pos, at_end, "a string")
    at = start.end()
    if at >= len(text) or (text[at] == "\\" and at + 6 > len(text)):
        return _describe_unexpected(text, len(text), at_end, 'the closing "')
    if text[at] == "\\":
        return "", at, f"a string holds {printable_line(text[at : at + 6])}, which is not an escape"
    return "", at, f"a string holds the control character {printable_line(text[at])}; names are plain text"


def _describe_unexpected(text: str, pos: int, at_end: bool, expected: str, path: str = "") -> Finding:
    """Describe the text at `pos`, where `expected` should be. If the text ends there, say so."""
    if pos >= len(text):
        return path, pos, _CUT if at_end else "one entry is longer than 2**20 characters; no entry needs that"
    mark = text[pos]
    kind = {"[": "is a list", "{": "is an object", '"': "is a string"}.get(mark)
    if mark in " \t\r\n":
        return path, pos, _SPACES
    if kind is None:
        word = _WORD.match(text, pos)
        kind = f"found {printable_line(word[0] if word else mark, 24)}"
    return path, pos, f"{kind}; expected {expected}"


def _skip_whitespace(text: str, pos: int) -> int:
    space = _SPACE.match(text, pos)
    assert space is not None
    return space.end()
