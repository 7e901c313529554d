"""The written forms of dates for the task "dates"; every form is unambiguous."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date

FIRST = date(1900, 1, 1)
LAST = date(2099, 12, 31)
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
    """Return 1 … 99 in words."""
    if number < 20:
        return UNITS[number]
    tens, unit = divmod(number, 10)
    return f"{TENS[tens]}-{UNITS[unit]}".rstrip("-")


def ordinal(number: int) -> str:
    """Return 1 … 31 in words: third, twenty-first."""
    before, dash, last = cardinal(number).rpartition("-")
    return before + dash + IRREGULAR.get(last, f"{last}th")


def nth(number: int) -> str:
    """Return 1 … 31 with its ending: 3rd, 21st."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    if number in (11, 12, 13):
        ending = "th"
    return f"{number}{ending}"


def year(number: int) -> str:
    """Return 1900 … 2099 in words: nineteen eighty-seven, nineteen hundred, nineteen oh five, two thousand and five."""
    century, rest = divmod(number, 100)
    if number == 2000:
        return "two thousand"
    if century == 20 and rest < 10:
        return f"two thousand and {cardinal(rest)}"
    if rest == 0:
        return f"{cardinal(century)} hundred"
    if rest < 10:
        return f"{cardinal(century)} oh {cardinal(rest)}"
    return f"{cardinal(century)} {cardinal(rest)}"


def _month(d: date) -> str:
    return MONTHS[d.month - 1]


def _day(d: date) -> str:
    return DAYS[d.weekday()]


# There are no forms with slashes or with two-digit years, because 04/03/87 is ambiguous. Forms with dots are not: every
# country that uses dots writes the day first.
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
SPELLED = 17  # index of the form that has only words; by far the hardest


def change_spaces(text: str, spacing: int) -> str:
    """Return a text with its spaces unchanged (0, 1), doubled (2) or removed (3), except between two digits."""
    if spacing == 2:
        return text.replace(" ", "  ")
    if spacing == 3:
        return re.sub(r"(?<!\d) | (?!\d)", "", text)
    return text


def is_held_out(day: int) -> bool:
    """Whether a hash holds out a date (days since 1 January 1900): one date in 16 is never used for training."""
    # An integer hash; its constants are arbitrary but must not change, because they decide the split.
    mixed = (day + 1) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) % 16 == 0
