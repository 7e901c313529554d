"""Dates as people write them: forms of which each can be read in one way only."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

__all__ = ["FIRST", "FORMS", "LAST", "SPELLED", "held_out", "spaced"]

FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x", "xi", "xii")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = (
    *("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
IRREGULAR = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"},
    **{"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"},
}


def cardinal(number: int) -> str:
    """1 … 99 in words."""
    if number < 20:
        return UNITS[number]
    return TENS[number // 10] + (f"-{UNITS[number % 10]}" if number % 10 else "")


def ordinal(number: int) -> str:
    """1 … 31 in words: third, twenty-first."""
    before, dash, last = cardinal(number).rpartition("-")
    return before + dash + IRREGULAR.get(last, f"{last}th")


def nth(number: int) -> str:
    """1 … 31 with its ending: 3rd, 21st."""
    ending = "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def year(number: int) -> str:
    """1900 … 2099 in words: nineteen eighty-seven, nineteen hundred, nineteen oh five, two thousand and five."""
    century, rest = divmod(number, 100)
    if century == 20 and rest < 10:
        return "two thousand" + (f" and {cardinal(rest)}" if rest else "")
    return f"{cardinal(century)} " + (
        "hundred" if not rest else f"oh {cardinal(rest)}" if rest < 10 else cardinal(rest)
    )


def _month(d: date) -> str:
    return MONTHS[d.month - 1]


def _day(d: date) -> str:
    return DAYS[d.weekday()]


# Numbers between slashes and years of two digits are left out: nobody can tell 04/03/87 for sure. Between dots the day
# is first wherever dots are used.
FORMS: tuple[Callable[[date], str], ...] = (
    lambda d: f"{d.day} {_month(d)} {d.year}",
    lambda d: f"{_month(d)} {d.day}, {d.year}",
    lambda d: f"{_month(d)} {nth(d.day)}, {d.year}",
    lambda d: f"{nth(d.day)} of {_month(d)} {d.year}",
    lambda d: f"the {nth(d.day)} day of {_month(d)}, {d.year}",
    lambda d: f"{_day(d)[:3]} {d.day} {_month(d)[:3]} {d.year}",
    lambda d: f"{_day(d)[:3]}, {d.day:02} {_month(d)[:3]} {d.year}",
    lambda d: f"{_day(d)}, {_month(d)} {d.day}, {d.year}",
    lambda d: f"{_day(d)} the {nth(d.day)} of {_month(d)} {d.year}",
    lambda d: f"{d.year} {_month(d)} {d.day}",
    lambda d: f"{d.day:02}-{_month(d)[:3]}-{d.year}",
    lambda d: f"{_month(d)[:3]}. {d.day}, {d.year}",
    lambda d: f"{d.day}.{ROMAN[d.month - 1]}.{d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d.year}/{d.month:02}/{d.day:02}",
    lambda d: f"{d.year}{d.month:02}{d.day:02}",
    lambda d: d.isoformat(),
    lambda d: f"the {ordinal(d.day)} of {_month(d)}, {year(d.year)}",
    lambda d: f"{_month(d)} the {ordinal(d.day)}, {d.year}",
)
SPELLED = 17  # the form that is all words, by far the hardest


def spaced(text: str, how: int) -> str:
    """A text with its spaces as they are (0, 1), with double ones (2) or with none (3) but between digits."""
    if how == 2:
        return text.replace(" ", "  ")
    if how == 3:
        parts = text.split(" ")
        joined = parts[0]
        for part in parts[1:]:
            joined += (" " if joined[-1:].isdigit() and part[:1].isdigit() else "") + part
        return joined
    return text


def held_out(day: int) -> bool:
    """Whether a date, counted in days from 1 January 1900, is never trained on: one in 16, by a hash of it."""
    mixed = (day + 1) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) % 16 == 0
