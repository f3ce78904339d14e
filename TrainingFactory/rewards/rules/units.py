"""Units of measurement: their names, kinds and conversion factors."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """Kind of a unit, and its factor to the kind's base unit. Units of different kinds never match."""

    kind: str
    factor: Fraction


def parse_units(text: str) -> tuple[tuple[Unit, ...], int]:
    """Return the possible meanings of the unit at the start of a text (km, m/s^2, miles per hour), and its end."""
    match = _UNIT_PATTERN.match(text)
    units = _find_unit(match["name"]) if match else ()
    if match is None or not units:
        return (), 0
    power = int(match["power"] or 0) or {"sq": 2, "cu": 3}.get((match["shape"] or "")[:2].lower(), 1)
    units = tuple(_raise_to_power(unit, power) for unit in units)
    if match["per"] and (divisor_units := _find_unit(match["per"])):
        divisors = [_raise_to_power(unit, int(match["per_power"] or 1)) for unit in divisor_units]
        return tuple(_divide_units(unit, divisor) for unit in units for divisor in divisors), match.end()
    return units, match.end("power" if match["power"] else "name")


def _divide_units(unit: Unit, divisor: Unit) -> Unit:
    """Divide two units. Money keeps its kind, because a price is often written without the quantity that it is for."""
    return unit if unit.kind in MONEY else Unit(f"{unit.kind}/{divisor.kind}", unit.factor / divisor.factor)


def _raise_to_power(unit: Unit, power: int) -> Unit:
    return unit if power == 1 else Unit(f"{unit.kind}^{power}", unit.factor**power)


def _find_unit(name: str) -> tuple[Unit, ...]:
    """Return the meanings of a unit's name, ignoring case and plural; also of temperatures such as `degrees C`."""
    if temperature := _TEMPERATURE_PATTERN.fullmatch(name):
        name = f"°{temperature[1].upper()}"
    lower_name = name.lower()
    spellings = (name, lower_name, lower_name.removesuffix("s"), lower_name.removesuffix("es"))
    return next((UNITS[spelling] for spelling in spellings if spelling in UNITS), ())


_UNIT_PATTERN = re.compile(
    r" ?(?:(?P<shape>square|sq\.?|cubic|cu\.?) )?"
    r"(?P<name>(?:° ?|deg(?:rees?|\.)? )(?:[CF]\b|celsius\b|fahrenheit\b)|°|[$€£¥₹]|[A-Za-zµΩ]+)(?:\^(?P<power>[23]))?"
    r"(?:(?: ?/ ?| per | an (?=hour))(?P<per>[A-Za-z]+)(?:\^(?P<per_power>[23]))?)?",
    re.I,
)
_TEMPERATURE_PATTERN = re.compile(r"(?:°|deg).*? ?([cf])(?:elsius|ahrenheit)?", re.I)

# kind: names = factor, names = factor. A name may have several meanings. Months and years are a separate kind, because
# their length in days varies; so are bytes that count by 1024.
_UNIT_TABLE = """
length: mm millimeter millimetre = 1/1000, cm centimeter centimetre = 1/100, m meter metre = 1
length: km kilometer kilometre = 1000, inch = 0.0254, ft foot feet = 0.3048, yd yard = 0.9144, mi mile = 1609.344
length^3: ml mL milliliter millilitre = 1/1000000, cl cL centiliter centilitre = 1/100000
length^3: dl dL deciliter decilitre = 1/10000, l L liter litre = 1/1000, gal gallon = 0.003785411784
length^3: qt quart = 0.000946352946, pint = 0.000473176473, cup = 0.0002365882365
length/time: kph kmh kmph = 5/18, mph = 0.44704
mass: mg milligram = 1/1000000, g gram = 1/1000, kg kilogram = 1, ton tonne = 1000
mass: oz ounce = 0.028349523125, lb lbs pound = 0.45359237
time: ms millisecond = 1/1000, s sec second = 1, min minute = 60, h hr hour = 3600
time: day = 86400, week = 604800, fortnight = 1209600
months: mo month = 1, yr year = 12, decade = 120, century centurie = 1200
bytes: B byte = 1, kb kB KB kilobyte = 1e3, mb MB megabyte = 1e6, gb GB gigabyte = 1e9, tb TB terabyte = 1e12
bytes by 1024: B byte = 1, kb kB KB KiB kilobyte = 1024, mb MB MiB megabyte = 1048576
bytes by 1024: gb GB GiB gigabyte = 1073741824, tb TB TiB terabyte = 1099511627776
bits: bit = 1, kb Kb kilobit = 1e3, Mb megabit = 1e6, Gb gigabit = 1e9
power: mW milliwatt = 1/1000, W watt = 1, kw kW kilowatt = 1e3, MW megawatt = 1e6, GW gigawatt = 1e9
energy: J joule = 1, kJ kilojoule = 1e3, MJ megajoule = 1e6, wh = 3600, kwh = 3600000
energy: cal calorie = 4.184, kcal kilocalorie = 4184
frequency: hz hertz = 1, khz = 1e3, mhz = 1e6, ghz = 1e9
voltage: mV millivolt = 1/1000, V volt = 1, kV kilovolt = 1e3
current: mA milliampere milliamp = 1/1000, ampere amp = 1
dollars: $ US$ USD usd dollar buck = 1, cent = 1/100
euros: € EUR eur euro = 1
pounds: £ GBP gbp pound = 1
yen: ¥ JPY jpy yen = 1
rupees: ₹ INR inr rupee = 1
yuan: ¥ CNY cny yuan = 1
celsius: °C C celsius ° degree deg = 1
fahrenheit: °F F fahrenheit ° degree deg = 1
angle: ° degree deg = 1
"""
MONEY = ("dollars", "euros", "pounds", "yen", "rupees", "yuan")
UNITS: dict[str, tuple[Unit, ...]] = {}
for _kind, _units in re.findall(r"^(.+?): (.+)$", _UNIT_TABLE, re.M):
    for _names, _factor in re.findall(r"([^,=]+) = ([^,]+)", _units):
        for _name in _names.split():
            UNITS[_name] = (*UNITS.get(_name, ()), Unit(_kind, Fraction(_factor)))
